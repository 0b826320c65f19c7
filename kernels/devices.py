"""Lists whose tensors live on several devices: one call a device; what there is one of is on the first."""

from itertools import compress
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_amp import kernels
from lightning_amp.kernels.getters import device_of, layout_of
from lightning_amp.kernels.reference import Reading

_STRIDED = {torch.strided}

# The call with which torch's optimizers sort their lists: one for the whole of it, and nothing public does that.
_kinds: Any = torch._C._group_tensors_by_device_and_dtype


def makes_a_list(tensors: list[Tensor], device: torch.device) -> bool:
    """Tells whether all of ``tensors`` are on ``device``, and are what the functions over lists take: dense and real.

    Args:
        tensors: Any tensors.
        device: The device, with its index.

    Example:
        >>> makes_a_list([torch.zeros(2), torch.zeros(3)], torch.device("cpu"))
        True
    """
    if not tensors:
        return True
    for there, dtype in _kinds([tensors], False):
        if there != device or dtype.is_complex:
            return False
    return set(map(layout_of, tensors)) == _STRIDED


def by_device(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Returns the tensors of each device, in the order in which the devices occur; one list where there is one device.

    Args:
        tensors: Any tensors, at least one.
    """
    (first, _), *kinds = _kinds([tensors], False)
    for device, _ in kinds:
        if device != first:
            break
    else:
        return [tensors]
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return list(groups.values())


class Backends(dict[torch.device, ModuleType]):
    """The backend of each device, looked up once, and reads of gradients that live on any number of them."""

    def __missing__(self, device: torch.device) -> ModuleType:
        self[device] = kernels.backend(device)
        return self[device]

    def read(self, grads: list[Tensor], also: Tensor | None = None) -> Reading:
        """Returns the norm of all gradients, and whether any value is non-finite; no synchronisation between GPUs.

        Args:
            grads: See `lightning_amp.kernels.reference.read`.
            also: See there; on any device.
        """
        first, *others = by_device(grads)
        device = first[0].device
        reading: Reading = self[device].read(first, also if also is None else also.to(device))
        return _total([reading, *[self[group[0].device].read(group) for group in others]]) if others else reading

    def found_inf(self, grads: list[Tensor], also: Tensor | None = None) -> Tensor:
        """Tells whether any value is non-finite; no synchronisation between GPUs.

        Args:
            grads: See `lightning_amp.kernels.reference.found_inf`.
            also: See there; on any device.
        """
        first, *others = by_device(grads)
        device = first[0].device
        found: Tensor = self[device].found_inf(first, also if also is None else also.to(device))
        return _most([found, *[self[group[0].device].found_inf(group) for group in others]]) if others else found

    def weights(self, operation: Literal["adopt", "refresh"], halves: list[Tensor], masters: list[Tensor]) -> None:
        """Runs an operation over half weights and their masters.

        Args:
            operation: Of `lightning_amp.kernels.reference`.
            halves: The half weights.
            masters: The master of each, on its device.
        """
        devices = set(map(device_of, halves))
        with torch.set_grad_enabled(False):
            for device in devices:
                here = halves, masters
                if devices != {device}:
                    mine = [half.device == device for half in halves]
                    here = list(compress(halves, mine)), list(compress(masters, mine))
                getattr(self[device], operation)(*here)

    def read_and_clip(self, grads: list[Tensor], algorithm: str, bound: float, also: Tensor | None = None) -> Reading:
        """Reads gradients, then clips them by what they are together.

        Args:
            grads: See `lightning_amp.kernels.reference.read_and_clip`.
            algorithm: See there.
            bound: See there.
            also: See there; on any device.

        Returns:
            The reading from before the clip.
        """
        groups = by_device(grads)
        if len(groups) == 1:
            device = grads[0].device
            also = also if also is None else also.to(device)
            reading: Reading = self[device].read_and_clip(grads, algorithm, bound, also)
            return reading
        reading = self.read(grads)
        for group in groups:
            device = group[0].device
            if algorithm == "norm":
                self[device].clip_norm(group, reading.norm.to(device), bound)
            else:
                self[device].clip_value(group, reading.found_inf.to(device), bound)
        if also is None:
            return reading
        return Reading(reading.norm, torch.maximum(reading.found_inf, also.to(reading.found_inf.device)))


def _most(found: list[Tensor]) -> Tensor:
    return torch.stack([f.to(found[0].device) for f in found]).amax()


def _total(readings: list[Reading]) -> Reading:
    norm, *others = [r.norm.to(readings[0].norm.device) for r in readings]
    for other in others:
        norm = torch.hypot(norm, other)  # which overflows only where the result does
    return Reading(norm, _most([r.found_inf for r in readings]))
