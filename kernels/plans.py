"""Plans: what a launch over a list of tensors needs to know, kept from step to step.

Sizes, types and layouts of a list of gradients are the same in every step, so the tables made from them are kept. Only
the addresses change: they are read each time, and copied to the device as one row, without a synchronisation, where
they are not those of a list seen lately.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # no public test tells a fake tensor

from lightning_amp.kernels.launches import note

RECENT = 32
"""How many lists are remembered, and how many plans."""

_T = TypeVar("_T")
_Layout = tuple[tuple[int, ...], tuple[int, ...]] | bool

_captured: list[object] = []  # a CUDA graph replays with these for as long as the process lives


class Place(NamedTuple):
    """Where a list lives, and on which stream it is used: rows and scratch are never shared between streams."""

    device: torch.device
    stream: int
    fake: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Place":
        """Returns the place of ``tensor``, with its device's current stream."""
        if isinstance(tensor, FakeTensor):
            return cls(tensor.device, 0, True)
        device = tensor.device
        return cls(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0, False)

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured: what is copied now reaches the device only when it is replayed."""
        return self.device.type == "cuda" and not self.fake and torch.cuda.is_current_stream_capturing()

    def upload(self, values: Tensor | list[int], like: Tensor) -> Tensor:
        """Copies int32 or int64 values (a CPU tensor, or int64 numbers) to the device of ``like``.

        By way of pinned memory, of which torch keeps the block until the copy is over: nobody waits.
        """
        if self.fake:
            return like.new_empty(len(values), dtype=torch.int64)
        host = values if isinstance(values, Tensor) else torch.frombuffer(array("q", values), dtype=torch.int64)
        if self.device.type == "cpu":
            return host
        host = host.pin_memory()
        if self.capturing():
            _captured.append(host)
        return host.to(self.device, non_blocking=True)


class Facts:
    """What a plan depends on in a list of tensors; one object for all lists alike, so that it is its own key.

    Attributes:
        numels: Elements of each tensor.
        dtypes: Element types.
        layouts: For each tensor True if contiguous, its shape and strides if dense in another order, else False; or
            None where all are contiguous.
    """

    def __init__(
        self, numels: tuple[int, ...], dtypes: tuple[torch.dtype, ...], layouts: tuple[_Layout, ...] | None
    ) -> None:
        self.numels = numels
        self.dtypes = dtypes
        self.layouts = layouts
        self.kinds = frozenset(dtypes)

    def layout(self, index: int) -> _Layout:
        """Returns the layout of one tensor."""
        return True if self.layouts is None else self.layouts[index]


_interned = lru_cache(RECENT)(Facts)
_dtype = attrgetter("dtype")


def _facts(tensors: Sequence[Tensor]) -> Facts:
    plain = all(map(Tensor.is_contiguous, tensors))
    layouts = None if plain else tuple(_layout(t.shape, t.stride()) for t in tensors)
    return _interned(tuple(map(Tensor.numel, tensors)), tuple(map(_dtype, tensors)), layouts)


@lru_cache(4096)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> _Layout:
    order = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1)
    expected = 1
    for stride, size in order:
        if stride != expected:
            return 0 in shape
        expected *= size
    in_order = [stride for size, stride in zip(shape, strides, strict=True) if size != 1]
    return True if in_order == sorted(in_order, reverse=True) else (tuple(shape), tuple(strides))


class Listing:
    """A list of tensors with its facts, and the row of its addresses on the device.

    It holds the tensors weakly: they are told again as the same objects at the same addresses, so that nothing else
    about them has to be looked at twice.
    """

    def __init__(self, place: Place, tensors: Sequence[Tensor], addresses: list[int]) -> None:
        self.place = place
        self.addresses = addresses
        self.facts = _facts(tensors)
        self.row = place.upload(addresses, tensors[0])
        self._refs = list(map(ref, tensors))
        note("row", 0, 8 * len(addresses))

    def is_of(self, place: Place, tensors: Sequence[Tensor], addresses: list[int]) -> bool:
        """Whether it is the listing of these tensors."""
        return (
            addresses == self.addresses
            and place == self.place
            and all(map(is_, [alive() for alive in self._refs], tensors))
        )


_recent: list[Listing] = []


def listed(tensors: Sequence[Tensor]) -> Listing:
    """Returns the listing of ``tensors``: the one at hand if they were seen lately, else a new one.

    Args:
        tensors: At least one; all on one device.
    """
    place = Place.of(tensors[0])
    addresses = list(map(id if place.fake else Tensor.data_ptr, tensors))
    found = next((known for known in reversed(_recent) if known.is_of(place, tensors, addresses)), None)
    listing = found or Listing(place, tensors, addresses)
    if place.capturing():
        _captured.append(listing)
        return listing
    if found:
        _recent.remove(found)
    _recent.append(listing)
    del _recent[:-RECENT]
    return listing


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
