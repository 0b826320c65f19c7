"""Launches: a kernel with all that stays the same from step to step, so that a launch costs a few microseconds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor  # no public test tells a fake tensor


class Launch(NamedTuple):
    """One entry of a count.

    Attributes:
        name: The kernel, or ``"row"`` for a copy of addresses to the device.
        programs: How many programs it ran; 0 for a copy.
        nbytes: Bytes of gradients and weights that it moves in any case (of addresses, for a copy).
        extra: Bytes it moves on top where its condition holds on the device: clipping bites, a weight was edited.
    """

    name: str
    programs: int
    nbytes: int
    extra: int = 0


_log: list[Launch] | None = None


@contextmanager
def counting() -> Iterator[list[Launch]]:
    """Counts every launch of a kernel inside the block; outside of one nothing is counted, at no cost.

    On fake tensors (`FakeTensorMode`) launches are counted and not made, so a step can be counted for a device that is
    not there.

    Yields:
        The launches so far, in order.

    Example:
        >>> with counting() as log:
        ...     pass
        >>> sum(launch.nbytes for launch in log)
        0
    """
    global _log
    before, _log = _log, []
    try:
        yield _log
    finally:
        _log = before


def note(name: str, programs: int, nbytes: int, extra: int = 0) -> None:
    """Enters one launch into the count that is under way, if one is."""
    if _log is not None:
        _log.append(Launch(name, programs, nbytes, extra))


class Launcher:
    """A Triton kernel on one device, with its grid and its constants.

    The first launch compiles the kernel and keeps the handle, which later ones call without Triton's dispatch. That
    freezes what the dispatch would look at: so a launcher is always called with tensors of the same types, and with
    whole buffers (which are aligned) where the kernel does not say otherwise.

    Args:
        kernel: The jitted function; its constants come last.
        device: Where it runs.
        programs: The size of the grid.
        nbytes: See `Launch`.
        extra: See `Launch`.
        warps: Warps in a program.
        **constants: The kernel's compile-time constants, in their order.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        programs: int,
        nbytes: int = 0,
        extra: int = 0,
        *,
        warps: int = 4,
        **constants: Any,
    ) -> None:
        self._kernel = kernel
        self._index = device.index if device.type == "cuda" else None
        self._warps = warps
        self._constants = constants
        self._values = tuple(constants.values())
        self._grid = (programs, 1, 1)
        self._count = Launch(kernel.fn.__name__.removesuffix("_kernel"), programs, nbytes, extra)
        self._run: Callable[..., None] | None = None

    def __call__(self, *args: Any) -> None:
        """Launches the kernel on the device's current stream.

        Args:
            *args: Its arguments except the constants; the first is a tensor.
        """
        if _log is not None:
            _log.append(self._count)
        if isinstance(args[0], FakeTensor):
            return
        if self._index is not None and self._index != torch.cuda.current_device():
            with torch.cuda.device(self._index):
                self._launch(args)
        else:
            self._launch(args)

    def _launch(self, args: tuple[Any, ...]) -> None:
        if self._run is not None:
            self._run(*args, *self._values)
            return
        handle = self._kernel[self._grid](*args, **self._constants, num_warps=self._warps)
        if handle is not None:  # None from the interpreter
            self._run = handle[self._grid]
