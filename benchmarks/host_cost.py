"""Times the host side of what follows a backward pass, against torch's `GradScaler.unscale_` and `clip_grad_norm_`.

Both run on CPU tensors of eight elements, in turns, on gradients made anew in every round. Ours launches nothing (a
driver for a GPU that is not there stands in), so it is Python, Triton's launcher without the C call, and the copy of
addresses without the transfer. torch's time holds its small CPU kernels too; the second ratio leaves the largest of
them, the norms, out. On a terminal::

    OMP_NUM_THREADS=1 python -m benchmarks.host_cost
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.no_gpu import no_gpu
from lightning_amp.kernels import triton_backend as ops
from lightning_amp.kernels.scale_rule import FIRST_BAD_NONE, ScaleRule, initial_state

SIZES = (50, 500, 2000)


class HostCost(NamedTuple):
    """Microseconds a step, the best of all rounds.

    Attributes:
        tensors: How many parameters there are.
        torch: `unscale_` and `clip_grad_norm_`.
        norms: Of these, the CPU kernel that computes the norms.
        ours: Collect with the update of the scaler, read and clip.
        ours_o2: The same on half gradients, with adopt and refresh; it allocates the float32 gradients.
    """

    tensors: int
    torch: float
    norms: float
    ours: float
    ours_o2: float

    @property
    def ratio(self) -> float:
        """How many times less ours is than torch's."""
        return self.torch / self.ours


class _Side:
    """Parameters with gradients made anew for each round, and what is timed on them."""

    def __init__(self, tensors: int, step: Callable[["_Side"], None], dtype: torch.dtype = torch.float32) -> None:
        self.params = [nn.Parameter(torch.randn(8)) for _ in range(tensors)]
        self.halves = [p.detach().to(dtype) for p in self.params]
        self.dtype = dtype
        self.best = float("inf")
        self._step = step

    def run(self) -> None:
        """Times one round."""
        grads = [torch.randn(8, dtype=self.dtype) for _ in self.params]
        self.grads: list[Tensor] = grads
        if self.dtype is torch.float32:
            for p, g in zip(self.params, grads, strict=True):
                p.grad = g
        start = time.perf_counter()
        self._step(self)
        self.best = min(self.best, time.perf_counter() - start)


def _torch_side(tensors: int) -> _Side:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))

    def step(side: _Side) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(side.params, 1.0)

    side = _Side(tensors, step)
    optimizer = torch.optim.SGD(side.params, lr=0.0)
    run = side.run

    def fresh() -> None:
        run()
        scaler.update()  # or the scaler refuses to unscale twice

    side.run = fresh  # type: ignore[method-assign]
    return side


def _norms_side(tensors: int) -> _Side:
    return _Side(tensors, lambda side: _discard(torch._foreach_norm(side.grads)))


def _discard(_: object) -> None:
    pass


def _our_side(tensors: int, dtype: torch.dtype) -> _Side:
    rule = ScaleRule()
    state = torch.tensor(initial_state(1.0, rule))
    first_bad = torch.tensor(FIRST_BAD_NONE, dtype=torch.int32)
    loss, inv_scale, none = torch.ones(()), state[1], [None] * tensors

    def step(side: _Side) -> None:
        new = side.grads if side.dtype is not torch.float32 else [p.grad for p in side.params]
        grads = ops.collect_and_update(new, none, inv_scale, first_bad, state, loss, rule)
        ops.read_and_clip(grads, "norm", 1.0)
        if side.dtype is not torch.float32:
            ops.adopt(side.halves, side.params)
            ops.refresh(side.halves, side.params)

    return _Side(tensors, step, dtype)


def measure(tensors: int, rounds: int = 60) -> HostCost:
    """Times both sides in turns.

    Args:
        tensors: How many parameters each has.
        rounds: How many rounds each gets; the best counts.
    """
    with no_gpu(), torch.no_grad():
        torchs, ours = _by_turns(_torch_side(tensors), _our_side(tensors, torch.float32), rounds)
        _, ours_o2 = _by_turns(_torch_side(tensors), _our_side(tensors, torch.float16), rounds)
        _, norms = _by_turns(_torch_side(tensors), _norms_side(tensors), rounds)
    return HostCost(tensors, torchs, norms, ours, ours_o2)


def _by_turns(one: _Side, other: _Side, rounds: int) -> tuple[float, float]:
    """Runs both, each starting from the caches that the other left, and returns the best of each in microseconds."""
    for _ in range(rounds):
        one.run()
        other.run()
    return one.best * 1e6, other.best * 1e6


def count_calls(tensors: int, warm_up: int = 3) -> tuple[int, int]:
    """Counts the calls of Python and C functions of a step, torch's and ours: unlike times, the same each time.

    Args:
        tensors: How many parameters each has.
        warm_up: Rounds before the one that is counted.
    """
    counts = []
    with no_gpu(), torch.no_grad():
        for side in (_torch_side(tensors), _our_side(tensors, torch.float32)):
            step, seen = side._step, 0

            def count(frame: object, event: str, arg: object) -> None:
                nonlocal seen
                seen += event in ("call", "c_call")

            def counted(side: _Side, step: Callable[[_Side], None] = step) -> None:
                sys.setprofile(count)
                try:
                    step(side)
                finally:
                    sys.setprofile(None)

            for _ in range(warm_up):
                side.run()
            side._step = counted
            side.run()
            counts.append(seen)
    return counts[0], counts[1]


def main() -> None:
    """Prints one line a size."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = [measure(tensors, args.rounds) for tensors in SIZES]
    print("microseconds a step   torch  (its norms)    ours   O2 with weights   torch/ours   without norms")
    for cost in costs:
        without = (cost.torch - cost.norms) / cost.ours
        print(
            f"{cost.tensors:6} tensors{cost.torch:14.0f}{cost.norms:13.0f}{cost.ours:8.0f}{cost.ours_o2:18.0f}"
            f"{cost.ratio:13.1f}{without:16.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps([cost._asdict() for cost in costs], indent=2) + "\n")


if __name__ == "__main__":
    main()
