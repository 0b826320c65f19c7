"""A region of autocast that casts the same functions on every device."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_amp.autocast import no_autocast
from lightning_amp.cast_lists import CPU_CASTS, CPU_PLACES, Kind
from lightning_amp.functions import Place, cast_arguments

_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class _Active(threading.local):
    count = 0


_active = _Active()


class CpuCasts(TorchFunctionMode):
    """Adds to the CPU's autocast what CUDA's casts besides; where autocast is off it does nothing."""

    def __enter__(self) -> "CpuCasts":
        _active.count += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _active.count -= 1
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = CPU_CASTS.get(func)
        if kind is not None:
            return _run(func, kind, args, kwargs)
        if func not in _BACKWARD:
            return func(*args, **kwargs)
        with _wrapped_where_they_live():
            return func(*args, **kwargs)


def _run(function: Callable[..., Any], kind: Kind, args: Any, kwargs: Any) -> Any:
    if not torch.is_autocast_enabled("cpu") or kwargs.get("out") is not None:
        return function(*args, **kwargs)
    args, kwargs = cast_arguments(kind, "cpu", args, kwargs)
    with no_autocast("cpu"):  # as on CUDA, where nothing inside a listed function is cast again
        return function(*args, **kwargs)


# torch takes a mode away while it handles a call, a backward pass too, and activation checkpointing runs parts of the
# forward pass again in there, with autocast as it was. So for that time the functions themselves are wrapped.


@functools.lru_cache
def _wrapper(function: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args, **kwargs: _run(function, kind, args, kwargs))


@contextmanager
def _wrapped_where_they_live() -> Iterator[None]:
    before: list[tuple[Place, Any]] = []
    for (owner, name), (function, kind) in CPU_PLACES.items():
        if getattr(owner, name) == function:  # else it is registered, and cast another way
            before.append(((owner, name), vars(owner).get(name)))
            setattr(owner, name, _wrapper(function, kind))
    try:
        yield
    finally:
        for (owner, name), found in before:
            if found is None:
                delattr(owner, name)
            else:
                setattr(owner, name, found)


def listed_casts(device_type: str) -> AbstractContextManager[Any]:
    """Returns a context in which autocast, where it is on, casts the same functions on every device.

    Args:
        device_type: As in `torch.autocast`.
    """
    return CpuCasts() if device_type == "cpu" and not _active.count else nullcontext()


@contextmanager
def casts(device_type: str, dtype: torch.dtype, cache: bool) -> Iterator[None]:
    """Casts functions inside the block as O1 does.

    Args:
        device_type: As in `torch.autocast`.
        dtype: The half type.
        cache: Whether a weight's half copy is kept for its next use.
    """
    with torch.autocast(device_type, dtype, cache_enabled=cache), listed_casts(device_type):
        yield
