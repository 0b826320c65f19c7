"""Who can go on from whose checkpoint: every opt level and Lightning's own precisions, each from each.

    python -m benchmarks.resume_matrix     # about ten seconds on one core

Two networks train with two Adam optimizers, are saved, and go on under every other precision. Each cell is measured:
weights and Adam's moments are compared bit for bit with what is in the file, and where both sides are the same the
training is also compared with one that was not interrupted.
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from lightning_amp.precision import AmpPrecision

BATCHES = 4
SCALE = 1024.0


def _ours(level: str) -> Callable[[], Precision]:
    return lambda: AmpPrecision(level, init_scale=SCALE, growth_interval=3)  # type: ignore[arg-type]


def _stock_half() -> Precision:
    # On the CPU precision="16-mixed" would become bfloat16.
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3))


PRECISIONS: dict[str, Callable[[], Precision]] = {
    "O0": _ours("O0"),
    "O1": _ours("O1"),
    "O2": _ours("O2"),
    "O3": _ours("O3"),
    "32-true": Precision,
    "16-mixed": _stock_half,
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
}


class Pair(pl.LightningModule):
    """A generator and a discriminator, each with an Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, _: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.d(self.g(batch)).tanh().mean() * sign)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-4) for net in (self.g, self.d)]


class Data:
    """The same batches in every epoch."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(BATCHES):
            yield torch.randn(4, 8, generator=torch.Generator().manual_seed(i))


def _snapshot(trainer: pl.Trainer) -> dict[str, Any]:
    plugin = trainer.precision_plugin
    scales = plugin.loss_scales() if isinstance(plugin, AmpPrecision) else {}
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        scales = {"": plugin.scaler.get_scale()}
    return {
        "weights": {name: t.clone() for name, t in trainer.lightning_module.state_dict().items()},
        "moments": [
            {(i, n): v.clone() for i, state in o.state_dict()["state"].items() for n, v in state.items()}
            for o in trainer.optimizers
        ],
        "scales": sorted(set(scales.values())),
    }


class Look(Callback):
    """Takes the state at the first step, after loading, and at the end."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = _snapshot(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.end = _snapshot(trainer)


def run(precision: str, epochs: int, resume: Path | None = None, save: Path | None = None) -> Look:
    """Trains, from a checkpoint if one is given, and saves one if that is wanted.

    Args:
        precision: One of `PRECISIONS`.
        epochs: How many in all, those before the checkpoint included.
        resume: The checkpoint to go on from.
        save: Where to save one at the end.
    """
    look = Look()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        plugins=[PRECISIONS[precision]()],
        callbacks=[look],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Pair(), Data(), ckpt_path=resume, weights_only=None if resume is None else True)
    if save is not None:
        trainer.save_checkpoint(save)
    return look


def _equal(left: dict[Any, Tensor], right: dict[Any, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k].double(), right[k].double()) for k in left)


@dataclass(frozen=True)
class Cell:
    """What one precision made of another's checkpoint.

    Attributes:
        weights: Whether they are those of the file, bit for bit.
        moments: Whether Adam's are; ``"half"`` where they are those of the file rounded to half.
        scale: ``"goes on"``, ``"anew"``, or ``"-"`` where there is none.
        finite: Whether the weights are finite one epoch later.
        exact: Whether that epoch ended as without the interruption, bit for bit; None between different precisions.
        warnings: What AmpPrecision said of what it left out.
    """

    weights: bool
    moments: bool | str
    scale: str
    finite: bool
    exact: bool | None
    warnings: list[str]

    @property
    def ok(self) -> bool:
        """Whether all is as it can be."""
        return self.weights and bool(self.moments) and self.finite and self.exact is not False

    def __str__(self) -> str:
        if not self.ok:
            return "WRONG"
        what = "exact" if self.exact else "all" if self.moments is True else "rounded"
        return what + {"anew": ", scale anew", "goes on": ", scale", "-": ""}[self.scale]


def measure(saved: str, resumed: str, folder: Path) -> Cell:
    """Goes on with one precision from the checkpoint of another.

    Args:
        saved: The precision that saved; its checkpoint is ``{folder}/{saved}.ckpt``.
        resumed: The precision that goes on.
        folder: Where checkpoints are.
    """
    path = folder / f"{saved}.ckpt"
    file = torch.load(path, weights_only=True)
    moments = [
        {(i, n): v for i, state in o["state"].items() for n, v in state.items()} for o in file["optimizer_states"]
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        look = run(resumed, 2, resume=path)
    same = all(_equal(a, b) for a, b in zip(look.start["moments"], moments, strict=True))
    halved = [{k: v.half() if k[1] != "step" else v for k, v in mine.items()} for mine in moments]
    rounded = all(_equal(a, b) for a, b in zip(look.start["moments"], halved, strict=True))
    was = torch.load(folder / f"{saved}.scales", weights_only=True)
    now = look.start["scales"]
    exact = None
    if saved == resumed:
        whole = run(saved, 2).end
        exact = _equal(whole["weights"], look.end["weights"]) and whole["scales"] == look.end["scales"]
    return Cell(
        weights=_equal(look.start["weights"], file["state_dict"]),
        moments=same or ("half" if resumed == "O3" and rounded else False),
        scale="-" if not _scaled(resumed) else "goes on" if now and min(was, default=0) == min(now) else "anew",
        finite=all(bool(t.isfinite().all()) for t in look.end["weights"].values()),
        exact=exact,
        warnings=[str(w.message) for w in caught if "AmpPrecision went on" in str(w.message)],
    )


def _scaled(precision: str) -> bool:
    return precision in ("O1", "O2", "16-mixed")


def prepare(folder: Path) -> None:
    """Trains one epoch under each precision and saves.

    Args:
        folder: Where the checkpoints go.
    """
    for name in PRECISIONS:
        look = run(name, 1, save=folder / f"{name}.ckpt")
        torch.save(look.end["scales"] if _scaled(name) else [], folder / f"{name}.scales")


def main() -> int:
    """Prints the matrix; the exit status tells whether every cell is as it should be."""
    names = list(PRECISIONS)
    width = 18
    print("saved by".ljust(12) + "resumed by\n" + " " * 12 + "".join(name.ljust(width) for name in names))
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        for saved in names:
            cells = [measure(saved, resumed, folder) for resumed in names]
            wrong += sum(not cell.ok for cell in cells)
            print(saved.ljust(12) + "".join(str(cell).ljust(width) for cell in cells), flush=True)
    print(
        "\nexact    goes on as if never interrupted, bit for bit\n"
        "all      weights and Adam's moments are those of the file, bit for bit\n"
        "rounded  weights likewise; O3 keeps Adam's moments in half, so they are those of the file rounded to half\n"
        "scale    the loss scale goes on from the file, or anew from its start"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    sys.exit(main())
