"""A training that was saved and goes on ends, bit for bit, where one that was not interrupted does."""

import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from tests.helpers.clean_process import in_clean_process
from tests.helpers.resuming import BATCHES, OVERFLOW, Duel, Spec, Watch, differences, path_of, train

ROOT = Path(__file__).resolve().parents[1]
HALF = BATCHES
"""After this many batches of twenty."""

POINTS = {"before the first step": 0, "mid-epoch": 4, "right after an overflow": OVERFLOW + 1}
WINDOW_POINTS = [2, OVERFLOW + 1, 8, 9, BATCHES + 3]
"""Windows are 4, 4 and 2 batches long: in the first, after an overflow, between two, in the last, in a later epoch."""

HALF_LEVELS, DTYPES = ("O1", "O2", "O3"), ("float16", "bfloat16")
SPECS = [Spec("O0"), *(Spec(level, dtype) for level in HALF_LEVELS for dtype in DTYPES)]
SPECS += [Spec(spec.level, spec.dtype, automatic=True) for spec in SPECS]
WINDOWS = [Spec(level, automatic=True, window=4) for level in ("O0", *HALF_LEVELS)]


def each(*specs: Spec) -> Any:
    return pytest.mark.parametrize("spec", specs, ids=lambda spec: spec.name)


class Runs:
    """Trainings of twenty batches that save on their way; each runs once, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Spec, Watch] = {}

    def __getitem__(self, spec: Spec) -> Watch:
        if spec not in self._known:
            points = WINDOW_POINTS if spec in WINDOWS else [*POINTS.values(), HALF]
            self._known[spec] = train(spec, folder=self._folder / spec.name, save_after=points)
        return self._known[spec]

    def path(self, spec: Spec, batches: int) -> Path:
        assert self[spec]
        return path_of(self._folder / spec.name, batches)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def elsewhere(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[Spec, dict[str, Any]]:
    """The end states of all trainings after a new process took them up half-way."""
    jobs = tmp_path_factory.mktemp("elsewhere") / "jobs.pt"
    torch.save([(asdict(spec), str(runs.path(spec, HALF))) for spec in SPECS], jobs)
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.resuming", str(jobs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(SPECS, torch.load(f"{jobs}.done", weights_only=True), strict=True))


@each(*SPECS)
def test_c67_a_new_process_goes_on_bit_for_bit(spec: Spec, runs: Runs, elsewhere: dict[Spec, dict[str, Any]]) -> None:
    assert differences(runs[spec].end, elsewhere[spec]) == []


@each(*SPECS)
@pytest.mark.parametrize("point", POINTS)
def test_c68_a_training_goes_on_from_anywhere_bit_for_bit(spec: Spec, point: str, runs: Runs) -> None:
    resumed = train(spec, runs.path(spec, POINTS[point]))
    assert differences(runs[spec].end, resumed.end) == []


@each(*WINDOWS)
@pytest.mark.parametrize("batches", WINDOW_POINTS)
def test_an_open_accumulation_window_is_finished_bit_for_bit(spec: Spec, batches: int, runs: Runs) -> None:
    """Lightning by itself drops the gradients of the window."""
    resumed = train(spec, runs.path(spec, batches))
    assert differences(runs[spec].end, resumed.end) == []


class Infinite(Duel):
    """The batch that overflows has an infinite loss, which no scale can cure: the scale stays."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, factor = batch
        return super().training_step((x, factor if factor == 1 else factor * torch.inf), batch_idx)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_open_window_remembers_that_a_loss_was_infinite(level: str, tmp_path: Path) -> None:
    spec = Spec(level, automatic=True, window=4)
    whole = train(spec, folder=tmp_path, save_after=[OVERFLOW + 1], module=Infinite(automatic=True))
    resumed = train(spec, path_of(tmp_path, OVERFLOW + 1), module=Infinite(automatic=True))
    assert whole.end["plugin"]["scalers"]["optimizer_0"]["bad_losses"] > 0
    assert differences(whole.end, resumed.end) == []


class Norms(Callback):
    """The norms of the first network's true gradients before each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        grads = [p.grad.float().norm() for p in pl_module.d.parameters()]
        self.seen.append(float(torch.stack(grads).norm()))


@pytest.fixture(scope="module")
def whole_norm() -> float:
    whole = Norms()
    train(Spec("O0", automatic=True, window=4), callbacks=[whole], max_epochs=1)
    return whole.seen[0]


@pytest.mark.parametrize("saved", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_open_window_is_finished_at_another_level(saved: str, level: str, runs: Runs, whole_norm: float) -> None:
    resumed = Norms()
    path = runs.path(Spec(saved, automatic=True, window=4), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what of the scales fits is told elsewhere
        train(Spec(level, automatic=True, window=4), path, callbacks=[resumed], max_epochs=1)
    assert resumed.seen[0] == pytest.approx(whole_norm, rel=0.01)


def test_c71_scales_counters_and_settings_are_saved_for_each_loss(runs: Runs) -> None:
    state = torch.load(runs.path(Spec("O2"), OVERFLOW + 1), weights_only=True)["AmpPrecision"]
    assert set(state["scalers"]) == {"loss_0", "loss_1", "loss_2"}
    d, g = state["scalers"]["loss_0"], state["scalers"]["loss_2"]
    assert (d["scale"], d["clean"], d["overflows"], d["attempts"]) == (1024.0, 0.0, 1.0, OVERFLOW + 1)
    assert (g["scale"], g["clean"], g["overflows"], g["attempts"]) == (2048.0, 3.0, 0.0, OVERFLOW + 1)
    assert state["settings"]["growth_interval"] == 4
    assert [o["skipped"] for o in state["optimizers"]] == [1, 0]


@each(Spec("O1"), Spec("O2"), Spec("O3"))
def test_saving_changes_nothing(spec: Spec, runs: Runs) -> None:
    assert differences(runs[spec].end, train(spec).end) == []


class Interrupt(Callback):
    """Raises after so many batches. While one is trained a data loader would have counted it as done already."""

    def __init__(self, batches: int, error: type[BaseException]) -> None:
        self.batches, self.error = batches, error

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch * BATCHES + batch_idx + 1 == self.batches:
            raise self.error("stop")


@each(Spec("O1"), Spec("O2"), Spec("O2", automatic=True), Spec("O3", automatic=True))
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_checkpoint_on_exception_is_gone_on_with(
    spec: Spec, error: type[BaseException], runs: Runs, tmp_path: Path
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="stopped", save_on_exception=True, every_n_train_steps=1000)
    with pytest.raises((error, SystemExit)):
        train(spec, callbacks=[keep, Interrupt(13, error)], enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    assert differences(runs[spec].end, train(spec, path).end) == []


@each(Spec("O1"), Spec("O2", automatic=True))
def test_save_last_is_gone_on_with(spec: Spec, runs: Runs, tmp_path: Path) -> None:
    last = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=3)
    with pytest.raises(RuntimeError, match="stop"):
        train(spec, callbacks=[last, Interrupt(15, RuntimeError)], enable_checkpointing=True)
    assert differences(runs[spec].end, train(spec, tmp_path / "last.ckpt").end) == []


def without_running_means(end: dict[str, Any]) -> dict[str, Any]:
    weights = {name: w for name, w in end["weights"].items() if not name.startswith("g.1.")}
    return {**end, "weights": weights, "as they are": None}


def train_two(level: str, resume: Path | None, folder: Path) -> None:
    strategy = DDPStrategy(start_method="fork", find_unused_parameters=True)
    train(Spec(level), resume, folder, [13], devices=2, strategy=strategy)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_processes_go_on_bit_for_bit(level: str, tmp_path: Path) -> None:
    """A checkpoint holds the first rank's running means alone; in manual optimization each rank has its own."""
    ends = []
    for resume in (None, path_of(tmp_path, 13)):
        in_clean_process(train_two, level, resume, tmp_path)
        ends.append([torch.load(tmp_path / f"end of rank {rank}.pt", weights_only=True) for rank in (0, 1)])
    (first, second), (first_again, second_again) = ends
    assert differences(first, first_again) == []
    assert differences(without_running_means(second), without_running_means(second_again)) == []
    assert differences(without_running_means(first), without_running_means(second)) == []
