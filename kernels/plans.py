"""Plans: what a launch over a list of tensors needs to know, kept from step to step.

Sizes, types and layouts of a list of gradients are the same in every step, so the tables made from them are kept. Only
the addresses change: they are read each time, and copied to the device as one row, without a synchronisation, where
they are not those of a list seen lately.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # no public test tells a fake tensor

from lightning_amp.kernels.facts import Facts
from lightning_amp.kernels.launches import note

RECENT = 32
"""How many lists are remembered, and how many plans."""

PUT_BY = 8
"""How many rows as long as the longest can be copied during a capture."""

_T = TypeVar("_T")

_captured: list[object] = []  # a CUDA graph replays with these for as long as the process lives


class Place:
    """Where a list lives, and on which stream it is used: rows and scratch are never shared between streams.

    Attributes:
        device: The device.
        fake: Whether its tensors are fake: nothing is launched or copied.
    """

    def __init__(self, device: torch.device, stream: int, fake: bool) -> None:
        self.device = device
        self.fake = fake
        self._is_cuda = device.type == "cuda" and not fake
        self._put_by = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def of(tensor: Tensor) -> "Place":
        """Returns the place of ``tensor``, with its device's current stream; the same object every time."""
        device = tensor.device
        if isinstance(tensor, FakeTensor):
            return _place(device, 0, True)
        return _place(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0, False)

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured: what is copied now reaches the device only when it is replayed."""
        return self._is_cuda and torch.cuda.is_current_stream_capturing()

    def upload(self, values: Tensor | list[int], like: Tensor) -> Tensor:
        """Copies int32 or int64 values (a CPU tensor, or int64 numbers) to the device of ``like``.

        By way of pinned memory, of which torch keeps the block until the copy is over: nobody waits.
        """
        if self.fake:
            return like.new_empty(len(values), dtype=torch.int64)
        host = values if isinstance(values, Tensor) else torch.frombuffer(array("q", values), dtype=torch.int64)
        if not self._is_cuda:
            return host
        return self._pinned(host, is_row=host is not values).to(self.device, non_blocking=True)

    def _pinned(self, host: Tensor, is_row: bool) -> Tensor:
        """Returns a copy in pinned memory.

        A capture may not allocate any, so that it takes of what the steps before have put by for its rows.
        """
        if not self.capturing():
            if is_row and self._put_by.nbytes < PUT_BY * host.nbytes:
                self._put_by = torch.empty(PUT_BY * host.nbytes, dtype=torch.uint8).pin_memory()
            return host.pin_memory()
        if host.nbytes > self._put_by.nbytes:
            pinned = host.pin_memory()  # no steps before: it is up to torch whether that can be captured
        else:
            pinned = self._put_by[: host.nbytes].view(host.dtype).view(host.shape).copy_(host)
            self._put_by = self._put_by[-(-host.nbytes // 16) * 16 :]
        _captured.append(pinned)
        return pinned


_place = lru_cache(64)(Place)


@dataclass(frozen=True, eq=False)
class Listing:
    """A list of tensors on a device: its facts, and the row of its addresses there. It does not hold the tensors."""

    place: Place
    facts: Facts
    addresses: list[int]
    row: Tensor


_recent: list[Listing] = []
_facts: list[Facts] = []


def listed(tensors: Sequence[Tensor]) -> Listing:
    """Returns the listing of ``tensors``: the one at hand if they were seen lately, else a new one.

    Args:
        tensors: At least one; all on one device.
    """
    place = Place.of(tensors[0])
    addresses = list(map(id if place.fake else Tensor.data_ptr, tensors))
    for at in range(len(_recent) - 1, -1, -1):
        known = _recent[at]
        if known.addresses == addresses and known.place is place and known.facts.hold_for(tensors):
            if place.capturing():
                _captured.append(known)
            else:
                _recent.append(_recent.pop(at))
            return known
    listing = Listing(place, _known_facts(tensors), addresses, place.upload(addresses, tensors[0]))
    note("row", 0, 8 * len(addresses))
    if place.capturing():
        _captured.append(listing)
    else:
        _recent.append(listing)
        del _recent[:-RECENT]
    return listing


def _known_facts(tensors: Sequence[Tensor]) -> Facts:
    for at in range(len(_facts) - 1, -1, -1):
        if _facts[at].hold_for(tensors):
            facts = _facts.pop(at)
            break
    else:
        facts = Facts(tensors)
    _facts.append(facts)
    del _facts[:-RECENT]
    return facts


_plans: OrderedDict[Hashable, Any] = OrderedDict()


def planned(key: Hashable, place: Place, build: Callable[[], _T]) -> _T:
    """Returns the plan of ``key``, built if it is not at hand; the ones used least recently are dropped.

    Args:
        key: Everything the plan depends on.
        place: Where it is used.
        build: Makes it.
    """
    plan = _plans.get(key)
    if plan is None:
        plan = build()
    if place.capturing():
        _captured.append(plan)
        return plan
    _plans[key] = plan
    _plans.move_to_end(key)
    if len(_plans) > 2 * RECENT:
        _plans.popitem(last=False)
    return plan
