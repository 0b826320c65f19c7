"""The trainings that `benchmarks.resume_matrix` saves and goes on with."""

from collections.abc import Callable, Iterator, Sequence
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
    """The same batches in every epoch; it goes on where it was."""

    def __init__(self) -> None:
        self._position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        start, self._position = self._position % BATCHES, 0
        for i in range(start, BATCHES):
            self._position = i + 1
            yield torch.randn(4, 8, generator=torch.Generator().manual_seed(i))

    def state_dict(self) -> dict[str, int]:
        """Returns how many batches of the epoch were handed out."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on after those."""
        self._position = state["position"]


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


def run(
    precision: str,
    epochs: int,
    resume: Path | None = None,
    save: Path | None = None,
    module: type[Pair] = Pair,
    callbacks: Sequence[Callback] = (),
) -> Look:
    """Trains, from a checkpoint if one is given, and saves one if that is wanted.

    Args:
        precision: One of `PRECISIONS`.
        epochs: How many in all, those before the checkpoint included.
        resume: The checkpoint to go on from.
        save: Where to save one at the end.
        module: What to train.
        callbacks: What looks on.
    """
    look = Look()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        plugins=[PRECISIONS[precision]()],
        callbacks=[*callbacks, look],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(), Data(), ckpt_path=resume, weights_only=None if resume is None else True)
    if save is not None:
        trainer.save_checkpoint(save)
    return look


def equal(left: dict[Any, Tensor], right: dict[Any, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k].double(), right[k].double()) for k in left)
