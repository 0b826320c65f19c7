"""What scales must be able to do, what they must cost, and what the cast cache must never do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp import Outcome
from tests.helpers.modules import HALF_LEVELS, SCALED_LEVELS, Scripted, amp, fit

ONES = [torch.ones(2, 4)] * 8


class HostReads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", SCALED_LEVELS)
@pytest.mark.parametrize(("fused", "per_step"), [(True, 0), (False, 1)])
def test_c30_a_step_costs_the_host_at_most_one_read(level, fused, per_step):
    counts: list[int] = []

    def step(module: Any, batch: Tensor, i: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        with HostReads() as reads:
            module.manual_backward(module.net(batch).mean())
            module.clip_gradients(optimizer, 1.0)
            optimizer.step()
        counts.append(reads.count)

    module = Scripted(step, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=fused), net=nn.Linear(4, 4))
    fit(module, amp(level), ONES)
    assert counts[1:] == [per_step] * 7


def test_c35_a_scale_below_one_lets_huge_gradients_through():
    """At O2 gradients of this loss overflow half even at scale one; the scale settles below it and training moves."""
    module = Scripted(
        lambda m, batch, i: (m.net(batch).float() * 1e6).mean(),
        lambda m: torch.optim.SGD(m.parameters(), lr=1e-9),
        automatic=True,
        net=nn.Linear(4, 1),
    )
    plugin = amp("O2", init_scale=1.0)
    before = module.net.weight.detach().clone()
    trainer = fit(module, plugin, ONES * 2)
    assert plugin.loss_scales()["optimizer_0"] <= 2.0**-4
    steps = plugin.engine.counts(trainer.optimizers[0])[Outcome.STEPPED]
    assert steps > 0
    torch.testing.assert_close(before - module.net.weight, torch.full((1, 4), steps * 1e-3), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("loss_scale", ["dynamic", 2.0**15])
def test_c39_a_scale_at_o3_saves_what_half_would_lose_on_the_way(loss_scale):
    """The gradient's way leads through 1e-8, below what half can hold; the weight's own gradient is 1e-4."""

    def loss(module: Any, batch: Tensor, i: int) -> Tensor:
        return (module.net(batch * 1e4) * 1e-8).sum()

    def moved(**settings: Any) -> float:
        torch.manual_seed(0)
        module = Scripted(
            loss, lambda m: torch.optim.SGD(m.parameters(), lr=100.0), automatic=True, net=nn.Linear(4, 1)
        )
        before = module.net.weight.detach().half().float()  # what O3 trains
        fit(module, amp("O3", **settings), ONES)
        return (before - module.net.weight).abs().max().item()

    assert moved() == 0.0
    assert moved(loss_scale=loss_scale, init_scale=2.0**15) == pytest.approx(8 * 100 * 2e-4, rel=0.02)


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("cache", [True, "step", False])
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_c47_a_forward_without_gradients_does_not_poison_the_next(level, cache, first):
    def step(module: Any, batch: Tensor, i: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        with first():
            module.net(batch)
        module.manual_backward(module.net(batch).mean())
        assert module.net.weight.grad.tolist() == batch.mean(0, keepdim=True).tolist()
        optimizer.step()

    module = Scripted(step, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), net=nn.Linear(4, 1))
    fit(module, amp(level, cache_casts=cache), ONES[:3])


class Casts(TorchDispatchMode):
    """Counts casts to half of one weight's shape."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and kwargs and kwargs.get("dtype") is torch.float16:
            self.count += tuple(args[0].shape) == (5, 4)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("cache", "expected"), [(True, [1, 1]), ("step", [1, 0]), (False, [10, 10])])
def test_c49_a_weight_used_ten_times_is_cast_as_often_as_the_cache_says(cache, expected):
    counts: list[int] = []

    def step(module: Any, batch: Tensor, i: int) -> None:
        for _ in range(2):
            with Casts() as casts:
                loss = sum(module.net(batch).mean() for _ in range(10))
            module.manual_backward(loss)
            counts.append(casts.count)
        module.optimizers().step()
        module.optimizers().zero_grad()

    module = Scripted(step, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), net=nn.Linear(4, 5))
    fit(module, amp("O1", cache_casts=cache), ONES[:2])
    assert counts == expected * 2
