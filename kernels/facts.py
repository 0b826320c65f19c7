"""Facts: what is the same in every step about a list of tensors, and a quick check that it still is."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from torch import Tensor

Layout = tuple[tuple[int, ...], tuple[int, ...]] | bool

_dtype = attrgetter("dtype")


class Facts:
    """What a plan depends on in a list of tensors; there is one object for all lists alike, so it is its own key.

    Attributes:
        device: Where they live.
        numels: Elements of each tensor.
        dtypes: Element types.
        layouts: For each tensor True if contiguous, its shape and strides if dense in another order, else False; or
            None where all are contiguous.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = tensors[0].device
        self.numels = list(map(Tensor.numel, tensors))
        self.dtypes = list(map(_dtype, tensors))
        self.layouts = _layouts(tensors)
        self.kinds = frozenset(self.dtypes)
        self._check = _guard(tensors)

    def hold_for(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they are the facts of ``tensors``, too."""
        if len(tensors) != len(self.numels):
            return False
        if self._check is not None:
            return self._check(*tensors)
        return (
            self.device == tensors[0].device
            and self.numels == list(map(Tensor.numel, tensors))
            and self.dtypes == list(map(_dtype, tensors))
            and self.layouts == _layouts(tensors)
        )

    def layout(self, index: int) -> Layout:
        """Returns the layout of one tensor."""
        return True if self.layouts is None else self.layouts[index]


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Returns a check whether other tensors have the types, sizes and strides of these, None where torch has none.

    It is the one that torch compiles its own guards from: a single call for the whole list, where asking each tensor
    in turn takes three times as long. Nothing public does that.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        make: Any = TensorGuards  # its stub names symbolic sizes only
        guards = make(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        )
        if guards.check(*tensors):
            check: Callable[..., bool] = guards.check
            return check
    except Exception:  # another torch, another signature: slower, not wrong
        pass
    return None


def _layouts(tensors: Sequence[Tensor]) -> list[Layout] | None:
    if all(map(Tensor.is_contiguous, tensors)):
        return None
    return [_layout(t.shape, t.stride()) for t in tensors]


@lru_cache(4096)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    order = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1)
    expected = 1
    for stride, size in order:
        if stride != expected:
            return 0 in shape
        expected *= size
    in_order = [stride for size, stride in zip(shape, strides, strict=True) if size != 1]
    return True if in_order == sorted(in_order, reverse=True) else (tuple(shape), tuple(strides))
