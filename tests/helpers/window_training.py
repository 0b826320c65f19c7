"""A manual training whose optimizers have windows of different lengths, which is saved and gone on with."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_amp import windows
from tests.helpers.resuming import Duel, Spec, Watch, path_of, train

LENGTHS = (3, 4)
"""Batches a window of either optimizer. Neither divides an epoch, so that windows go on into the next."""


class Windows(Duel):
    """The `Duel`, trained in windows.

    Args:
        zero: When gradients are zeroed: ``"after"`` the step, ``"before"`` the first pass of a window, or ``"anew"``,
            likewise but in place.
        toggled: Whether each optimizer's passes leave the other's parameters alone.
        unreduced: Whether processes reduce gradients in the last pass of a window alone.
        delay: Whether gradients keep their scale until the step.
        overflows: As in `Duel`.
    """

    def __init__(
        self,
        zero: str = "after",
        toggled: bool = True,
        unreduced: bool = False,
        delay: bool = False,
        overflows: bool = True,
    ) -> None:
        super().__init__(overflows=overflows)
        self.zero, self.toggled, self.unreduced, self.delay = zero, toggled, unreduced, delay
        self.within: Callable[[], Any] = lambda: None
        """Called between the backward pass and the step."""

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        x, factor = batch
        x = x + self.global_rank
        factor = factor if self.overflows else torch.ones(())
        done = self.trainer.fit_loop.epoch_loop.total_batch_idx
        losses = [lambda: sum(self.d_losses(x)) * factor, lambda: self.g_loss(x)]
        for i, (optimizer, loss) in enumerate(zip(self.optimizers(), losses, strict=True)):
            first, last = done % LENGTHS[i] == 0, (done + 1) % LENGTHS[i] == 0
            if self.toggled:
                self.toggle_optimizer(optimizer)
            if first and self.zero != "after":
                optimizer.zero_grad(set_to_none=self.zero == "before")
            with self.without_reduction(not last):
                self.manual_backward(loss() / LENGTHS[i], loss_id=i, delay_unscale=self.delay)
            self.within()
            if last:
                self.clip_gradients(optimizer, 5.0)
                optimizer.step()
                self.lr_schedulers()[i].step()
                if self.zero == "after":
                    optimizer.zero_grad()
            if self.toggled:
                self.untoggle_optimizer(optimizer)

    def without_reduction(self, wanted: bool) -> Any:
        wrapped = self.trainer.strategy.model
        return wrapped.no_sync() if wanted and self.unreduced and hasattr(wrapped, "no_sync") else nullcontext()


def run(
    level: str, resume: Path | None = None, folder: Path | None = None, save_after: Sequence[int] = (), **more: Any
) -> Watch:
    """Trains two epochs in one process.

    Args:
        level: The opt level.
        resume: The checkpoint to go on from.
        folder: Where checkpoints go.
        save_after: After how many batches there is one.
        **more: ``settings`` of the module; the rest is for `train`.
    """
    module = Windows(**{"overflows": level != "O0", **more.pop("settings", {})})
    plugin = Spec(level).plugin(num_losses=2, growth_interval=3)
    return train(Spec(level), resume, folder, save_after, **{"module": module, "plugin": plugin, **more})


def run_two(level: str, resume: Path | None, folder: Path, save_after: Sequence[int] = (), **more: Any) -> None:
    """Trains two epochs in two processes, which leave their end states in the folder.

    Args:
        level: As in `run`.
        resume: As in `run`.
        folder: As in `run`.
        save_after: As in `run`.
        **more: As in `run`, or ``automatic``: Lightning makes the windows; and ``bucket_view``, for the strategy.
    """
    automatic, view = more.pop("automatic", False), more.pop("bucket_view", False)
    strategy = DDPStrategy(start_method="fork", find_unused_parameters=not automatic, gradient_as_bucket_view=view)
    if automatic:
        train(Spec(level, automatic=True, window=4), resume, folder, save_after, devices=2, strategy=strategy)
    else:
        run(level, resume, folder, save_after, devices=2, strategy=strategy, **more)


def stop_and_go_on(level: str, folder: Path, save_after: Sequence[int], **more: Any) -> None:
    """Trains in two processes without an interruption, then again from each of the checkpoints it left."""
    windows._CHUNK = 997  # or all of these gradients would go in one piece
    run_two(level, None, folder, save_after, **more)
    for batches in save_after:
        again = folder / str(batches)
        again.mkdir()
        run_two(level, path_of(folder, batches), again, **more)


class Norms(Callback):
    """The norms of the true gradients before each step of the first optimizer; two processes write them to a file."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if optimizer is trainer.optimizers[0]:
            self.seen.append(float(torch.stack([p.grad.float().norm() for p in pl_module.d.parameters()]).norm()))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.path is not None:
            torch.save(self.seen, f"{self.path}.{trainer.global_rank}")


def go_on_at_other_levels(folder: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """Trains in two processes at some levels, and goes on from the second batch at others: norms are left by name."""
    for saved, resumed in pairs:
        for level, resume in ((saved, None), (resumed, path_of(folder / saved, 2))):
            place = folder / (saved if resume is None else f"{saved} to {resumed}")
            place.mkdir()
            more = {"settings": {"unreduced": True, "overflows": False}, "callbacks": [Norms(place / "norms")]}
            run_two(level, resume, place, [2], max_epochs=1, **more)


class SaveWhileHandling(Callback):
    """Saves after the second batch, where an exception is being handled, as Lightning does on its way out."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            try:
                raise RuntimeError("stop")
            except RuntimeError:
                trainer.save_checkpoint(self.path)


def save_while_handling(folder: Path) -> None:
    """Trains in two processes whose gradients are unreduced when they save while an exception is being handled."""
    callbacks = [SaveWhileHandling(folder / "stopped.ckpt")]
    run_two("O1", None, folder, callbacks=callbacks, settings={"unreduced": True}, max_epochs=1)
