"""Times of work on a device, and buffers to do it on."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.shapes import Shape

CACHE = 512 * 2**20
"""Buffers are rotated until this many bytes have gone by, so that no run finds its data in the cache."""


@dataclass(frozen=True)
class Setting:
    """Where to measure, and how much.

    Attributes:
        device: The device.
        dry: Whether everything is made small, to see that it runs.
    """

    device: torch.device
    dry: bool

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU to measure."""
        return self.device.type == "cuda"

    def shrink(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Returns the shapes, a few small ones where dry."""
        return [tuple(min(n, 8) for n in shape) for shape in shapes[:6]] if self.dry else list(shapes)

    def sets(self, nbytes: int) -> int:
        """Returns how many sets of buffers of ``nbytes`` each to rotate."""
        return 2 if self.dry else max(2, min(24, -(-CACHE // max(nbytes, 1))))

    def wait(self) -> None:
        """Waits for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Times:
    """Microseconds: the median of several runs, the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        """Sums up single measurements."""
        return cls(*(1e6 * value for value in (statistics.median(seconds), min(seconds), max(seconds))))


def device_time(setting: Setting, calls: Sequence[Callable[[], object]], runs: int = 15) -> Times:
    """Times calls on the device, without what the host does: they are captured in a CUDA graph and replayed.

    Args:
        setting: Where. On the CPU the calls themselves are timed.
        calls: The same work on different buffers, done one after the other.
        runs: How many replays.

    Returns:
        The time of one call.
    """
    for call in calls:
        call()
    if not setting.is_cuda:
        return Times.of([_clocked(calls) / len(calls) for _ in range(2)])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    seconds = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(calls))
    return Times.of(seconds)


def _clocked(calls: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def wall_time(setting: Setting, step: Callable[[], object], steps: int, runs: int = 7) -> tuple[Times, Times]:
    """Times steps by the wall clock.

    Args:
        setting: Where.
        step: One step.
        steps: How many in a run.
        runs: How many runs.

    Returns:
        The time of a step until the device is done, and until the host is.
    """
    for _ in range(3):
        step()
    until_done, until_free = [], []
    for _ in range(2 if setting.dry else runs):
        setting.wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        free = time.perf_counter()
        setting.wait()
        until_done.append((time.perf_counter() - start) / steps)
        until_free.append((free - start) / steps)
    return Times.of(until_done), Times.of(until_free)


def randoms(shapes: Sequence[Shape], setting: Setting, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns random tensors; zeros would run faster than real data do."""
    return [torch.randn(shape, device=setting.device).to(dtype) for shape in shapes]
