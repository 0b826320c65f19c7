"""One optimizer's step: who decides a skip and where, what it calls and returns, and who else may not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp.outcomes import Outcome
from tests.helpers.engines import X, all_equal, backward, linear_training

LEVELS = ["O1", "O2", "O3"]
FUSED: dict[str, Callable[..., Any]] = {
    "adam": lambda params: Adam(params, lr=0.1, fused=True, eps=1e-3),
    "adamw": lambda params: AdamW(params, lr=0.1, fused=True, eps=1e-3, amsgrad=True),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, fused=True),
    "sgd": lambda params: SGD(params, lr=0.1, fused=True),
    "adagrad": lambda params: Adagrad(params, lr=0.1, fused=True),
}


def state_of(optimizer: Any) -> Any:
    return copy.deepcopy([v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)])


class HostReads(TorchDispatchMode):
    """Counts values that are read on the host by way of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# Who decides


@pytest.mark.parametrize(("level", "name"), [(lv, n) for lv in LEVELS for n in FUSED if (lv, n) != ("O3", "adagrad")])
def test_a_fused_optimizer_decides_on_the_device_after_the_first_step(level: str, name: str) -> None:
    layer, optimizer, engine = linear_training(level, FUSED[name])
    record = engine.record(optimizer)
    for i, factor in enumerate((1.0, 1.0, float("inf"), 1.0)):
        backward(engine, layer, factor)
        weights, state, known = [p.detach().clone() for p in layer.parameters()], state_of(optimizer), record.progress
        with HostReads() as reads:
            engine.step(optimizer)
        if factor == 1.0:
            assert reads.count == (1 if i == 0 and name != "adagrad" else 0), "Adagrad is made with its state"
        assert record.progress == (known[0] + 1, known[1] + 1), "a skip is not known yet"
        still = all_equal(list(layer.parameters()), weights) and all_equal(state_of(optimizer), state)
        assert still is (factor != 1.0)
        assert engine.outcome(optimizer) is (Outcome.STEPPED if factor == 1.0 else Outcome.SKIPPED)
        optimizer.zero_grad()


@pytest.mark.parametrize("name", FUSED)
def test_an_overflow_at_the_very_first_step_leaves_no_trace(name: str) -> None:
    layer, optimizer, engine = linear_training("O1", FUSED[name])
    plain = copy.deepcopy(layer)
    reference = FUSED[name](plain.parameters())
    for factor in (float("nan"), 1.0, 1.0):
        backward(engine, layer, factor)
        engine.step(optimizer)
        optimizer.zero_grad()
        if factor == 1.0:
            plain(X).pow(2).sum().backward()
            reference.step()
            reference.zero_grad()
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_parameter_that_joins_later_is_not_left_to_the_device_at_its_first_step() -> None:
    layer, optimizer, engine = linear_training("O1", FUSED["momentum"])
    backward(engine, layer)
    engine.step(optimizer)
    late = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [late]})
    optimizer.zero_grad()
    engine.backward((late * 3e38).sum() * 8)
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.SKIPPED
    assert not optimizer.state[late]
    assert late.item() == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_another_optimizer_costs_one_read_a_step(level: str) -> None:
    layer, optimizer, engine = linear_training(level, lambda params: SGD(params, lr=0.1, foreach=True))
    counts: list[int] = []
    for factor in (1.0, float("inf"), 1.0):
        backward(engine, layer, factor)
        with HostReads() as mode:
            engine.step(optimizer)
        counts.append(mode.count)
        assert engine.outcome(optimizer) is (Outcome.STEPPED if factor == 1.0 else Outcome.SKIPPED)
        optimizer.zero_grad()
    assert counts == [1, 1, 1]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_fused_protocol_stays_on_the_optimizer(fails: bool) -> None:
    layer, optimizer, engine = linear_training("O1", FUSED["adam"])
    for i in range(2):
        backward(engine, layer)
        if fails and i:
            optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step(optimizer)
        else:
            engine.step(optimizer)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("level", LEVELS)
def test_c11_a_step_without_gradients_is_idle(level: str) -> None:
    layer, optimizer, engine = linear_training(level, FUSED["adam"])
    before = [p.detach().clone() for p in layer.parameters()]
    assert engine.step(optimizer) is None
    assert engine.outcome(optimizer) is Outcome.IDLE
    assert all_equal(list(layer.parameters()), before)
    assert not optimizer.state


# What a step calls, and what it returns


class Odd(SGD):
    """Takes an argument of its own and returns it."""

    def step(self, closure: Any = None, *, answer: int = 0) -> Any:  # type: ignore[override]
        super().step(closure)
        return answer


def test_a_step_takes_arguments_and_returns_what_the_optimizers_does() -> None:
    layer, optimizer, engine = linear_training("O2", lambda params: Odd(params, lr=0.1))
    backward(engine, layer)
    assert engine.step(optimizer, answer=42) == 42
    backward(engine, layer, float("inf"))
    assert engine.step(optimizer, answer=42) is None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["momentum", "sgd"])
def test_a_closure_runs_first_so_that_its_gradients_are_looked_at(level: str, name: str) -> None:
    layer, optimizer, engine = linear_training(level, FUSED[name])
    plain = nn.Linear(2, 1)
    plain.load_state_dict(layer.state_dict())
    reference = SGD(plain.parameters(), lr=0.1, momentum=0.9 * (name == "momentum"))
    for factor in (1.0, float("inf"), 1.0):

        def closure(factor: float = factor) -> str:
            optimizer.zero_grad()
            backward(engine, layer, factor)
            return "the loss"

        with torch.no_grad():
            assert engine.step(optimizer, closure=closure) == "the loss"
        if factor == 1.0:
            reference.zero_grad()
            plain(X).pow(2).sum().backward()
            reference.step()
    assert engine.counts(optimizer)[Outcome.SKIPPED] == 1
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_behind_the_engines_back_is_refused_until_the_end(level: str) -> None:
    layer, optimizer, engine = linear_training(level, FUSED["adam"])
    backward(engine, layer)
    engine.step(optimizer)
    before = [p.detach().clone() for p in layer.parameters()]
    with pytest.raises(RuntimeError, match=r"step\(\) of optimizer 0 was called directly.*self\.optimizers\(\)"):
        optimizer.step()
    assert all_equal(list(layer.parameters()), before)
    engine.close()
    if level == "O1":
        optimizer.step()
        assert not all_equal(list(layer.parameters()), before)
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks
