"""Small trainings in plain PyTorch through `lightning_amp.amp`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp import amp

SCALE = 128.0
"""Where scales start: left in a gradient it shows, and no first step overflows."""

ONE = torch.ones(1, 1)
ZEROING = ("model", "optimizer", "hand", "model in place", "optimizer in place")


def zero(models: Sequence[nn.Module], optimizers: Sequence[Any], way: str) -> None:
    """Clears gradients in one of the ways of `ZEROING`."""
    for model in models if way.startswith("model") else ():
        model.zero_grad(set_to_none=way == "model")
    for optimizer in optimizers if way.startswith("optimizer") else ():
        optimizer.zero_grad(set_to_none=way == "optimizer")
    for p in (p for m in models for p in m.parameters()) if way == "hand" else ():
        p.grad = None


def pair(level: str = "O1", **settings: Any) -> tuple[list[nn.Linear], list[torch.optim.SGD]]:
    """Starts a training of two models of one weight, 1.0, and an optimizer for each, with a rate of 1."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        model.weight.data.fill_(1.0)
    optimizers = [torch.optim.SGD(model.parameters(), 1.0) for model in models]
    return amp.initialize(models, optimizers, opt_level=level, verbosity=0, init_scale=SCALE, **settings)


def block(loss: Tensor, optimizers: Any, overflow: nn.Linear | None = None, **settings: Any) -> None:
    """Runs a backward pass; ``overflow`` is the model whose gradient becomes infinite in it."""
    with amp.scale_loss(loss.float().sum(), optimizers, **settings) as scaled:
        scaled.backward()
        if overflow is not None:
            overflow.weight.grad.fill_(float("inf"))


def values(models: Sequence[nn.Linear]) -> list[float]:
    """Returns the weight of each model."""
    return [model.weight.item() for model in models]


class plain:
    """Stands in for `amp.scale_loss` in a float32 run."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss

    def __enter__(self) -> Tensor:
        return self.loss

    def __exit__(self, *_: Any) -> None:
        pass
