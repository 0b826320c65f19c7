"""The walk over an autograd graph, against what autograd itself reaches."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp.graph import reached_leaves


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2, grads[1] * 2


def frozen(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    b.requires_grad_(False)
    return (a * b).sum()


def without_grad(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = b * c
    return (a + hidden).sum()


def in_place(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros(3, 2)
    out[0] = a
    out[1].add_(b)
    return out.sum()


Use = Callable[[Tensor, Tensor, Tensor], Tensor]
GRAPHS: dict[str, Use] = {
    "all": lambda a, b, c: (a * b + c).sum(),
    "one, many times": lambda a, b, c: (a * a + a.exp() * a).sum(),
    "frozen": frozen,
    "detached": lambda a, b, c: (a * b.detach()).sum(),
    "without grad": without_grad,
    "in place": in_place,
    "views": lambda a, b, c: torch.stack([a[:1], b.view(2, 1)[0]]).sum(),
    "custom, one output": lambda a, b, c: Twice.apply(a, b)[0].sum(),
    "checkpointed": lambda a, b, c: checkpoint(lambda x: (x * b).exp(), a, use_reentrant=False).sum(),
    "grad of a grad": lambda a, b, c: torch.autograd.grad((a**3 * b).sum(), a, create_graph=True)[0].sum(),
    "a leaf": lambda a, b, c: a,
    "none": lambda a, b, c: (a * b).detach(),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_walk_finds_what_a_backward_pass_reaches(name: str) -> None:
    leaves = [torch.randn(2, requires_grad=True) for _ in range(3)]
    loss = GRAPHS[name](*leaves)
    found = reached_leaves(loss)
    if loss.requires_grad:
        loss.backward(torch.ones_like(loss))
    assert found == {id(leaf) for leaf in leaves if leaf.grad is not None}


def test_a_module_is_told_from_another_by_its_leaves() -> None:
    d, g = nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = torch.randn(3, 2)
    ids = {name: {id(p) for p in net.parameters()} for name, net in (("d", d), ("g", g))}
    assert reached_leaves(d(g(x).detach()).mean()) == ids["d"]
    assert reached_leaves(d(g(x)).mean()) == ids["d"] | ids["g"]


def test_a_deep_graph_is_walked_and_one_beyond_the_limit_is_not() -> None:
    leaf = torch.ones((), requires_grad=True)
    x = leaf * 1
    for _ in range(5000):
        x = x + 1
    assert reached_leaves(x) == {id(leaf)}
    assert reached_leaves(x, limit=5002) == {id(leaf)}
    assert reached_leaves(x, limit=5001) is None


def test_the_walk_keeps_nothing_alive() -> None:
    leaf = torch.ones(2, requires_grad=True)
    loss = (leaf * 2).sum()
    reached_leaves(loss)
    watch = weakref.ref(leaf)
    del leaf, loss
    gc.collect()
    assert watch() is None
