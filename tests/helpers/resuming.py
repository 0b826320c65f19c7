"""Trainings that are saved at any batch and go on from there, here or in a new process: ``python -m … jobs.pt``."""

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_amp.callbacks.ema_weights import EMAWeights
from tests.helpers.modules import amp, trainer

BATCHES, EPOCHS = 10, 2
OVERFLOW = 6
"""The batch, counted from 0, whose gradients overflow."""


class Stream:
    """A data loader that goes on where it was: batch ``i`` of an epoch is the same in every process."""

    def __init__(self) -> None:
        self._position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start, self._position = self._position % BATCHES, 0
        for i in range(start, BATCHES):
            self._position = i + 1
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
            yield x, torch.tensor(1e38 if i == OVERFLOW else 1.0)

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


class Duel(pl.LightningModule):
    """Two networks against each other and a teacher that no optimizer owns, with a scheduler an optimizer.

    Args:
        automatic: One optimizer for both, run by Lightning; else two by hand, and three loss ids.
        overflows: Whether the batch that is to overflow does.
    """

    def __init__(self, automatic: bool = False, overflows: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.overflows = overflows
        torch.manual_seed(0)
        self.d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.g = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def d_losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.d(x) - 1).square().mean(), self.d(self.g(x).detach()).square().mean()

    def g_loss(self, x: Tensor) -> Tensor:
        fake = self.g(x)
        return (self.d(fake) - 1).square().mean() + (fake - self.teacher(x)).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Any:
        x, factor = batch
        x = x + self.global_rank
        factor = factor if self.overflows else torch.ones(())
        if self.automatic_optimization:
            return (sum(self.d_losses(x)) + self.g_loss(x)) * factor
        d, g = self.optimizers()
        self.toggle_optimizer(d)
        for loss_id, loss in enumerate(self.d_losses(x)):
            self.manual_backward(loss * factor, loss_id=loss_id)
        self.clip_gradients(d, 5.0)
        d.step()
        d.zero_grad()
        self.untoggle_optimizer(d)
        self.toggle_optimizer(g)
        self.manual_backward(self.g_loss(x), loss_id=2)
        g.step()
        g.zero_grad()
        self.untoggle_optimizer(g)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return None

    def configure_optimizers(self) -> Any:
        lists = [[*self.d.parameters(), *self.g.parameters()]]
        if not self.automatic_optimization:
            lists = [list(self.d.parameters()), list(self.g.parameters())]
        # The first plain, the last fused; half Adam lives on a larger eps.
        kinds = [{"fused": params is lists[-1]} for params in lists]
        adams = [torch.optim.Adam(params, lr=0.01, eps=1e-4, **kind) for params, kind in zip(lists, kinds, strict=True)]
        schedulers = [torch.optim.lr_scheduler.StepLR(adam, step_size=3, gamma=0.9) for adam in adams]
        if self.automatic_optimization:
            return [{"optimizer": adams[0], "lr_scheduler": {"scheduler": schedulers[0], "interval": "step"}}]
        return adams, schedulers

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = "a user's own entry"


@dataclass(frozen=True)
class Spec:
    """One kind of training."""

    level: str
    dtype: str = "float16"
    automatic: bool = False
    window: int = 1

    @property
    def name(self) -> str:
        mode = "automatic" if self.automatic else "manual"
        return f"{self.level}-{self.dtype}-{mode}" + (f"-{self.window}" if self.window > 1 else "")

    def plugin(self, **settings: Any) -> Any:
        """Returns the plugin; its scale moves often in a training this short."""
        losses = 1 if self.automatic else 3
        return amp(self.level, **{"dtype": self.dtype, "num_losses": losses, "growth_interval": 4, **settings})

    def module(self) -> Duel:
        # O0 checks nothing, and a loss of this size is nothing to bfloat16: both would go on with garbage.
        return Duel(self.automatic, overflows=self.level != "O0" and self.dtype == "float16")


class Watch(Callback):
    """Saves a checkpoint after each of these batches, counted over epochs (0: before the first), and the end state."""

    def __init__(self, folder: Path | None = None, save_after: Sequence[int] = ()) -> None:
        self.folder, self.save_after = folder, save_after
        self.saved: dict[str, Any] = {}
        self.end: dict[str, Any] = {}

    def _save(self, it: "pl.Trainer", batches: int) -> None:
        if batches in self.save_after:
            assert self.folder is not None
            self.saved[str(batches)] = state_of(it)
            it.save_checkpoint(path_of(self.folder, batches))

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if not trainer.fit_loop.epoch_loop.total_batch_idx + 1:
            self._save(trainer, 0)

    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        self._save(trainer, trainer.current_epoch * BATCHES + batch_idx + 1)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.end = state_of(trainer)
        if trainer.world_size > 1:
            assert self.folder is not None
            torch.save(self.end, self.folder / f"end of rank {trainer.global_rank}.pt")


def path_of(folder: Path, batches: int) -> Path:
    return folder / f"{batches}.ckpt"


def state_of(it: "pl.Trainer") -> dict[str, Any]:
    """Returns all that a resumed training must share with one that was not interrupted."""
    module, plugin = it.lightning_module, it.precision_plugin
    return copy.deepcopy(
        {
            "weights": dict(module.state_dict()),
            "as they are": [t.detach() for t in (*module.parameters(), *module.buffers())],
            "optimizers": [o.state_dict() for o in it.optimizers],
            "schedulers": [c.scheduler.state_dict() for c in it.lr_scheduler_configs],
            "plugin": plugin.state_dict(),
            "callbacks": [c.state_dict() for c in it.callbacks if isinstance(c, EMAWeights)],
            "global_step": it.global_step,
        }
    )


def train(
    spec: Spec,
    resume: Path | None = None,
    folder: Path | None = None,
    save_after: Sequence[int] = (),
    **more: Any,
) -> Watch:
    """Trains two epochs, or what is left of them, and returns what was seen."""
    watch, module = Watch(folder, save_after), more.pop("module", None) or spec.module()
    it = trainer(
        more.pop("plugin", None) or spec.plugin(),
        max_epochs=more.pop("max_epochs", EPOCHS),
        accumulate_grad_batches=spec.window,
        callbacks=[EMAWeights(0.9), *more.pop("callbacks", ()), watch],
        **more,
    )
    it.fit(module, Stream(), ckpt_path=resume, weights_only=None if resume is None else True)
    return watch


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Returns where two trees differ in any bit, dtype or type."""
    if isinstance(left, dict) and isinstance(right, dict):
        keys = [f"{path}: {k} on one side" for k in left.keys() ^ right.keys()]
        return keys + [d for k in left.keys() & right.keys() for d in differences(left[k], right[k], f"{path}.{k}")]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        return [d for i, (a, b) in enumerate(zip(left, right, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return [] if left.dtype is right.dtype and torch.equal(left, right) else [f"{path}: {left} != {right}"]
    return [] if type(left) is type(right) and left == right else [f"{path}: {left} != {right}"]


def main(jobs: str) -> None:
    """Resumes every training of a file, from its checkpoint, and writes the end states beside it."""
    todo = torch.load(jobs, weights_only=True)
    torch.save([train(Spec(**spec), Path(path)).end for spec, path in todo], f"{jobs}.done")


if __name__ == "__main__":
    main(sys.argv[1])
