"""Faults that the stateful test found, each in as few calls as show it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.casting import Conversion
from lightning_amp.engine import Engine
from lightning_amp.master_weights import MasterWeights
from lightning_amp.opt_levels import resolve

SCALE = 8.0


def training(level: str, *owners: str, optimizer: Any = torch.optim.SGD, **settings: Any) -> tuple[Engine, nn.Module]:
    """Returns an engine over ``root.a`` and ``root.b``, with an optimizer for each of ``owners`` ("a", "b", "ab")."""
    root = nn.Module()
    for name in "ab":
        layer = nn.Linear(2, 1, bias=False)
        layer.weight.data = torch.tensor([[1.0001, -2.0003]])
        root.add_module(name, layer)
    config = resolve(level, **{"loss_scale": "dynamic", "init_scale": SCALE} | settings)
    masters = MasterWeights(config.master_weights)
    if config.cast_model_type is not None:
        Conversion(config, masters).convert(root, root_is_model=False)
    optimizers = [optimizer([getattr(root, n).weight for n in names], lr=0.5) for names in owners]
    return Engine(config, optimizers, [root], masters=masters, num_losses=2), root


def loss(layer: nn.Module, x: tuple[float, float] = (1.0, 2.0)) -> Tensor:
    """Returns a loss whose gradient is ``x``."""
    return layer(torch.tensor([x])).float().sum()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ArithmeticError


def failing(*layers: nn.Module) -> Tensor:
    """Returns a loss whose backward pass fails when it has reached every layer."""
    failed = Fails.apply(torch.ones(1, requires_grad=True)).sum()  # type: ignore[no-untyped-call]
    return failed + sum(loss(layer) for layer in layers)


def values(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    return tensor.detach().float().flatten().tolist()


# Passes that fail


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_delayed_pass_that_fails_leaves_no_scale_in_true_gradients(level: str) -> None:
    engine, root = training(level, "a")
    engine.backward(loss(root.a))
    with pytest.raises(ArithmeticError):
        engine.backward(failing(), delay_unscale=True)
    engine.unscale()
    assert values(root.a.weight.grad) == [1.0, 2.0]


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_delayed_pass_that_fails_half_way_leaves_what_it_added_true(level: str) -> None:
    engine, root = training(level, "a")
    with pytest.raises(ArithmeticError):
        engine.backward(failing(root.a), delay_unscale=True)
    engine.unscale()
    assert values(root.a.weight.grad) == [1.0, 2.0]


def test_delayed_pass_that_fails_at_once_moves_no_scaler() -> None:
    engine, _ = training("O1", "a", growth_interval=1)
    with pytest.raises(ArithmeticError):
        engine.backward(failing(), delay_unscale=True)
    engine.unscale()
    assert engine.loss_scales() == {"optimizer_0": SCALE}


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_pass_that_fails_keeps_what_was_pending(level: str) -> None:
    engine, root = training(level, "a")
    engine.backward(loss(root.a), delay_unscale=True)
    with pytest.raises(ArithmeticError):
        engine.backward(failing())
    engine.unscale()
    assert values(root.a.weight.grad) == [1.0, 2.0]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_pass_with_a_graph_that_fails_keeps_what_was_pending() -> None:
    engine, root = training("O1", "ab")
    root.a.weight.grad = torch.tensor([[9.0, 9.0]])
    engine.backward(loss(root.a) + loss(root.b), delay_unscale=True)
    root.a.weight.grad = None
    with pytest.raises(ArithmeticError):
        engine.backward(failing(root.a, root.b), create_graph=True)
    engine.unscale()
    assert root.a.weight.grad is None
    assert values(root.b.weight.grad) == [1.0, 2.0]


# Half gradients that are not autograd's own


def test_gradients_of_a_plain_backward_are_summed_in_float32_at_o2() -> None:
    engine, root = training("O2", "a")
    loss(root.a, (2048.0, 1.0)).backward()
    assert root.a.weight.grad.dtype is torch.float16
    engine.backward(loss(root.a, (1.0, 1.0)))
    assert root.a.weight.grad.dtype is torch.float32
    assert values(root.a.weight.grad) == [2049.0, 2.0]  # 2049 is no half number


def test_half_parameter_that_joins_an_optimizer_gets_float32_gradients_at_o2() -> None:
    engine, _ = training("O2", "a")
    late = nn.Parameter(torch.ones(2, dtype=torch.float16))
    engine.optimizers[0].add_param_group({"params": [late]})
    engine.backward((late.float() * torch.tensor([1.0, 2.0])).sum())
    assert late.grad is not None
    assert late.grad.dtype is torch.float32
    engine.step(engine.optimizers[0])
    assert values(late) == [0.5, 0.0]


# Inside ``masters``


@pytest.mark.parametrize("fused", [False, True])
def test_masters_stay_lent_after_a_step_inside_the_block(fused: bool) -> None:
    engine, root = training("O2", "a", optimizer=lambda params, lr: torch.optim.SGD(params, lr, fused=fused))
    (optimizer,) = engine.optimizers
    engine.backward(loss(root.a))
    with engine.lent_masters(optimizer), torch.no_grad():
        engine.step(optimizer)
        assert values(root.a.weight) == [0.5, -3.0]  # the half weights are fresh after the step
        (held,) = optimizer.param_groups[0]["params"]
        assert held.dtype is torch.float32
        held.add_(1e-5)
        engine.step(optimizer)
    master = engine.masters.of(root.a.weight)
    assert values(master) == pytest.approx([1.0001 - 1.0 + 1e-5, -2.0003 - 2.0 + 1e-5], abs=1e-6)


def test_shared_parameter_lent_to_two_optimizers_keeps_gradient_and_edits() -> None:
    engine, root = training("O2", "a", "a")
    one, two = engine.optimizers
    engine.backward(loss(root.a))
    with engine.lent_masters(one), torch.no_grad():
        one.param_groups[0]["params"][0].add_(1e-5)
        with engine.lent_masters(two):
            assert two.param_groups[0]["params"][0] is one.param_groups[0]["params"][0]
    assert values(root.a.weight.grad) == [1.0, 2.0]
    assert values(engine.masters.of(root.a.weight)) == pytest.approx([1.0001 + 1e-5, -2.0003 + 1e-5], abs=1e-6)
    assert not engine.masters.lent


def test_gradients_cleared_through_the_module_inside_the_block_stay_cleared() -> None:
    engine, root = training("O2", "a")
    engine.backward(loss(root.a))
    with engine.lent_masters(engine.optimizers[0]):
        root.zero_grad()
    assert root.a.weight.grad is None
    engine.backward(loss(root.a))
    assert values(root.a.weight.grad) == [1.0, 2.0]


# Going back


def test_fused_optimizer_without_state_again_survives_an_overflow() -> None:
    """A checkpoint from before the first step takes the momentum away that the device would skip the step with."""
    engine, root = training("O1", "a", optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.5, fused=True))
    (optimizer,) = engine.optimizers
    before = optimizer.state_dict()
    engine.backward(loss(root.a))
    engine.step(optimizer)
    optimizer.load_state_dict(before)
    root.a.weight.grad.fill_(torch.inf)
    engine.step(optimizer)
    assert not any(value is not None for state in optimizer.state.values() for value in state.values())
    root.a.weight.grad.fill_(1.0)
    engine.step(optimizer)
    assert values(optimizer.state[root.a.weight]["momentum_buffer"]) == [1.0, 1.0]


def test_weights_loaded_at_o3_stand_for_themselves_after_a_fused_step() -> None:
    """Whichever optimizer it is, what is saved after a step is what the half weights are."""
    engine, root = training("O3", "a", optimizer=lambda p, lr: torch.optim.SGD(p, lr, fused=True))
    (optimizer,) = engine.optimizers
    for _ in range(2):
        engine.backward(loss(root.a))
        engine.step(optimizer)
    root.load_state_dict({"a.weight": torch.tensor([[0.1, 0.2]])}, strict=False)
    assert values(root.state_dict()["a.weight"]) == values(torch.tensor([[0.1, 0.2]]))
    root.a.weight.grad.zero_()
    engine.step(optimizer)
    assert values(root.state_dict()["a.weight"]) == values(root.a.weight)


def test_pass_that_fails_does_not_make_an_earlier_window_undone() -> None:
    """Its gradients were thrown away; it counts as a clean window all the same, as it does without the failing pass."""
    engine, root = training("O1", "ab", growth_interval=1)
    engine.backward(loss(root.a), delay_unscale=True)
    root.a.weight.grad = None
    with pytest.raises(ArithmeticError):
        engine.backward(failing(), delay_unscale=True)
    engine.unscale()
    assert engine.loss_scales() == {"optimizer_0": 2 * SCALE}


def test_gradients_of_a_step_that_is_to_be_skipped_are_clipped_like_others() -> None:
    """The overflow was in a gradient that is gone; what is left is finite, and may be stepped once it is gone too."""
    engine, root = training("O1", "ab")
    engine.backward(loss(root.a, (3e38, 3e38)) + loss(root.b))
    assert not torch.isfinite(root.a.weight.grad).any()
    root.a.weight.grad = None
    engine.clip(engine.optimizers[0], 0.5, "value")
    assert values(root.b.weight.grad) == [0.5, 0.5]
    engine.step(engine.optimizers[0])
    assert engine.outcome(engine.optimizers[0]).value == "skipped"


def test_an_overflow_in_a_graph_of_gradients_is_laid_to_the_parameters_of_that_pass() -> None:
    engine, root = training("O1", "ab")
    engine.backward(loss(root.b))
    engine.backward(loss(root.a, (torch.inf, 1.0)), create_graph=True)
    (cause,) = engine.causes()
    assert "first parameter with a non-finite gradient was a.weight" in cause
