"""What becomes of an accumulation window that is open in a checkpoint, under the precision that goes on with it."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from benchmarks.resume_trainings import Pair, equal, run


class Window(Pair):
    """The same in windows of three batches, each zeroed at its start."""

    def training_step(self, batch: Tensor, _: int) -> None:
        done = self.trainer.fit_loop.epoch_loop.total_batch_idx
        for optimizer, sign in zip(self.optimizers(), (1.0, -1.0), strict=True):
            self.toggle_optimizer(optimizer)
            if done % 3 == 0:
                optimizer.zero_grad()
            self.manual_backward(self.d(self.g(batch)).tanh().mean() * sign / 3)
            if done % 3 == 2:
                optimizer.step()
            self.untoggle_optimizer(optimizer)


class Norm(Callback):
    """The norm of the gradients that the first step uses."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if not hasattr(self, "first"):
            owned = (p for group in optimizer.param_groups for p in group["params"])
            self.first = torch.stack([p.grad.float().norm() for p in owned]).norm().item()


class SaveAfter(Callback):
    """Saves a checkpoint after two batches."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def measure_window(saved: str, resumed: str, folder: Path) -> str:
    """Tells what one precision made of the open window in another's checkpoint.

    Args:
        saved: The precision that saved; its checkpoint is ``{folder}/{saved} window.ckpt``.
        resumed: The precision that goes on.
        folder: Where checkpoints are.

    Returns:
        ``"exact"``: the training ended as without the interruption, bit for bit; ``"finished"``: the first step used
        the gradients of the whole window, to rounding; ``"dropped"``: it lacked those before the checkpoint.
    """
    norm, whole = Norm(), Norm()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what becomes of the scales is in the other table
        end = run(resumed, 2, folder / f"{saved} window.ckpt", module=Window, callbacks=[norm]).end
        uninterrupted = run(resumed, 2, module=Window, callbacks=[whole]).end
    if saved == resumed and equal(end["weights"], uninterrupted["weights"]):
        return "exact"
    return "finished" if abs(norm.first / whole.first - 1.0) < 0.02 else "dropped"


def expected_of_window(saved: str, resumed: str) -> str:
    """Returns what `measure_window` is to find: only AmpPrecision saves an open window, and only it goes on with one.

    Args:
        saved: The precision that saved.
        resumed: The precision that goes on.
    """
    ours = {saved, resumed} <= {"O0", "O1", "O2", "O3"}
    return "dropped" if not ours else "exact" if saved == resumed else "finished"


def prepare_windows(folder: Path, precisions: Sequence[str]) -> None:
    """Trains under each precision and saves when two of three batches of a window are done.

    Args:
        folder: Where the checkpoints go.
        precisions: Some of `benchmarks.resume_trainings.PRECISIONS`.
    """
    for name in precisions:
        run(name, 1, module=Window, callbacks=[SaveAfter(folder / f"{name} window.ckpt")])
