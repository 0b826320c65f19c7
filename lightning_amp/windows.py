"""Which gradients a step has yet to use, and what a checkpoint keeps of them."""

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_amp.engine import Engine
from lightning_amp.gradients import Gradients

Grads = list[Tensor | None]
"""Gradients of some parameters."""

_CHUNK = 2**26
"""Bytes that go from one process to another at a time."""


class Windows:
    """The accumulation windows of a training: of each optimizer, whether one is open.

    A window opens with a backward pass that may reach the optimizer, and closes with its step. It is a matter of what a
    checkpoint must hold alone, so that a window that is taken for open costs bytes and nothing else.

    Args:
        optimizers: Anything with ``param_groups``.
        module: The model; gradients of parameters that no optimizer owns belong to any open window.
        wrapper: What reduces the gradients of several processes, None in a single one.
    """

    def __init__(
        self, optimizers: Sequence[Any], module: nn.Module, wrapper: DistributedDataParallel | None = None
    ) -> None:
        self.optimizers = list(optimizers)
        self.module = module
        self.wrapper = wrapper
        self.passes = 0
        """Backward passes so far."""
        self.open = [False] * len(self.optimizers)
        self.unreduced = [False] * len(self.optimizers)
        """Whether a pass of the open window left its gradients unreduced, so that each process has others."""
        self.waiting = [False] * len(self.optimizers)
        """Whether such a pass was seen since the latest that reduced anything: that is what the wrapper remembers."""

    def passed(self) -> bool:
        """Notes a backward pass that is about to run.

        Returns:
            Whether the wrapper leaves its gradients as they are (DDP's ``no_sync``).
        """
        self.passes += 1
        unreduced = self.wrapper is not None and not self.wrapper.require_backward_grad_sync
        if self.wrapper is not None and not unreduced:
            self.waiting = [False] * len(self.optimizers)
        for i, optimizer in enumerate(self.optimizers):
            if self.open[i] and self.waiting[i] >= unreduced:
                continue
            if _trains(optimizer):
                self.open[i] = True
                self.unreduced[i] |= unreduced
                self.waiting[i] |= unreduced
        return unreduced

    def stepped(self, optimizer: Any) -> None:
        """Notes that an optimizer was stepped, in vain or not.

        Args:
            optimizer: One of these.
        """
        for i, mine in enumerate(self.optimizers):
            if mine is optimizer:
                self.open[i] = self.unreduced[i] = False

    def remind(self, gradients: list[Grads]) -> None:
        """Has the wrapper remember the passes that wait to be reduced, as if it had seen them.

        DDP reduces what they reached with whatever pass is reduced next, whether that reaches it or not.

        Args:
            gradients: What they left, in the order of `lists`. What is in ``.grad`` afterwards means nothing.
        """
        pairs = [zip(*columns, strict=True) for columns in zip(self.lists(), gradients, strict=True)]
        waiting = [pair for waits, mine in zip(self.waiting, pairs, strict=False) for pair in mine if waits]
        reached = [p for p, g in waiting if g is not None and p.requires_grad]
        if self.wrapper is not None and reached:
            with self.wrapper.no_sync():
                torch.autograd.backward(reached, [torch.zeros_like(p) for p in reached])

    def lists(self) -> list[list[Tensor]]:
        """Returns each optimizer's parameters, and those that none owns."""
        lists = [Gradients.of(optimizer) for optimizer in self.optimizers]
        owned = {id(p) for params in lists for p in params}
        return [*lists, [p for p in self.module.parameters() if id(p) not in owned]]

    def gradients(self) -> list[Grads]:
        """Returns copies of the gradients in open windows, in the order of `lists`."""
        copies: dict[int, Tensor] = {}

        def taken(p: Tensor, is_open: bool) -> Tensor | None:
            if p.grad is None or not is_open:
                return None
            if id(p) not in copies:  # another optimizer may share it
                copies[id(p)] = p.grad.detach().to("cpu", copy=True)
            return copies[id(p)]

        are_open = [*self.open, any(self.open)]
        return [[taken(p, is_open) for p in params] for params, is_open in zip(self.lists(), are_open, strict=True)]

    def pending(self, engine: Engine | None) -> list[dict[str, Any]]:
        """Returns which of the gradients still carry a scale, and which one.

        Args:
            engine: The training's, or None where nothing is scaled.
        """
        are_open = [*self.open, any(self.open)]
        lists = [params if is_open else [] for params, is_open in zip(self.lists(), are_open, strict=True)]
        places = {id(p): [i, j] for i, params in enumerate(lists) for j, p in enumerate(params)}
        return [
            {
                "scaler": window.scale.scaler.name,
                "scale": 1.0 if window.scale.scale is None else window.scale.scale.item(),
                "inv_scale": 1.0 if window.scale.inv_scale is None else window.scale.inv_scale.item(),
                "current": window.scale.version == window.scale.scaler.version,
                "held": window.held,
                "losses": [loss.to("cpu", copy=True) for loss in window.losses],
                "places": [places[id(p)] for p, _ in window.present() if id(p) in places],
            }
            for window in (() if engine is None else engine.gradients.pending)
        ]


def _trains(optimizer: Any) -> bool:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                return True
    return False


def of_all_processes(share: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what each process holds, by rank, on the first; on any other, a list that is of no use.

    Every process of the training has to call it.

    Args:
        share: What this one holds: whatever `torch.load` reads with ``weights_only=True``.
    """
    rank, count = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in distributed.get_backend() else "cpu"
    shares = [share]
    for source in range(1, count):
        file = io.BytesIO()
        if rank == source:
            torch.save(share, file)
        size = torch.tensor(file.tell(), device=device)
        distributed.broadcast(size, source)
        data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8) if rank == source else None
        parts = []
        for start in range(0, int(size), _CHUNK):
            length = min(_CHUNK, int(size) - start)
            part = torch.empty(length, dtype=torch.uint8) if data is None else data[start : start + length]
            part = part.to(device)
            distributed.broadcast(part, source)
            parts += [part.cpu()] if rank == 0 else []
        if rank == 0:
            shares.append(torch.load(io.BytesIO(torch.cat(parts).numpy().tobytes()), weights_only=True))
    return shares
