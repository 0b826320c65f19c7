"""`LossScaleMonitor`: scales, skips, overflows and true gradient norms, in every logger and on the progress bar."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp.callbacks.trainers import active_plugin, batches_begun, logger_step
from lightning_amp.outcomes import Outcome


class LossScaleMonitor(Callback):
    """Logs, every so many batches: ``amp/scale/<loss>``, ``amp/overflows/<loss>``, ``amp/skipped/<optimizer>``,
    ``amp/steps/<optimizer>`` and ``amp/grad_norm/<optimizer>``, the norm of the gradients a step was about to use
    (before a `GradientClipping` that stands after it in the list of callbacks).

    Everything goes to all loggers and to ``trainer.callback_metrics``; the lowest scale and the skips in all stand on
    the progress bar. A logged batch costs one host copy, the others none.

    Args:
        every_n_batches: How often, or None for the trainer's ``log_every_n_steps``.
        prefix: What the names begin with.

    Raises:
        ValueError: ``every_n_batches`` is below one.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", callbacks=[LossScaleMonitor()], logger=False)
    """

    def __init__(self, every_n_batches: int | None = None, prefix: str = "amp") -> None:
        if every_n_batches is not None and every_n_batches < 1:
            raise ValueError(f"every_n_batches={every_n_batches!r} cannot be used. Use at least 1, or None.")
        self.every_n_batches = every_n_batches
        self.prefix = prefix
        self._norms: dict[int, Tensor] = {}

    def _is_due(self, trainer: "pl.Trainer") -> bool:
        every: int = self.every_n_batches or trainer.log_every_n_steps  # type: ignore[attr-defined]
        return batches_begun(trainer) % every == 0

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        plugin = active_plugin(trainer)
        if plugin is not None and self._is_due(trainer):
            self._norms[plugin.engine.index(optimizer)] = plugin.grad_norm(optimizer)

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        plugin = active_plugin(trainer)
        if plugin is None or not self._is_due(trainer):
            return
        values: dict[str, float] = {}
        accounts, norms = plugin.read_accounts(list(self._norms.values()))
        for name, account in accounts.items():
            values[f"scale/{name}"] = account.scale
            values[f"overflows/{name}"] = account.overflows
        for i, optimizer in enumerate(trainer.optimizers):
            counts = plugin.engine.counts(optimizer)
            values[f"skipped/optimizer_{i}"] = counts[Outcome.SKIPPED]
            values[f"steps/optimizer_{i}"] = counts[Outcome.STEPPED]
        values |= {f"grad_norm/optimizer_{i}": norm for i, norm in zip(self._norms, norms, strict=True)}
        self._norms.clear()
        self._send(trainer, pl_module, values)

    def _send(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", values: dict[str, float]) -> None:
        named = {f"{self.prefix}/{name}": float(value) for name, value in values.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=logger_step(trainer))
        pl_module.log_dict({name: torch.tensor(value) for name, value in named.items()}, logger=False)
        scales = [value for name, value in values.items() if name.startswith("scale/")]
        skips = sum(value for name, value in values.items() if name.startswith("skipped/"))
        bar = {"scale": min(scales, default=1.0), "skipped": float(skips)}
        pl_module.log_dict(bar, logger=False, prog_bar=True)
