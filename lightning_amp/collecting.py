"""From fresh gradients under a scale to true ones: ``true + fresh / scale``, checked on the way."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_amp import kernels
from lightning_amp.kernels.devices import makes_a_list
from lightning_amp.kernels.getters import is_there
from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.kernels.scale_rule import FIRST_BAD_NONE
from lightning_amp.loss_scaler import LossScaler, Scale

Fresh = tuple[Tensor, Tensor, Tensor | None]
"""A parameter, its fresh gradient, and the true gradient to add it to."""


class Collector:
    """Collects the gradients of backward passes.

    Args:
        widen: Whether half gradients become float32.

    Attributes:
        in_place: Whether a fresh gradient is ours to overwrite; not where it is a view into a buffer of DDP's.
    """

    def __init__(self, widen: bool) -> None:
        self.in_place = True
        self._widen = widen

    def collect(self, fresh: list[Fresh], scale: Scale, loss: Tensor | None) -> None:
        """Makes fresh gradients true and moves the scaler on: at once where they all go into one list on its device.

        Args:
            fresh: What a backward pass produced.
            scale: What it ran under.
            loss: See `LossScaler.update`.
        """
        scaler = scale.scaler
        scaler.sources, new, into = _columns(fresh)
        olds: list[Any] = list(filter(is_there, into))
        if makes_a_list(new + olds, scaler.first_bad.device):
            if olds:
                into = self._widened(into)
            out = scaler.collect(new, into, scale.inv_scale, loss, widen=self._widen, in_place=self.in_place)
            _hand_over(fresh, out)
            return
        groups = _by_device(fresh)
        scaler.sources = [p for group in groups.values() for p, _, _ in group]
        offset = 0
        for device, group in groups.items():
            if device is None:
                for i, entry in enumerate(group, offset):
                    _collect_odd(entry, scale, i, self._widen, self.in_place)
            else:
                self._there(device, group, scale, offset)
            offset += len(group)
        scaler.update(loss)

    def _there(self, device: torch.device, fresh: list[Fresh], scale: Scale, offset: int) -> None:
        _, new, into = _columns(fresh)
        into = self._widened(into)
        inv_scale = None if scale.inv_scale is None else scale.inv_scale.to(device)
        with _first_bad_on(device, scale.scaler) as first_bad:
            out = kernels.backend(device).collect(
                new, into, inv_scale, first_bad, offset=offset, widen=self._widen, in_place=self.in_place
            )
        _hand_over(fresh, out)

    def _widened(self, into: list[Tensor | None]) -> list[Tensor | None]:
        """Returns true gradients in float32 where they are half, which a plain backward() and the user may leave.

        Sums in half would lose small terms.
        """
        if not self._widen:
            return into
        return [old if old is None or old.dtype not in HALF_DTYPES else old.float() for old in into]

    def collect_in_graph(self, fresh: list[Fresh], scale: Scale, loss: Tensor | None) -> None:
        """Does the same where gradients are part of a graph, which is not to be changed but added to.

        Args:
            fresh: As in `collect`.
            scale: Likewise.
            loss: Likewise.
        """
        scale.scaler.sources = [p for p, _, _ in fresh]
        for i, (p, new, old) in enumerate(fresh):
            _collect_odd((p, new.data, None), scale._replace(inv_scale=None), i, False, False)
            with torch.enable_grad():
                true = new.float() if self._widen and new.dtype in HALF_DTYPES else new
                true = true if scale.inv_scale is None else true * scale.inv_scale
                p.grad = _accepted(true if old is None else _sum(old, true), p)
        scale.scaler.update(loss)


def _columns(fresh: list[Fresh]) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """Returns the parameters, the fresh gradients, and the true ones to add them to."""
    if not fresh:
        return [], [], []
    params, new, into = map(list, zip(*fresh, strict=True))
    return params, new, into


def _by_device(fresh: list[Fresh]) -> dict[torch.device | None, list[Fresh]]:
    """Sorts fresh gradients by device; under None are those that do not go into a list, the sparse and complex ones."""
    groups: dict[torch.device | None, list[Fresh]] = {}
    for entry in fresh:
        _, grad, old = entry
        dense = grad.layout is torch.strided and (old is None or old.layout is torch.strided)
        groups.setdefault(grad.device if dense and not grad.dtype.is_complex else None, []).append(entry)
    return groups


def _hand_over(fresh: list[Fresh], out: list[Tensor]) -> None:
    """Makes collected gradients those of their parameters."""
    for (p, g, _), true in zip(fresh, out, strict=True):
        if true is not g:  # as `_accepted`, without a call for each
            p.grad = true if true.dtype is p.dtype or (p.is_leaf and p.grad_dtype is None) else true.to(p.dtype)


@contextmanager
def _first_bad_on(device: torch.device, scaler: LossScaler) -> Iterator[Tensor]:
    """Gives what a collect on a device notes its first non-finite gradient in, and adds it to what the scaler knows."""
    here = scaler.first_bad
    if device == here.device:
        yield here
        return
    there = torch.full_like(here, FIRST_BAD_NONE, device=device)
    yield there
    here.copy_(torch.minimum(here, there.to(here.device)))


def _accepted(grad: Tensor, param: Tensor) -> Tensor:
    """Returns a gradient in a dtype that ``param`` takes: its own, unless it is a leaf that was told to take any."""
    takes_any = param.is_leaf and param.grad_dtype is None
    return grad if takes_any else grad.to(param.dtype)


def _sum(old: Tensor, true: Tensor) -> Tensor:
    return true + old if old.is_sparse else old + true  # torch adds a sparse tensor to a dense one, not the other way


def _collect_odd(fresh: Fresh, scale: Scale, index: int, widen: bool, in_place: bool) -> None:
    """Collects one gradient that does not fit into a list: sparse, complex, or on a device of its own."""
    p, new, old = fresh
    inv_scale = None if scale.inv_scale is None else scale.inv_scale.to(new.device)
    sparse = new.coalesce() if new.is_sparse else None  # duplicates may overflow only in their sum
    values = new if sparse is None else sparse.values()
    plain = torch.view_as_real(values) if values.is_complex() else values
    backend = kernels.backend(new.device)
    in_place = in_place and not values.is_complex()
    with _first_bad_on(new.device, scale.scaler) as first_bad:
        (true,) = backend.collect([plain], [None], inv_scale, first_bad, offset=index, widen=widen, in_place=in_place)
    true = torch.view_as_complex(true) if values.is_complex() else true
    if sparse is not None:
        true = torch.sparse_coo_tensor(sparse.indices(), true, sparse.shape, is_coalesced=True, check_invariants=False)
    total = true if old is None else _sum(old, true)
    p.grad = _accepted(total.coalesce() if total.is_sparse else total, p)
