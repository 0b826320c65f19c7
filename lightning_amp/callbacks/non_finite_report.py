"""`NonFiniteReport`: on a skipped step, says what was non-finite first, and can look for the module it came from."""

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_amp.callbacks.rehearsal import floating_buffers, rehearsal, write_buffers
from lightning_amp.callbacks.trainers import active_plugin
from lightning_amp.outcomes import Outcome


class NonFiniteReport(Callback):
    """Warns about skipped steps: which loss, which optimizer, which parameter first, which buffers were touched.

    Args:
        locate: Whether the batch is run again with hooks, to find the first module whose output was non-finite. Its
            random numbers are the same, and nothing of it stays: gradients, buffers and steps are as they were.
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
        self._rng: Tensor | None = None
        self._buffers: dict[str, Tensor] = {}

    @override
    def on_train_batch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        if self.locate:
            self._rng = torch.get_rng_state()
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
            self.reports.append(self._report(trainer, pl_module, skipped, batch, batch_idx))
            rank_zero_warn(self.reports[-1])
        if self.restore_buffers:
            write_buffers(pl_module, self._buffers)

    def _report(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", skipped: list[int], batch: Any, batch_idx: int
    ) -> str:
        plugin = active_plugin(trainer)
        assert plugin is not None
        who = " and ".join(f"optimizer {i}" for i in skipped)
        lines = [f"Batch {batch_idx}: {who} skipped a step.", *plugin.engine.causes()]
        touched = [n for n, b in floating_buffers(pl_module).items() if not torch.isfinite(b).all()]
        if touched:
            cure = "they get back their values" if self.restore_buffers else "restore_buffers=True would put them back"
            lines.append(f"Non-finite buffers: {', '.join(touched)}; {cure}.")
        if self.locate:
            found = self._locate(trainer, pl_module, batch, batch_idx)
            lines.append(
                f"Run again, the first non-finite output came from {found}."
                if found
                else "Run again, every module's output was finite: the overflow is in the backward pass."
            )
        return "\n  ".join(lines)

    def _locate(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int) -> str | None:
        plugin = active_plugin(trainer)
        assert plugin is not None
        found: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(rehearsal(plugin, pl_module))
            if self._rng is not None:
                torch.set_rng_state(self._rng)
            for name, module in pl_module.named_modules():
                if module is not pl_module:
                    stack.callback(module.register_forward_hook(_watch(name, found)).remove)
            with plugin.train_step_context():
                pl_module.training_step(batch, batch_idx)
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
