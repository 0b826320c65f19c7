"""`GradientClipping`: a clip value for each optimizer, in manual optimization too, where Lightning refuses its own."""

from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp.callbacks.trainers import active_plugin


class GradientClipping(Callback):
    """Clips the true gradients of each optimizer just before its step.

    Args:
        values: The bound for every optimizer, or one for each, None where it is not to be clipped.
        algorithm: ``"norm"``: the total 2-norm of an optimizer's gradients; ``"value"``: each element.

    Raises:
        ValueError: A bound is not positive, or the algorithm is unknown; at fit, the number of bounds is not that of
            the optimizers.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> clipping = GradientClipping([1.0, None])  # the first of two optimizers
        >>> trainer = Trainer(accelerator="cpu", callbacks=[clipping], logger=False)
    """

    def __init__(self, values: float | list[float | None], algorithm: Literal["norm", "value"] = "norm") -> None:
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"A clip value of {value!r} cannot be used. Use a positive one, or None.")
        if algorithm not in ("norm", "value"):
            raise ValueError(f"algorithm={algorithm!r} is unknown. Use 'norm' or 'value'.")
        self.values = values
        self.algorithm = algorithm

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if isinstance(self.values, Sequence) and len(self.values) != len(trainer.optimizers):
            raise ValueError(
                f"GradientClipping has {len(self.values)} values for {len(trainer.optimizers)} optimizers. Give one "
                "for each, None where it is not to be clipped, or a single number for all."
            )

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        value = self._value(trainer, optimizer)
        if value is None:
            return
        plugin = active_plugin(trainer)
        if plugin is not None:
            plugin.engine.clip(optimizer, value, self.algorithm)
            return
        params = [p for group in optimizer.param_groups for p in group["params"]]
        clip: Any = torch.nn.utils.clip_grad_norm_ if self.algorithm == "norm" else torch.nn.utils.clip_grad_value_
        clip(params, value)

    def _value(self, trainer: "pl.Trainer", optimizer: Optimizer) -> float | None:
        if not isinstance(self.values, Sequence):
            return self.values
        index = next(i for i, mine in enumerate(trainer.optimizers) if mine is optimizer)
        return self.values[index]
