"""SGD and Adam by their formulas, in float64, and the torch optimizers with the same settings."""

from dataclasses import dataclass, field
from typing import Any

import torch

LR, MOMENTUM, BETAS, EPS = 2.0**-5, 0.5, (0.5, 0.75), 2.0**-4
"""Dyadic, and an epsilon that does not make a rounding error in a gradient a whole step."""

KINDS = ("sgd", "sgd fused", "adam", "adam fused")


@dataclass
class Optimizer:
    """An optimizer's state by parameter name, and the update that it makes."""

    fused: bool
    state: dict[str, dict[str, Any]] = field(default_factory=dict)

    def update(self, name: str, value: Any, grad: Any) -> Any:
        raise NotImplementedError


class SGD(Optimizer):
    def update(self, name: str, value: Any, grad: Any) -> Any:
        old = self.state.get(name)
        momentum = grad if old is None else MOMENTUM * old["momentum_buffer"] + grad
        self.state[name] = {"momentum_buffer": momentum}
        return value - LR * momentum


class Adam(Optimizer):
    def update(self, name: str, value: Any, grad: Any) -> Any:
        old = self.state.get(name, {"step": 0, "exp_avg": 0.0, "exp_avg_sq": 0.0})
        step = old["step"] + 1
        mean = BETAS[0] * old["exp_avg"] + (1 - BETAS[0]) * grad
        square = BETAS[1] * old["exp_avg_sq"] + (1 - BETAS[1]) * grad**2
        self.state[name] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
        spread = (square / (1 - BETAS[1] ** step)) ** 0.5
        return value - LR * mean / (1 - BETAS[0] ** step) / (spread + EPS)


def make_optimizer(kind: str) -> Optimizer:
    """Returns the model's optimizer of a kind, see `KINDS`."""
    return (SGD if kind.startswith("sgd") else Adam)(fused=kind.endswith("fused"))


def make_torch_optimizer(kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Returns torch's optimizer of a kind, see `KINDS`."""
    fused = kind.endswith("fused")
    if kind.startswith("sgd"):
        return torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM, fused=fused)
    return torch.optim.Adam(groups, lr=LR, betas=BETAS, eps=EPS, fused=fused)
