"""Every callback, named in YAML, in a plain module: at each level, under other precisions, however a Trainer is set."""

import csv
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.callbacks import AmpReport, ImageGrid, LossScaleMonitor, NonFiniteReport
from tests.helpers.clean_process import in_clean_process
from tests.helpers.modules import Scripted, amp, fit

CALLBACKS = """
- class_path: lightning_amp.callbacks.LossScaleMonitor
  init_args: {every_n_batches: 2}
- class_path: lightning_amp.callbacks.GradientClipping
  init_args: {values: 0.5, algorithm: norm}
- class_path: lightning_amp.callbacks.NonFiniteReport
  init_args: {locate: true, restore_buffers: true, limit: 2}
- class_path: lightning_amp.callbacks.EMAWeights
  init_args: {decay: 0.9}
- class_path: lightning_amp.callbacks.ImageGrid
  init_args: {noise_shape: [4], generator: net, folder: pictures, every_n_batches: 2, count: 4}
- class_path: lightning_amp.callbacks.AmpReport
  init_args: {file: report.html, every_n_batches: 2}
"""
PRECISIONS: dict[str, dict[str, Any]] = {
    level: {"plugins": {"class_path": "lightning_amp.AmpPrecision", "init_args": {"opt_level": level}}}
    for level in ("O0", "O1", "O2", "O3")
} | {name: {"precision": name} for name in ("32-true", "bf16-mixed")}
LOGGERS = [
    {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}},
    {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "logs"}},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "two loggers": {"logger": LOGGERS},
    "validation between": {"logger": False, "val_check_interval": 3},
    "fast dev run": {"fast_dev_run": True},
    "accumulation": {"logger": False, "accumulate_grad_batches": 3},
}


class Painter(pl.LightningModule):
    """One network, one optimizer, automatic optimization; nothing in it knows this package."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Unflatten(1, (1, 2, 2)))
        self.validated = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-4)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(8 * 4, 4), batch_size=4)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(torch.randn(4, 4), batch_size=4)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Batch .* skipped a step")
@pytest.mark.parametrize(
    ("precision", "setting"),
    [(p, "two loggers") for p in PRECISIONS]
    + [(p, s) for p in ("O1", "32-true") for s in SETTINGS if s != "two loggers"],
)
def test_all_callbacks_from_yaml_in_a_plain_module(
    precision: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config: dict[str, Any] = {"callbacks": yaml.safe_load(CALLBACKS), "accelerator": "cpu", "max_epochs": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    config |= quiet | PRECISIONS[precision] | SETTINGS[setting]
    cli = LightningCLI(Painter, save_config_callback=None, args=["fit", f"--trainer={json.dumps(config)}"])  # type: ignore[arg-type]
    trainer, module = cli.trainer, cli.model
    assert all(p.isfinite().all() for p in module.parameters())
    assert module.validated > 0
    batches = 1 if setting == "fast dev run" else 8
    page = (tmp_path / "report.html").read_text()
    assert f"<b>{batches}</b><span>batches</span>" in page
    drawn = sorted(int(p.stem.rpartition("_")[2]) for p in (tmp_path / "pictures").iterdir())
    assert drawn == list(range(2, batches + 1, 2)) or drawn == [1]
    scaled = precision in ("O1", "O2", "O3") and setting != "fast dev run"
    found = {name for name in trainer.callback_metrics if name.startswith("amp/")}
    assert ("amp/scale/optimizer_0" in found) is scaled
    if setting == "two loggers":
        assert_logged(trainer, scaled)


def assert_logged(trainer: pl.Trainer, scaled: bool) -> None:
    """In both loggers, or, without scales, in none."""
    csv_logger, board = trainer.loggers
    assert isinstance(csv_logger, CSVLogger)
    assert isinstance(board, TensorBoardLogger)
    board.experiment.flush()
    csv_logger.save()
    file = Path(csv_logger.log_dir) / "metrics.csv"
    names = csv.DictReader(file.open()).fieldnames if file.exists() else []
    assert ("amp/scale/optimizer_0" in (names or [])) is scaled
    (events,) = Path(board.log_dir).glob("events*")
    content = events.read_bytes()
    assert (b"amp/scale/optimizer_0" in content) is scaled
    assert b"samples" in content


# Two processes


class Audited(pl.Callback):
    """Leaves, for each process, what it wrote, what it warned of, and what its callbacks know.

    Args:
        folder: Where everything is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: list[str] = []
        self.caught: list[Any] = []

    def setup(self, *_: Any, **__: Any) -> None:
        warnings.showwarning = lambda message, *_: self.caught.append(str(message))
        sys.addaudithook(self._note)

    def _note(self, event: str, args: Any) -> None:
        if event == "open" and str(args[0]).startswith(str(self.folder)) and set(args[1] or "") & set("wax"):
            self.written.append(str(args[0]))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        known = {
            "written": [Path(path).name for path in self.written],
            "warned": [text for text in self.caught if "skipped a step" in text],
            "metrics": {n: v.item() for n, v in trainer.callback_metrics.items() if n.startswith("amp/")},
        }
        (self.folder / f"known_{trainer.global_rank}.json").write_text(json.dumps(known))


def fit_two(folder: Path) -> None:
    def step(module: Any, batch: Tensor, batch_idx: int) -> Tensor:
        bad = torch.inf if batch_idx == 2 and module.global_rank == 1 else 1.0
        loss: Tensor = module.net(batch * bad).square().mean()
        return loss

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Unflatten(1, (1, 2, 2)))
    module = Scripted(step, lambda m: torch.optim.SGD(m.parameters(), 0.1), automatic=True, net=net)
    callbacks = [
        Audited(folder),
        LossScaleMonitor(1),
        NonFiniteReport(locate=True),
        ImageGrid([4], generator="net", every_n_batches=2, count=4),
        AmpReport(),
    ]
    fit(
        module, amp("O1"), [torch.randn(2, 4) for _ in range(4)], callbacks=callbacks, devices=2,
        strategy=DDPStrategy(start_method="fork"), logger=CSVLogger(folder), default_root_dir=folder,
    )  # fmt: skip


def test_c86_of_two_processes_the_first_writes_and_the_one_with_the_bad_batch_says_where(tmp_path: Path) -> None:
    in_clean_process(fit_two, tmp_path)
    first, second = (json.loads((tmp_path / f"known_{rank}.json").read_text()) for rank in range(2))
    assert {"amp_report.html", "samples_000002.png", "samples_000004.png"} <= set(first["written"])
    assert second["written"] == []
    assert len(list(tmp_path.glob("**/metrics.csv"))) == 1
    assert second["metrics"] == first["metrics"]
    assert first["metrics"]["amp/skipped/optimizer_0"] == 1.0
    (there,), (here,) = second["warned"], first["warned"]
    assert there.startswith("Process 1: Batch 2: optimizer 0 skipped a step.")
    assert "first non-finite output came from net.0 (Linear), whose input was non-finite already" in there
    assert here.startswith("Batch 2: optimizer 0 skipped a step.")
    assert "the overflow is in the backward pass, or in another process" in here
