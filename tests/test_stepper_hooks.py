"""Around a step: what an optimizer's hooks see, what an exception leaves, and state that stays float32."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightning_amp.outcomes import Outcome
from tests.helpers.engines import SCALE, X, all_equal, backward, engine_of, linear_training

# Hooks, exceptions


@pytest.mark.parametrize("early", [True, False])
def test_the_optimizers_own_hooks_see_masters_before_and_fresh_half_weights_after(early: bool) -> None:
    layer = nn.Linear(2, 1, bias=False)
    optimizer = SGD(layer.parameters(), lr=1.0)
    seen: list[Any] = []

    def look(*_: Any) -> None:
        (p,) = optimizer.param_groups[0]["params"]
        seen.append((p is layer.weight, p.dtype, layer.weight.tolist()))

    def register() -> None:
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)

    if early:
        register()
    engine = engine_of("O2", [optimizer], layer)
    if not early:
        register()
    before = layer.weight.tolist()
    engine.backward(layer(X).sum())
    engine.step(optimizer)
    assert seen == [(False, torch.float32, before), (True, torch.float16, layer.weight.tolist())]
    assert layer.weight.tolist() != before


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_an_exception_inside_a_step_gives_the_masters_back(when: str, error: type[BaseException]) -> None:
    class Failing(SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if when == "after":
                super().step(closure)
            if self.fails:
                raise error
            return super().step(closure) if when == "before" else None

    layer, optimizer, engine = linear_training("O2", lambda params: Failing(params, lr=1.0, momentum=0.5))
    before = layer.weight.detach().clone()
    backward(engine, layer)
    with pytest.raises(error):
        engine.step(optimizer)
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(layer.parameters())
    assert set(optimizer.state) <= set(layer.parameters())
    assert engine.outcome(optimizer) is None
    master = engine.masters.of(layer.weight)
    assert master is not None
    assert torch.equal(layer.weight, master.half())
    assert torch.equal(layer.weight, before) is (when == "before")
    optimizer.fails = False
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.STEPPED


# State in float32


def moments(optimizer: Any) -> list[Tensor]:
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("fused", [False, True])
def test_c70_optimizer_state_stays_float32_through_a_load_to_the_last_bit(fused: bool) -> None:
    layer, optimizer, engine = linear_training("O2", lambda params: Adam(params, lr=0.1, fused=fused))
    for _ in range(3):
        optimizer.zero_grad()
        backward(engine, layer, 1e-3)
        engine.step(optimizer)
    assert {m.dtype for m in moments(optimizer)} == {torch.float32}
    saved = copy.deepcopy(optimizer.state_dict())
    want = [m.clone() for m in moments(optimizer)]
    assert any(m.half().float().ne(m).any() for m in want), "half would lose something"
    other, loaded, _ = linear_training("O2", lambda params: Adam(params, lr=0.5, fused=fused))
    loaded.load_state_dict(saved)
    assert all_equal(moments(loaded), want)
    assert {m.dtype for m in moments(loaded)} == {torch.float32}
    assert set(loaded.state) == set(other.parameters())
    assert loaded.param_groups[0]["lr"] == 0.1


def test_floating_state_made_for_half_parameters_becomes_float32_at_the_start() -> None:
    layer = nn.Linear(2, 1).half()
    optimizer = Adam(layer.parameters(), eps=1e-3)
    layer(X.half()).sum().backward()
    optimizer.step()
    engine_of("O2", [optimizer], layer)
    assert {m.dtype for m in moments(optimizer)} == {torch.float32}


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_without_masters_loading_is_torchs_own(level: str) -> None:
    layer, optimizer, engine = linear_training(level, lambda params: Adam(params, eps=1e-3), loss_scale=SCALE)
    backward(engine, layer)
    engine.step(optimizer)
    _, loaded, _ = linear_training(level, lambda params: Adam(params))
    loaded.load_state_dict(optimizer.state_dict())
    assert {m.dtype for m in moments(loaded)} == {layer.weight.dtype}
