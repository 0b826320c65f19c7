"""Gradients of every kind: sparse, complex, double, part of a graph, of inputs, shared, half without a master."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.outcomes import Outcome
from tests.helpers.engines import SCALE, engine_of, grad_of, param

LEVELS = ["O1", "O2", "O3"]


def numbers(tensor: Tensor | None) -> Any:
    assert tensor is not None
    return tensor.detach().tolist()


# Sparse


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_c85_sparse_gradients_add_up_are_clipped_and_stepped(level: str, delay: bool) -> None:
    table = nn.Embedding(4, 1, sparse=True)
    table.weight.data.zero_()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    engine = engine_of(level, [optimizer], table, loss_scale=SCALE)
    for ids in ([0, 1, 1], [1, 2]):
        engine.backward(table(torch.tensor(ids)).float().sum(), delay_unscale=delay)
    engine.unscale()
    grad = grad_of(table.weight)
    assert grad.is_sparse
    assert numbers(grad.to_dense().flatten()) == [1.0, 3.0, 1.0, 0.0]
    assert engine.norm(optimizer).item() == pytest.approx(11**0.5)
    engine.clip(optimizer, 2.0, "value")
    engine.step(optimizer)
    assert numbers(table.weight.flatten()) == [-1.0, -2.0, -1.0, 0.0]
    assert engine.outcome(optimizer) is Outcome.STEPPED


def test_c85_half_duplicates_that_overflow_only_in_their_sum_are_found() -> None:
    table = nn.Embedding(4, 1, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    engine = engine_of("O2", [optimizer], table, loss_scale=1.0)
    before = table.weight.detach().clone()
    engine.backward((table(torch.tensor([1, 1])) * 40000.0).sum())
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.SKIPPED
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dense_first", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_c85_sparse_and_dense_gradients_of_one_weight_add_up(level: str, dense_first: bool, create_graph: bool) -> None:
    table = nn.Embedding(4, 1, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    engine = engine_of(level, [optimizer], table, loss_scale=SCALE)
    losses = [lambda: table(torch.tensor([1, 1, 2])).float().sum(), lambda: (table.weight * 2).float().sum()]
    for loss in reversed(losses) if dense_first else losses:
        engine.backward(loss(), create_graph=create_graph)
    assert numbers(grad_of(table.weight).flatten()) == [2.0, 4.0, 3.0, 2.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_empty_sparse_gradient_and_sparse_beside_dense(level: str) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 1, sparse=True), "dense": nn.Linear(1, 1, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = engine_of(level, [optimizer], *model.values())
    engine.backward(model["table"](torch.zeros(0, dtype=torch.int64)).sum() + model["dense"](torch.ones(1, 1)).sum())
    assert numbers(model["dense"].weight.grad) == [[1.0]]
    assert numbers(engine.norm(optimizer)) == 1.0
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.STEPPED


def test_c85_a_plain_backward_with_duplicates_is_clipped_too() -> None:
    table = nn.Embedding(4, 1, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    engine = engine_of("O1", [optimizer], table)
    table(torch.tensor([0, 1, 1])).sum().backward()
    engine.clip(optimizer, 1.5, "value")
    assert numbers(grad_of(table.weight).to_dense().flatten()) == [1.0, 1.5, 0.0, 0.0]


# Complex and double


@pytest.mark.parametrize("delay", [False, True])
def test_complex_and_double_parameters(delay: bool) -> None:
    z = nn.Parameter(torch.tensor([1.0 + 1.0j]))
    d = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([z, d, f := param(1.0)], lr=1.0)
    engine = engine_of("O1", [optimizer])
    for _ in range(2):
        engine.backward((z * (3 - 4j)).real.sum() + d.sum() / 3 + f.sum(), delay_unscale=delay)
    engine.unscale()
    assert numbers(z.grad) == [6.0 + 8.0j]
    assert numbers(d.grad) == [pytest.approx(2 / 3, rel=1e-15)], "not by way of float32"
    assert engine.norm(optimizer).item() == pytest.approx((100 + 4 / 9 + 4) ** 0.5)
    engine.clip(optimizer, 1.0)
    assert engine.norm(optimizer).item() == pytest.approx(1.0, rel=1e-4)
    engine.step(optimizer)
    assert numbers(z)[0].real == pytest.approx(1 - 6 / 10.22, rel=1e-2)


def test_a_nonfinite_imaginary_part_is_found() -> None:
    z = nn.Parameter(torch.tensor([1.0 + 1.0j]))
    optimizer = torch.optim.SGD([z], lr=1.0)
    engine = engine_of("O1", [optimizer])
    engine.backward((z.imag * float("inf")).sum())
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.SKIPPED


# Part of a graph


class Root(torch.autograd.Function):
    """x^1.5 / 1.5, with a gradient that is what its own second derivative is computed from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**1.5 / 1.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return (grad * grad * ctx.saved_tensors[0]).sqrt()


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda p: p.exp().sum(),
    lambda p: (p**3).sum(),
    lambda p: p.sigmoid().prod(),
    lambda p: torch.logsumexp(p, 0) * p[0],
    lambda p: Root.apply(p).sum(),  # type: ignore[no-untyped-call]
    lambda p: nn.functional.layer_norm(p.sqrt(), (2,)).pow(2)[1],
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("passes", [1, 2])
def test_with_create_graph_a_gradient_is_true_and_can_be_differentiated(function: Any, passes: int) -> None:
    p, exact = param(0.5, 2.0), torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    engine = engine_of("O1", [torch.optim.SGD([p], lr=1.0)], growth_interval=1)
    for _ in range(passes):
        engine.backward(function(p), create_graph=True)
    (first,) = torch.autograd.grad(passes * function(exact), exact, create_graph=True)
    torch.testing.assert_close(p.grad, first.float(), rtol=1e-4, atol=1e-5)
    (second,) = torch.autograd.grad((first**2).sum(), exact)
    (found,) = torch.autograd.grad((grad_of(p) ** 2).sum(), p)
    torch.testing.assert_close(found, second.float(), rtol=1e-3, atol=1e-4)
    p.grad = None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_with_create_graph_an_overflow_is_found() -> None:
    p = param(1.0)
    engine = engine_of("O1", [torch.optim.SGD([p], lr=1.0)])
    engine.backward((p * 3e38).sum(), create_graph=True)
    assert engine.accounts()["optimizer_0"].overflows == 1
    p.grad = None


# Of inputs


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spelling", ["one", "list", "with a parameter"])
@pytest.mark.parametrize("leaf", [True, False])
def test_tensors_named_as_inputs_get_true_gradients(level: str, spelling: str, leaf: bool) -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[2.0, -3.0]])
    engine = engine_of(level, [torch.optim.SGD(layer.parameters(), lr=1.0)], layer, loss_scale=SCALE)
    x = torch.ones(1, 2, requires_grad=True)
    x = x if leaf else x * 1
    inputs: Any = {"one": x, "list": [x], "with a parameter": [x, layer.weight]}[spelling]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in (1.0, 2.0):
            engine.backward(layer(x).float().sum(), inputs=inputs, retain_graph=True)
            assert numbers(x.grad) == [[2.0 * i, -3.0 * i]]
            if spelling == "with a parameter":
                assert numbers(layer.weight.grad) == [[i, i]]
            else:
                assert layer.weight.grad is None


@pytest.mark.parametrize("leaf", [True, False])
def test_a_half_input_keeps_its_dtype(leaf: bool) -> None:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(2.0)
    engine = engine_of("O2", [torch.optim.SGD(layer.parameters(), lr=1.0)], layer)
    x = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    x = x if leaf else x * 1
    engine.backward(layer(x).sum(), inputs=[x])
    assert grad_of(x).dtype is torch.float16
    assert numbers(x.grad) == [[2.0]]


# Parameters out of the ordinary


@pytest.mark.parametrize("level", LEVELS)
def test_c80_a_parameter_of_two_optimizers_is_divided_once(level: str) -> None:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.zero_()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for _ in range(2)]
    engine = engine_of(level, optimizers, layer, loss_scale=SCALE)
    engine.backward(layer(torch.ones(1, 1)).float().sum())
    assert numbers(layer.weight.grad) == [[1.0]]
    for optimizer in optimizers:
        engine.step(optimizer)
    assert numbers(layer.weight) == [[-2.0]]


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_of_no_optimizer_have_true_gradients_too(level: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    engine = engine_of(level, [torch.optim.SGD(model["a"].parameters(), lr=1.0)], *model.values(), loss_scale=SCALE)
    for _ in range(2):
        engine.backward(sum(net(torch.ones(1, 1)).float().sum() for net in model.values()))  # type: ignore[arg-type]
    assert numbers(model["b"].weight.grad) == [[2.0]]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("odd", [False, True])
def test_a_network_that_was_half_before_and_has_no_optimizer_gets_true_gradients(level: str, odd: bool) -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False).half()})
    if odd:
        model["b"].phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    engine = engine_of(level, [torch.optim.SGD(model["a"].parameters(), lr=1.0)], *model.values(), loss_scale=SCALE)
    for i in (1.0, 2.0):
        extra = model["b"].phase.real.sum() if odd else 0
        engine.backward(model["b"](torch.ones(1, 1).half()).float().sum() + model["a"](torch.ones(1, 1)).sum() + extra)
        assert numbers(model["b"].weight.grad) == [[i]]


def zero(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how.startswith("by hand"):
        for p in model.parameters():
            p.grad = None
    else:
        (model if "module" in how else optimizer).zero_grad(set_to_none="none" in how)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize(
    "how", ["module to none", "module to zero", "optimizer to none", "optimizer to zero", "by hand to none"]
)
def test_every_spelling_of_zero_grad_clears_what_is_there_pending_or_not(level: str, delay: bool, how: str) -> None:
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    engine = engine_of(level, [optimizer], layer, loss_scale=SCALE)
    for factor in (3.0, 5.0):
        zero(how, layer, optimizer)
        engine.backward(layer(torch.full((1, 1), factor)).float().sum(), delay_unscale=delay)
        zero(how, layer, optimizer)
        assert layer.weight.grad is None if "none" in how else numbers(layer.weight.grad) == [[0.0]]
        engine.backward(layer(torch.full((1, 1), factor)).float().sum(), delay_unscale=delay)
        engine.unscale()
        assert numbers(layer.weight.grad) == [[factor]]
