"""Tables: which program of a launch handles which chunk of which tensor."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_amp.kernels.facts import Facts
from lightning_amp.kernels.plans import Place
from lightning_amp.kernels.tiles import CHUNK


class Tables(NamedTuple):
    """The parts of a launch that depend on sizes and types alone.

    Attributes:
        chunks: int32 ``[programs, 3]`` on the device: tensor, chunk of it, its kind.
        sizes: int64 ``[tensors]`` on the device: elements of each.
        programs: How many chunks there are.
        kinds: What the kernel is compiled for; chunks name them by index.
        elements: How many elements are of each kind.
        rest: Indices of the tensors that the kernel cannot handle.
    """

    chunks: Tensor
    sizes: Tensor
    programs: int
    kinds: tuple[Any, ...]
    elements: tuple[int, ...]
    rest: tuple[int, ...]


def build(facts: Facts, place: Place, like: Tensor, kind_of: Callable[[int], Any]) -> Tables:
    """Builds the tables for one list.

    Args:
        facts: Of the list.
        place: Where it lives.
        like: Any of its tensors.
        kind_of: Gives the kind of a tensor by index, None where the kernel cannot handle it.
    """
    found = [kind_of(i) for i in range(len(facts.numels))]
    kinds = tuple(dict.fromkeys(kind for kind in found if kind is not None))
    rest = tuple(i for i, kind in enumerate(found) if kind is None)
    numels = [0 if kind is None else n for n, kind in zip(facts.numels, found, strict=True)]
    elements = tuple(sum(n for n, kind in zip(numels, found, strict=True) if kind == wanted) for wanted in kinds)
    programs = sum(-(-n // CHUNK) for n in numels)
    if place.fake:
        empty = like.new_empty((max(programs, 1), 3), dtype=torch.int32)
        return Tables(empty, like.new_empty(len(numels), dtype=torch.int64), programs, kinds, elements, rest)
    sizes = torch.tensor(numels)
    per_tensor = (sizes + (CHUNK - 1)) // CHUNK
    tensor = torch.arange(len(numels)).repeat_interleave(per_tensor)
    chunk = torch.arange(programs) - (per_tensor.cumsum(0) - per_tensor)[tensor]
    kind = torch.tensor([kinds.index(k) if k is not None else 0 for k in found])[tensor]
    chunks = torch.stack([tensor, chunk, kind], dim=1).to(torch.int32)
    if not programs:
        chunks = torch.zeros(1, 3, dtype=torch.int32)
    return Tables(place.upload(chunks, like), place.upload(sizes, like), programs, kinds, elements, rest)
