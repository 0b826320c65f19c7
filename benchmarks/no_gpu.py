"""A driver for Triton that launches nothing, so that the host side of a launch runs, and is timed, without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class _Utils:
    """What Triton asks a driver's library for, when it loads a compiled kernel."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), object(), 32, 0, 1024

    def unload_module(self, module: object) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}


class NoGpu:
    """The driver.

    Attributes:
        launched: Names and arguments of the kernels that would have run, where they are kept.
        keep: Whether they are.
    """

    def __init__(self, architecture: int = 90) -> None:
        self._target = GPUTarget("cuda", architecture, 32)
        self.utils = _Utils()
        self.launched: list[tuple[str, tuple[Any, ...]]] = []
        self.keep = False

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Returns what Triton calls in place of the C function that launches a kernel."""
        names = source.fn.arg_names
        what = source.fn.__name__

        def launch(*args: Any) -> None:
            # Grid, stream, function, two kinds of metadata and two hooks come before the kernel's own arguments.
            if len(args) != 9 + len(names):
                raise TypeError(f"{what} takes {len(names)} arguments, not {len(args) - 9}.")
            if self.keep:
                self.launched.append((what, args[9:]))

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> str:
        return "cpu"


_driver = lru_cache(NoGpu)  # kernels that are compiled stay with the driver that they were compiled for


@contextmanager
def no_gpu(architecture: int = 90) -> Iterator[NoGpu]:
    """Makes Triton compile for a GPU that is not there, and launch nothing, inside the block.

    Args:
        architecture: Its compute capability, as ``10 * major + minor``.

    Yields:
        The driver.
    """
    chosen = _driver(architecture)
    driver.set_active(chosen)
    try:
        yield chosen
    finally:
        chosen.keep = False
        chosen.launched = []
        driver._active = None  # `reset_active` would look for a GPU
