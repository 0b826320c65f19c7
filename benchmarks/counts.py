"""Counts what a training step costs on the host, exactly: dispatched ops, Python and C calls, host reads.

A small GAN trains through real Trainers, under `AmpPrecision` and under Lightning's own precisions. Counts repeat, so
tests hold them to bounds; times do not, so they are only printed, as ratios of best times. On a terminal::

    OMP_NUM_THREADS=1 python -m benchmarks.counts --rounds 5 --json counts.json
"""

import argparse
import gc
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.small_gan import PRECISIONS, Setup, SmallGan, Style, train
from lightning_amp.graph import reached_leaves

WARM_UP = 3


@dataclass
class Counts:
    """What one training step costs.

    Attributes:
        ops: Dispatched ops, casts aside, by phase: ``"forward"``, ``"backward"`` (all of them), ``"step"`` (both).
        casts: Ops that do nothing but change a dtype: `aten._to_copy` (autocast's casts, their backward, the hooks'
            casts at O2) and `copy_` or `_foreach_copy_` from one dtype to another (masters and half weights at O2).
        reads: `aten._local_scalar_dense`: the host asks for a tensor's value, and waits for the device.
        calls: Calls of Python and C functions.
        best_ms: The least processor time of a step that was not counted, in milliseconds.
    """

    ops: dict[str, int] = field(default_factory=dict)
    casts: int = 0
    reads: int = 0
    calls: int = 0
    best_ms: float = float("inf")

    @property
    def all_ops(self) -> int:
        """Every dispatched op, casts included."""
        return sum(self.ops.values()) + self.casts


def is_cast(op: Any, args: Sequence[Any]) -> bool:
    """Tells whether an op does nothing but change a dtype.

    Args:
        op: What was dispatched.
        args: Its arguments.
    """
    aten = torch.ops.aten
    if op.overloadpacket is aten.copy_:
        return bool(args[0].dtype != args[1].dtype)
    if op.overloadpacket is aten._foreach_copy_:
        return any(to.dtype != of.dtype for to, of in zip(args[0], args[1], strict=True))
    return op.overloadpacket is aten._to_copy


class _OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, module: SmallGan, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts, phase = self._counts, self._module.phase
        if is_cast(func, args):
            counts.casts += 1
        else:
            counts.ops[phase] = counts.ops.get(phase, 0) + 1
        counts.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Meter(pl.Callback):
    """Counts the ops of one step and the calls of the next, then times the rest.

    Args:
        warm_up: Steps before the first that is counted.
    """

    def __init__(self, warm_up: int = WARM_UP) -> None:
        self.counts = Counts()
        self.functions: Counter[str] = Counter()
        """Calls by function, to see what costs them."""
        self._warm_up = warm_up
        self._began = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begins and ends counting: a step reaches from here to the next time, so that Lightning's loop is in it."""
        now, step = time.thread_time(), batch_idx - self._warm_up
        if step == 0:
            self._ops = _OpCounter(pl_module, self.counts)
            self._ops.__enter__()  # type: ignore[no-untyped-call]
        elif step == 1:
            self._ops.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            sys.setprofile(self._count_call)
        elif step == 2:
            sys.setprofile(None)
            self.counts.calls = self.functions.total()
        elif step > 2:
            self.counts.best_ms = min(self.counts.best_ms, 1e3 * (now - self._began))
        self._began = time.thread_time()  # other programs' time is not in it

    def _count_call(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.functions[f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"] += 1
        elif event == "c_call":
            self.functions[arg.__qualname__] += 1


def measure(setup: Setup, *, warm_up: int = WARM_UP, timed: int = 0) -> Meter:
    """Counts one training.

    Args:
        setup: What to train.
        warm_up: Steps before the first that is counted.
        timed: How many steps to time after those that are counted.
    """
    meter = Meter(warm_up)
    gc.collect()
    gc.disable()  # a collection would be counted, and timed, where it happens to fall
    try:
        train(setup, warm_up + 3 + timed, meter)
    finally:
        gc.enable()
    return meter


def compare(setups: Sequence[Setup], rounds: int = 0, timed: int = 40) -> list[Counts]:
    """Counts several trainings and times them in turns, so that a busy moment of the machine hits none alone.

    Args:
        setups: What to train.
        rounds: How often each is timed; the best time counts.
        timed: Steps that are timed a round.
    """
    counts = [measure(setup).counts for setup in setups]
    for _ in range(rounds):
        for setup, count in zip(setups, counts, strict=True):
            count.best_ms = min(count.best_ms, measure(setup, timed=timed).counts.best_ms)
    return counts


def graph_of(nodes: int) -> Tensor:
    """Returns a loss whose autograd graph has about ``nodes`` nodes: layers of weight and bias, as in a network.

    Args:
        nodes: How many.
    """
    x = torch.ones(())
    for _ in range(nodes // 4):  # a product, a sum, and two leaves
        x = x * torch.ones((), requires_grad=True) + torch.ones((), requires_grad=True)
    return x


def graph_walk_ms(nodes: int = 1000, repeats: int = 200) -> float:
    """Returns the best time of walking an autograd graph, in milliseconds.

    Args:
        nodes: Size of the graph.
        repeats: How often it is walked.
    """
    loss, best = graph_of(nodes), float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        reached_leaves(loss)
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


def _line(setup: Setup, counts: Counts, fp16: Counts) -> str:
    ops = " ".join(f"{counts.ops[phase]:8}" for phase in ("forward", "backward", "step"))
    calls = f"{counts.calls:6} {counts.calls / fp16.calls:6.3f}"
    times = "" if counts.best_ms == float("inf") else f"{counts.best_ms:8.2f} {counts.best_ms / fp16.best_ms:6.3f}"
    return f"  {setup.precision:9} {counts.all_ops:6} {ops} {counts.casts:6} {counts.reads:6} {calls} {times}"


def main() -> None:
    """Prints a table for every kind of training, and writes the numbers as JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[8, 160], help="parameter tensors")
    parser.add_argument("--styles", nargs="+", default=get_args(Style), choices=get_args(Style), help="kinds of losses")
    parser.add_argument("--rounds", type=int, default=0, help="how often each training is timed (0: counts alone)")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)

    report: list[dict[str, Any]] = []
    for tensors, fused, style in product(args.tensors, (False, True), args.styles):
        setups = [Setup(precision, tensors, style, fused) for precision in PRECISIONS]
        counted = compare(setups, args.rounds)
        print(f"{tensors} tensors, {'fused' if fused else 'foreach'} Adam, losses {style}")
        print("               ops  forward backward     step  casts  reads  calls  ratio  best ms  ratio")
        for setup, counts in zip(setups, counted, strict=True):
            print(_line(setup, counts, counted[PRECISIONS.index("16-mixed")]))
            report.append({**asdict(setup), **asdict(counts), "all_ops": counts.all_ops})
    walk = graph_walk_ms()
    print(f"Walking an autograd graph of 1000 nodes: {walk:.2f} ms at best")
    if args.json:
        args.json.write_text(json.dumps({"steps": report, "graph_walk_ms": walk}, indent=1) + "\n")


if __name__ == "__main__":
    main()
