"""A region of autocast that casts the same operations on every device.

What CUDA's autocast casts and the CPU's does not is registered with torch's dispatcher, where autocast itself looks,
for as long as anybody needs it. So it holds however an operation is reached: as a function, a method or an operator,
from torch's own code, and where activation checkpointing runs a forward pass again; all else runs as fast as ever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from lightning_amp.autocast import no_autocast
from lightning_amp.cast_lists import CPU_CASTS, Kind
from lightning_amp.functions import cast_arguments


class _Registration:
    """What is registered in this process.

    Attributes:
        users: How many need it now.
    """

    def __init__(self) -> None:
        self.users = 0
        self._lock = threading.Lock()
        self._library: Any = None

    def add_user(self) -> None:
        with self._lock:
            self.users += 1
            if self.users == 1:
                library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
                for operation, kind in CPU_CASTS.items():
                    library.impl(operation, _casting(operation, kind), "AutocastCPU")
                self._library = library

    def remove_user(self) -> None:
        with self._lock:
            self.users -= 1
            if not self.users:
                self._library = None  # takes back what was registered with it


_registration = _Registration()


def _casting(name: str, kind: Kind) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_arguments(kind, "cpu", args, kwargs)
        with no_autocast("cpu"):  # as on CUDA, where nothing inside a listed operation is cast again
            return operation(*args, **kwargs)

    return run


class CpuCasts:
    """Adds to the CPU's autocast what CUDA's casts besides, inside the block; where autocast is off it does nothing."""

    def __enter__(self) -> None:
        _registration.add_user()

    def __exit__(self, *error: Any) -> None:
        _registration.remove_user()


def listed_casts(device_type: str) -> AbstractContextManager[None]:
    """Returns a context in which autocast, where it is on, casts the same operations on every device.

    Args:
        device_type: As in `torch.autocast`.
    """
    return CpuCasts() if device_type == "cpu" else nullcontext()


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
