"""Counts launches and bytes of one step on a GPU that is not there: everything after backward, the optimizer included.

The step runs on fake CUDA tensors, on which any look at a value raises. On a terminal::

    python -m benchmarks.launch_counts
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import LISTS, Shape
from lightning_amp import Engine, resolve
from lightning_amp.kernels.launches import Launch, counting
from lightning_amp.master_weights import MasterWeights
from lightning_amp.outcomes import OutcomeRecord

ADAM = 28
"""Bytes an element that torch's fused Adam moves: gradient, weight, two moments read; all but the gradient written."""

HARMLESS = ("prim.", "profiler.", "aten.empty", "aten.new_empty", "aten.unbind", "aten.select", "aten.detach")
"""Operations that launch nothing on a device."""


@dataclass(frozen=True)
class StepCount:
    """What one step after backward costs.

    Attributes:
        kernels: Launches of this package, in order.
        others: Launches of torch's, by operation: the optimizer's, and the copy of the outcome to the host.
        rows: Rows of addresses copied to the device.
        nbytes: Bytes of gradients, weights and optimizer state an element, `ADAM` included.
        extra: Bytes an element on top where clipping bites.
    """

    kernels: tuple[str, ...]
    others: dict[str, int]
    rows: int
    nbytes: float
    extra: float


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(function).startswith(HARMLESS):
            self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def no_driver() -> Iterator[None]:
    """Lets steps run on fake devices, which have no events, no captures, and no outcome that could be read later."""
    with ExitStack() as patches:
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
        patches.enter_context(patch.object(torch.cuda, "Event", lambda: event))
        patches.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        patches.enter_context(patch.object(OutcomeRecord, "settle", lambda self: None))
        yield


def count_step(
    opt_level: Literal["O1", "O2"],
    shapes: Sequence[Shape],
    clip: Literal["norm", "value"] | None,
    optimizer: type = torch.optim.Adam,
    devices: Sequence[str] = ("cuda:0",),
    **options: Any,
) -> StepCount:
    """Counts a later step of one optimizer with one loss; gradients are put where backward would leave them.

    Args:
        opt_level: The level.
        shapes: Of the parameters.
        clip: How the gradients are clipped, None for not at all.
        optimizer: Its class.
        devices: Where the parameters are, by turns; the scaler is on the first.
        **options: For the optimizer; by default ``fused=True``.
    """
    with FakeTensorMode(), no_driver():
        params = [nn.Parameter(torch.empty(s, device=d)) for s, d in zip(shapes, cycle(devices), strict=False)]
        stepping = optimizer(params, **(options or {"fused": True}))
        for p in params:
            p.grad = torch.empty_like(p)
        stepping.step()  # gives it its state
        stepping.zero_grad()
        config = resolve(opt_level)
        masters = MasterWeights(config.master_weights)
        for p in params if config.master_weights else ():
            masters.convert(p, torch.float16)
        engine = Engine(config, [stepping], masters=masters, device=devices[0], max_consecutive_skips=None)
        loss = torch.empty((), device=devices[0])

        def differentiate(_: Tensor) -> None:
            for p in params:
                p.grad = torch.empty_like(p)
            operations.seen.clear()

        def step() -> None:
            stepping.zero_grad()
            engine.backward(loss, differentiate)
            if clip:
                engine.clip(stepping, 1.0, clip)
            engine.step(stepping)

        with _Operations() as operations:
            step()  # from the second step on, tables and the addresses of weights are on the device
            with counting() as log:
                step()
    return _summary(log, operations.seen, sum(map(math.prod, shapes)))


def _summary(log: list[Launch], others: Counter[str], elements: int) -> StepCount:
    kernels = [launch for launch in log if launch.programs]
    return StepCount(
        kernels=tuple(launch.name for launch in kernels),
        others=dict(others),
        rows=len(log) - len(kernels),
        nbytes=sum(launch.nbytes for launch in kernels) / elements + ADAM,
        extra=sum(launch.extra for launch in kernels if launch.name == "clip") / elements,
    )


def main() -> None:
    """Prints the counts of the lists of `benchmarks.shapes`."""
    print(
        f"{'list':10}{'level':>6}{'clip':>6}{'kernels':>9}{'torch':>7}{'rows':>6}{'B/element':>11}{'if it bites':>13}"
    )
    for name in ("dcgan", "resnet50", "tiny2000"):
        for level in ("O1", "O2"):
            for clip in (None, "norm", "value"):
                step = count_step(level, LISTS[name](), clip)
                others = sum(step.others.values())
                bites = f"{step.nbytes + step.extra:g}" if clip else ""
                print(
                    f"{name:10}{level:>6}{clip or 'no':>6}{len(step.kernels):>9}{others:>7}{step.rows:>6}"
                    f"{step.nbytes:>11g}{bites:>13}  {', '.join(step.kernels)}"
                )
    print(f"torch's: {', '.join(step.others)}")


if __name__ == "__main__":
    main()
