"""`torch.autograd.grad` under a loss scale."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp import kernels
from lightning_amp.gradients import dense_values
from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.loss_scaler import LossScaler


def wide(tensor: Tensor) -> Tensor:
    """Returns a half tensor as float32, any other as it is.

    Args:
        tensor: Any dtype.
    """
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def scaled_grad(
    scaler: LossScaler, outputs: Tensor | Sequence[Tensor], inputs: Any, grad_outputs: Any, **autograd_kwargs: Any
) -> tuple[Tensor | None, ...]:
    """Scales, differentiates, checks, divides in float32, and moves the scaler on; no host synchronisation.

    Args:
        scaler: Whose scale is used. The result is looked at, not the outputs: a critic's score says nothing about the
            range of its gradient.
        outputs: As in `torch.autograd.grad`, as for the following.
        inputs: See ``outputs``.
        grad_outputs: Before scaling.
        **autograd_kwargs: ``retain_graph``, ``create_graph``, ``allow_unused``.

    Returns:
        The true gradients: float32 for half inputs, else in the dtype of the input; None where unused.
    """
    scale = scaler.now().kept()  # the graph keeps it, and the scaler moves on
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    scaled = [o if scale.scale is None else wide(o) * scale.scale for o in outputs]
    found = torch.autograd.grad(scaled, inputs, grad_outputs, **autograd_kwargs)
    present = [g.detach() for g in found if g is not None]
    if present:
        with torch.no_grad():
            values = dense_values(present)
            backend = kernels.backend(values[0].device)
            backend.collect(values, [None] * len(values), None, scaler.first_bad, widen=False, in_place=False)
    inverse = scale.inv_scale
    true = tuple(g if g is None else wide(g) if inverse is None else wide(g) * inverse for g in found)
    scaler.update(None)
    return true
