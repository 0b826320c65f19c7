"""Gradients between a pass and a step: set aside, added up, pending, collected - each by the scale of its own pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.engine import Engine
from tests.helpers.engines import SCALE, engine_of, grad_of, param

LEVELS = ["O1", "O2", "O3"]


def simple(*params: Tensor, engine: dict[str, Any] | None = None, **settings: Any) -> Engine:
    """An engine with float32 weights over bare parameters, an SGD each."""
    return engine_of("O1", [torch.optim.SGD([p], lr=1.0) for p in params], engine=engine, **settings)


def numbers(tensor: Tensor | None) -> Any:
    assert tensor is not None
    return tensor.detach().tolist()


class Fails(torch.autograd.Function):
    """Fails on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ArithmeticError


# Set aside and added up


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("ids", [(0, 0, 0), (0, 1, 2)])
def test_passes_add_up_whatever_scale_each_ran_under(level: str, ids: tuple[int, ...]) -> None:
    layer = nn.Linear(2, 1, bias=False)
    engine = engine_of(level, [torch.optim.SGD(layer.parameters(), lr=1.0)], layer, loss_scale="dynamic")
    for i, loss_id in enumerate(ids, start=1):
        engine.scalers.get(("loss", (loss_id,))).state[:2] = torch.tensor([2.0**i, 2.0**-i])
        engine.backward(layer(torch.tensor([[1.0, 2.0]])).float().sum(), loss_id=loss_id)
        assert numbers(layer.weight.grad) == [[1.0 * i, 2.0 * i]]
    assert grad_of(layer.weight).dtype is (torch.float16 if level == "O3" else torch.float32)


@pytest.mark.parametrize("level", LEVELS)
def test_passes_that_are_not_reduced_yet_add_to_true_gradients(level: str) -> None:
    """As in DDP's no_sync, in whose passes nothing is set aside: what is true already goes under their scale."""
    layer = nn.Linear(2, 1, bias=False)
    engine = engine_of(level, [torch.optim.SGD(layer.parameters(), lr=1.0)], layer, loss_scale=8.0)
    for i, hold in enumerate((False, True, True, False), start=1):
        engine.backward(layer(torch.tensor([[1.0, 2.0]])).float().sum(), hold=hold)
        scale = 8.0 if hold else 1.0
        assert numbers(layer.weight.grad) == [[scale * i, scale * 2.0 * i]]


def test_a_gradient_is_set_aside_by_reference_and_stays_the_tensor() -> None:
    p = param(1.0)
    engine = simple(p)
    engine.backward(p.sum())
    first = p.grad
    seen: list[Tensor | None] = []
    p.register_hook(lambda _: seen.append(p.grad))
    engine.backward(p.sum() * 2)
    assert seen == [None], "autograd hands over a fresh one"
    assert p.grad is first
    assert numbers(first) == [3.0]


def test_small_terms_are_not_lost_beside_large_ones_at_o2() -> None:
    layer = nn.Linear(1, 1, bias=False)
    engine = engine_of("O2", [torch.optim.SGD(layer.parameters(), lr=1.0)], layer, loss_scale=1.0)
    for x in (2048.0, *[0.25] * 8):
        engine.backward(layer(torch.tensor([[x]])).sum(), delay_unscale=True)
    assert numbers(layer.weight.grad) == [[2050.0]]


@pytest.mark.parametrize("inv", [1.0, 2.0**-20])
def test_an_overflow_is_seen_before_it_is_unscaled(inv: float) -> None:
    p = param(1.0)
    engine = simple(p, loss_scale=1 / inv)
    engine.backward((p * 3e38).sum() * (1 if inv < 1 else 4))
    (account,) = engine.accounts().values()
    assert account.overflows == 1
    assert not torch.isfinite(grad_of(p)).any()


@pytest.mark.parametrize("cut", [False, True])
def test_parameters_that_a_pass_does_not_reach_keep_their_gradient(cut: bool) -> None:
    p, q = param(1.0), param(1.0)
    engine = simple(p, q)
    engine.backward((p + q).sum())
    kept = q.grad
    if cut:
        q.requires_grad_(False)
    engine.backward((p * 2).sum())
    assert q.grad is kept
    assert (numbers(p.grad), numbers(q.grad)) == ([3.0], [1.0])


# Pending


@pytest.mark.parametrize(
    "end",
    [
        lambda e, p: e.unscale(),
        lambda e, p: e.unscale(e.optimizers[0]),
        lambda e, p: e.norm(e.optimizers[0]),
        lambda e, p: e.clip(e.optimizers[0], 1e6),
        lambda e, p: e.backward((p * 0).sum()),
        lambda e, p: e.backward((p * 0).sum(), loss_id=1),
        lambda e, p: (e.backward((p * 0).sum(), loss_id=1, delay_unscale=True), e.unscale()),
    ],
)
def test_c21_delayed_passes_are_pending_until_someone_needs_them(end: Callable[[Engine, Tensor], Any]) -> None:
    p = param(1.0)
    engine = simple(p)
    for i in (1, 2):
        engine.backward((p * 3).sum(), loss_id=0, delay_unscale=True)
        assert numbers(p.grad) == [3.0 * i * SCALE]
    end(engine, p)
    assert numbers(p.grad) == [6.0]
    engine.unscale()
    assert numbers(p.grad) == [6.0]
    assert engine.accounts()["loss_0"].attempts == 1, "a window is one attempt"


def test_a_pass_over_true_gradients_is_not_delayed() -> None:
    """They would be looked at with its own, and an infinity that was there before would lower its scale."""
    p, q = param(1.0), param(1.0)
    engine = simple(p, q)
    engine.backward((p + 2 * q).sum())
    engine.backward(p.sum(), delay_unscale=True)
    assert (numbers(p.grad), numbers(q.grad)) == ([2.0], [2.0])
    q.grad.fill_(float("inf"))
    before = engine.loss_scales()
    engine.backward(p.sum(), delay_unscale=True)
    engine.unscale()
    assert numbers(p.grad) == [3.0]
    assert engine.loss_scales() == before


def test_c10_a_scale_that_moves_meanwhile_does_not_touch_a_window() -> None:
    p, q = param(1.0), param(1.0)
    engine = simple(p, q)
    engine.backward(p.sum(), loss_id=0, delay_unscale=True)
    for _ in range(3):
        engine.scalers.get(("loss", (0,))).first_bad.fill_(0)
        engine.scalers.get(("loss", (0,))).update(None)
    engine.backward(p.sum(), loss_id=0, delay_unscale=True)
    engine.unscale()
    assert numbers(p.grad) == [2.0]


@pytest.mark.parametrize("lost", ["none", "zeroed", "replaced"])
@pytest.mark.parametrize("end", ["pass", "unscale"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_window_whose_gradient_is_cleared_or_replaced_lets_go_of_it(lost: str, end: str, in_place: bool) -> None:
    p, q = param(1.0), param(1.0)
    engine = simple(p, q)
    engine.gradients.collector.in_place = in_place
    engine.backward((p + q).sum(), delay_unscale=True)
    if lost == "zeroed":
        torch.optim.SGD([p]).zero_grad(set_to_none=False)
    else:
        p.grad = None if lost == "none" else torch.full((1,), 5.0)
    engine.unscale() if end == "unscale" else engine.backward((q * 2).sum())
    assert p.grad is None if lost == "none" else numbers(p.grad) == [0.0 if lost == "zeroed" else 5.0]
    assert numbers(q.grad) == [1.0 if end == "unscale" else 3.0]


def test_a_parameter_frozen_while_it_is_pending_becomes_true_too() -> None:
    p, q = param(1.0), param(1.0)
    engine = simple(p, q)
    engine.backward((p + q).sum(), delay_unscale=True)
    p.requires_grad_(False)
    engine.backward(q.sum())
    assert (numbers(p.grad), numbers(q.grad)) == ([1.0], [2.0])


def test_a_tensor_named_as_input_is_pending_too_and_becomes_true() -> None:
    p, x = param(1.0), torch.ones(2, requires_grad=True)
    engine = simple(p)
    engine.backward((p * x).sum(), inputs=[x], delay_unscale=True)
    engine.backward(p.sum())
    assert (numbers(x.grad), numbers(p.grad)) == ([1.0, 1.0], [1.0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_losses_of_a_window_may_differ_in_dtype_and_shape(dtype: torch.dtype) -> None:
    p = param(1.0, 2.0)
    engine = simple(p)
    engine.backward(p.sum(), delay_unscale=True)
    engine.backward(p.to(dtype).sum(), delay_unscale=True)
    engine.backward(p.view(2, 1), gradient=torch.ones(2, 1), delay_unscale=True)
    engine.unscale()
    assert numbers(p.grad) == [3.0, 3.0]
    assert engine.accounts()["optimizer_0"].attempts == 1


def test_one_nonfinite_loss_excuses_its_window() -> None:
    p = param(1.0)
    engine = simple(p)
    for factor in (1.0, float("inf"), 1.0):
        engine.backward((p * factor).sum(), delay_unscale=True)
    engine.unscale()
    (account,) = engine.accounts().values()
    assert (account.overflows, account.nonfinite_losses, account.scale) == (1, 1, SCALE)


# Passes that fail


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("at", ["once", "half way"])
def test_a_pass_that_fails_leaves_true_gradients_and_moves_no_scaler(delay: bool, at: str) -> None:
    p, q = param(1.0), param(1.0)
    engine = simple(p, q)
    engine.backward((p + q).sum())
    failing = Fails.apply(p * 1).sum()  # type: ignore[no-untyped-call]
    with pytest.raises(ArithmeticError):
        engine.backward(failing + (q * 2).sum() if at == "half way" else failing, delay_unscale=delay)
    engine.unscale()
    assert numbers(p.grad) == [1.0]
    assert numbers(q.grad)[0] in (1.0, 3.0 if delay else 1.0), "what a delayed pass added stays, as in torch"
    assert [s.account().overflows for s in engine.scalers] == [0] * len(list(engine.scalers))
    engine.backward((p + q).sum())
    assert numbers(p.grad) == [2.0]


def test_a_loss_without_a_graph_fails_as_in_torch() -> None:
    p = param(1.0)
    engine = simple(p)
    engine.backward(p.sum())
    with pytest.raises(RuntimeError, match="does not require grad"):
        engine.backward(torch.ones(1))
    assert numbers(p.grad) == [1.0]
