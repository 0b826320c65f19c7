"""`NonFiniteReport`: on a skipped step, says what was non-finite first, and can look for the module it came from."""

import inspect
import warnings
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_amp.callbacks.rehearsal import (
    floating_buffers,
    random_states,
    rehearsal,
    set_random_states,
    write_buffers,
)
from lightning_amp.callbacks.trainers import active_plugin
from lightning_amp.outcomes import Outcome
from lightning_amp.precision import AmpPrecision


class NonFiniteReport(Callback):
    """Warns about skipped steps: which loss, which optimizer, which parameter first, which buffers were touched.

    Args:
        locate: Whether the batch is run again with hooks, to find the first module whose output was non-finite. Its
            random numbers are the same, and nothing of it stays: gradients, buffers and steps are as they were. With
            several processes each looks at its own batch, and one whose batch was bad warns beside the first.
        restore_buffers: Whether buffers (BatchNorm's running statistics) get back the values from before a batch that
            skipped a step. Costs a copy of the floating buffers each batch.
        limit: Reports at the most.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", callbacks=[NonFiniteReport(locate=True)], logger=False)
    """

    def __init__(self, locate: bool = False, restore_buffers: bool = False, limit: int = 10) -> None:
        self.locate = locate
        self.restore_buffers = restore_buffers
        self.limit = limit
        self.reports: list[str] = []
        self._skips: list[int] = []
        self._random: dict[torch.device, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}

    @override
    def on_train_batch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        if self.locate:
            self._random = random_states(pl_module.device)
        if self.restore_buffers:
            self._buffers = floating_buffers(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        plugin = active_plugin(trainer)
        if plugin is None:
            return
        before = self._skips or [0] * len(trainer.optimizers)
        self._skips = [plugin.engine.counts(o)[Outcome.SKIPPED] for o in trainer.optimizers]
        skipped = [i for i, (old, new) in enumerate(zip(before, self._skips, strict=True)) if new > old]
        if not skipped:
            return
        if len(self.reports) < self.limit:
            self._report(trainer, pl_module, plugin, skipped, batch, batch_idx)
        if self.restore_buffers:
            write_buffers(pl_module, self._buffers)

    def _report(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        plugin: AmpPrecision,
        skipped: list[int],
        batch: Any,
        batch_idx: int,
    ) -> None:
        who = " and ".join(f"optimizer {i}" for i in skipped)
        lines = [f"Batch {batch_idx}: {who} skipped a step.", *plugin.engine.causes()]
        touched = [n for n, b in floating_buffers(pl_module).items() if not torch.isfinite(b).all()]
        if touched:
            cure = "they get back their values" if self.restore_buffers else "restore_buffers=True would put them back"
            lines.append(f"Non-finite buffers: {', '.join(touched)}; {cure}.")
        found = self._locate(pl_module, plugin, batch, batch_idx) if self.locate else None
        if found:
            lines.append(f"Run again, the first non-finite output came from {found}.")
        elif self.locate:
            elsewhere = "" if trainer.world_size == 1 else ", or in another process"
            lines.append(
                f"Run again, every module's output was finite: the overflow is in the backward pass{elsewhere}."
            )
        if not self.reports and plugin.config.rule.dynamic:
            lines.append("A few of these are normal while a dynamic scale settles.")
        if len(self.reports) + 1 == self.limit:
            lines.append(f"That was report {self.limit} of limit={self.limit}; later skips are only counted.")
        self.reports.append("\n  ".join(lines))
        if trainer.is_global_zero:
            rank_zero_warn(self.reports[-1])
        elif found:  # the other processes' batches were other ones, so that only this one knows
            warnings.warn(f"Process {trainer.global_rank}: {self.reports[-1]}", stacklevel=2)

    def _locate(self, pl_module: "pl.LightningModule", plugin: AmpPrecision, batch: Any, batch_idx: int) -> str | None:
        found: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(rehearsal(plugin, pl_module))
            set_random_states(self._random)
            for name, module in pl_module.named_modules():
                if module is not pl_module:
                    stack.callback(module.register_forward_hook(_watch(name, found)).remove)
            with plugin.train_step_context():
                # Lightning, too, allows a step that does not take the index.
                takes_index = len(inspect.signature(pl_module.training_step).parameters) > 1
                pl_module.training_step(batch, *([batch_idx] if takes_index else []))
        return found[0] if found else None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"skips": self._skips}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._skips = list(state_dict["skips"])


def _watch(name: str, found: list[str]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not _all_finite(output):
            spoilt = "" if _all_finite(args) else ", whose input was non-finite already"
            found.append(f"{name} ({type(module).__name__}){spoilt}")

    return hook


def _all_finite(tree: Any) -> bool:
    tensors: list[Tensor] = []
    apply_to_collection(tree, Tensor, tensors.append)
    return all(bool(torch.isfinite(t).all()) for t in tensors)
