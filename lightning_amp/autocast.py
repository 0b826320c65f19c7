"""Autocast regions: entering one with the right cache, leaving it for gradients and steps."""

from types import TracebackType

import torch
from torch import Tensor


class no_autocast:
    """Turns autocast off inside the block.

    In Lightning's manual optimization the whole of ``training_step`` is one autocast region, backward passes and
    optimizer steps included; half arithmetic has no place in those.

    Args:
        device_type: As in `torch.autocast`.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        self._was_on = torch.is_autocast_enabled(self._device_type)
        if self._was_on:
            torch.set_autocast_enabled(self._device_type, False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was_on:
            torch.set_autocast_enabled(self._device_type, True)


def cache_is_sound(device_type: str) -> bool:
    """Tells whether autocast's cast cache survives a `torch.no_grad` forward before one with gradients.

    In older torch the copy made without a graph was used again, and the weight got no gradient
    (https://github.com/pytorch/pytorch/pull/165068).

    Args:
        device_type: As in `torch.autocast`.
    """
    with torch.inference_mode(False):  # gradients on, whatever the caller is in
        weight = torch.ones(1, 1, requires_grad=True, device=device_type)
        x: Tensor = torch.ones(1, 1, device=device_type)
        with torch.autocast(device_type, torch.bfloat16, cache_enabled=True):
            with torch.no_grad():
                torch.mm(x, weight)
            return torch.mm(x, weight).requires_grad
