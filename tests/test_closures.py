"""Optimizers and overridden hooks that make something of the closure that they are handed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import amp as plain_amp
from tests.helpers.modules import HALF_LEVELS, Scripted, amp, fit

BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]


class NeedsClosure(torch.optim.SGD):
    """An optimizer that does not step without a closure, which it asks for the loss."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "this optimizer needs a closure"
        self.losses = [*getattr(self, "losses", []), float(closure().detach())]
        super().step()


class TwoPasses(torch.optim.SGD):
    """Asks for gradients twice, as sharpness-aware minimisation does."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        closure()
        return super().step()


class ClearsFirst(torch.optim.SGD):
    """Clears the gradients and then runs its closure once, as SAM does at the weights that it has moved."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        self.zero_grad()
        closure()
        return super().step()


class TakesNone(torch.optim.SGD):
    """Has no argument for a closure."""

    def step(self) -> Any:  # type: ignore[override]
        return super().step()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))


def module_of(kind: type[torch.optim.SGD], automatic: bool, scheduled: bool = False) -> Scripted:
    def loss(module: Any, batch: Any, *_: Any) -> Any:
        return (module.net(batch).float() - 1).square().mean()

    def step(module: Any, batch: Any, index: int) -> Any:
        if automatic:
            return loss(module, batch)
        optimizer = module.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            value = loss(module, batch)
            module.manual_backward(value)
            return value

        optimizer.step(closure)
        return None

    def optimizers(module: Any) -> Any:
        optimizer = kind(module.parameters(), 0.1)
        if not scheduled:
            return optimizer
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]

    return Scripted(step, optimizers, automatic=automatic, net=network())


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize("scheduled", [False, True], ids=["", "scheduled"])
def test_an_optimizer_that_needs_its_closure_gets_one(level: str, automatic: bool, scheduled: bool) -> None:
    ours, plain = (module_of(NeedsClosure, automatic, scheduled) for _ in range(2))
    fit(plain, None, BATCHES)
    fit(ours, amp(level), BATCHES)
    losses = [module.trainer.optimizers[0].losses for module in (ours, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2 if level == "O3" else 5e-3)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-3, atol=5e-3 if level == "O3" else 1e-3)


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_an_optimizer_that_runs_its_closure_twice_is_refused_with_the_way_out(level: str, automatic: bool) -> None:
    """Its second gradients could not be kept from the weights; giving it the first ones again would be a lie."""
    with pytest.raises(RuntimeError, match=r"TwoPasses ran its closure a second time.*inside masters"):
        fit(module_of(TwoPasses, automatic), amp(level), BATCHES)


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_an_optimizer_that_clears_gradients_before_its_closure_is_refused(level: str, automatic: bool) -> None:
    """The closure has run, and brings no others: the step would be made without any, and nothing would be learned."""
    with pytest.raises(RuntimeError, match=r"ClearsFirst ran its closure after it had cleared.*inside masters"):
        fit(module_of(ClearsFirst, automatic), amp(level), BATCHES)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_an_optimizer_without_an_argument_for_a_closure_gets_none(level: str) -> None:
    """As a wrapper that forwards nothing; Lightning itself would fail here."""
    module = module_of(TakesNone, automatic=False)
    before = [p.detach().clone() for p in module.parameters()]
    fit(module, amp(level), BATCHES)
    assert not any(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_the_plain_front_end_hands_a_closure_on_as_well(level: str) -> None:
    net = network()
    optimizer = NeedsClosure(net.parameters(), 0.1)
    net, optimizer = plain_amp.initialize(net, optimizer, opt_level=level, init_scale=128.0, verbosity=0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (net(BATCHES[0]).float() - 1).square().mean()
        with plain_amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(optimizer.losses[0])
    plain_amp.deinitialize()
