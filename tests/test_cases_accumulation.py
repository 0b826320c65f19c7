"""Accumulation of every kind, and gradients that a user reads, rewrites or throws away before the step."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from lightning_amp import Outcome
from tests.helpers.modules import HALF_LEVELS, Scripted, amp, fit

BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(12)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)


def assert_trains_as_fp32(build: Any, level: str, tolerance: float = 2e-3, **settings: Any) -> None:
    """Trains ``build()`` in FP32 and at ``level``; the weights move alike."""
    start, wanted, given = build(), build(), build()
    fit(wanted, None, BATCHES, **settings)
    fit(given, amp(level, num_losses=2), BATCHES, **settings)
    flat = [torch.cat([p.detach().flatten() for p in module.parameters()]) for module in (start, wanted, given)]
    moved = (flat[1] - flat[0]).norm()
    assert moved > 0
    assert ((flat[2] - flat[1]).norm() / moved).item() < tolerance * (10 if level == "O3" else 1)


def automatic(loss: Any = lambda module, batch, i: module.net(batch).square().mean()) -> Any:
    return lambda: Scripted(loss, sgd, automatic=True, net=network())


def manual(step: Any) -> Any:
    return lambda: Scripted(step, sgd, net=network())


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_c02_automatic_clipping_comes_after_the_scale_is_out(level, algorithm):
    bound = 0.05 if algorithm == "norm" else 0.01
    settings = {"gradient_clip_val": bound, "gradient_clip_algorithm": algorithm}
    assert_trains_as_fp32(automatic(), level, **settings)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_window_whose_length_changes_between_epochs(level):
    def settings() -> dict[str, Any]:
        return {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 5})], "max_epochs": 3}

    start, wanted, given = automatic()(), automatic()(), automatic()()
    fit(wanted, None, BATCHES, **settings())
    fit(given, amp(level), BATCHES, **settings())
    for s, w, g in zip(start.parameters(), wanted.parameters(), given.parameters(), strict=True):
        torch.testing.assert_close(g - s, w - s, rtol=5e-3, atol=2e-3 if level == "O3" else 5e-4)


def test_c23_sixty_four_large_micro_batches_are_summed_in_fp32_at_o2():
    """A half sum stands still once its terms are below half a unit in the last place of what is there."""

    def step(module: Any, batch: Tensor, i: int) -> None:
        for k in range(64):
            module.manual_backward(module.net(torch.ones(1, 1)).sum() * (1000.0 if k == 0 else 0.25))
        module.grad = module.net.weight.grad.clone()

    module = Scripted(step, sgd, net=nn.Linear(1, 1, bias=False))
    fit(module, amp("O2", init_scale=1.0), BATCHES[:1])
    assert module.grad.item() == 1000.0 + 63 * 0.25


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("delay", [False, True])
def test_c24_both_styles_of_accumulation_equal_one_large_batch(level, delay):
    def step(module: Any, batch: Tensor, i: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        named = hasattr(module.trainer.precision_plugin, "loss_scales")
        for k, part in enumerate(batch.split(1)):
            late = {"delay_unscale": delay and k < 3} if named else {}
            module.manual_backward(module.net(part).square().mean() / 4, **late)
        optimizer.step()

    assert_trains_as_fp32(manual(step), level)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c25_a_user_who_looks_at_the_norm_and_does_not_step(level):
    def step(module: Any, batch: Tensor, i: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.net(batch).square().mean() * (100.0 if i % 3 == 0 else 1.0))
        norm = torch.nn.utils.get_total_norm([p.grad for p in module.net.parameters()])
        if norm < 5.0:
            optimizer.step()
        module.norms = [*getattr(module, "norms", []), norm.item()]

    assert_trains_as_fp32(manual(step), level)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c25_a_clip_of_infinite_gradients_writes_no_nan_and_the_step_is_skipped(level):
    def step(module: Any, batch: Tensor, i: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        out = module.net(batch).mean()
        out.register_hook(lambda g: g * torch.inf)
        module.manual_backward(out)
        module.clip_gradients(optimizer, 1.0, "norm")
        module.grads = [p.grad.clone() for p in module.net.parameters()]
        optimizer.step()

    module = Scripted(step, sgd, net=nn.Linear(8, 1))
    plugin = amp(level)
    trainer = fit(module, plugin, [torch.ones(2, 8)])
    assert all(torch.isinf(g).all() for g in module.grads)
    assert plugin.outcome(trainer.optimizers[0]) is Outcome.SKIPPED


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c09_gradient_surgery_on_true_gradients_of_each_loss(level):
    """Two losses at far-apart scales; the second gradient is projected off the first before both are summed."""

    def step(module: Any, batch: Tensor, i: int) -> None:
        optimizer = module.optimizers()
        params = list(module.net.parameters())
        named = hasattr(module.trainer.precision_plugin, "loss_scales")
        grads = []
        for k, factor in enumerate((1.0, 1e-3)):
            optimizer.zero_grad()
            loss = ((module.net(batch) - k) * factor).square().mean()
            module.manual_backward(loss, **({"loss_id": k} if named else {}))
            grads.append(torch.cat([p.grad.flatten() for p in params]))
        first, second = grads
        merged = first + second - second.dot(first) / first.dot(first) * first
        for p, g in zip(params, merged.split([p.numel() for p in params]), strict=True):
            p.grad = g.view_as(p)
        optimizer.step()

    assert_trains_as_fp32(manual(step), level)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_sharpness_aware_steps_by_hand_inside_masters(level):
    """SAM: climb to the worst point nearby, take its gradient, step from where we were."""

    def step(module: Any, batch: Tensor, i: int) -> None:
        optimizer = module.optimizers()
        plugin = module.trainer.precision_plugin
        held = getattr(plugin, "masters", None)

        def move(sign: float, by: list[Tensor] | None = None) -> list[Tensor]:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if by is None:
                norm = torch.stack([p.grad.norm() for p in params]).norm()
                by = [0.05 * p.grad / norm for p in params]
            with torch.no_grad():
                for p, e in zip(params, by, strict=True):
                    p.add_(e, alpha=sign)
            return by

        def inside(sign: float, by: Any = None) -> list[Tensor]:
            if held is None:
                return move(sign, by)
            with held(optimizer):
                return move(sign, by)

        optimizer.zero_grad()
        module.manual_backward(module.net(batch).square().mean())
        climbed = inside(1.0)
        optimizer.zero_grad()
        module.manual_backward(module.net(batch).square().mean())
        inside(-1.0, climbed)
        optimizer.step()

    assert_trains_as_fp32(manual(step), level, tolerance=5e-3)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_autograd_that_raises_in_the_middle_leaves_gradients_as_they_were(level):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            raise ArithmeticError("in the middle")

    def step(module: Any, batch: Tensor, i: int) -> None:
        module.manual_backward(module.net(batch).square().mean())
        before = [p.grad.clone() for p in module.net.parameters()]
        hidden = module.net[:2](batch)
        with pytest.raises(ArithmeticError, match="in the middle"):
            module.manual_backward((module.net[2](hidden) + module.net[2](Fails.apply(hidden))).mean())
        assert all(torch.equal(p.grad, b) for p, b in zip(module.net.parameters(), before, strict=True))
        module.optimizers().step()
        module.optimizers().zero_grad()

    fit(Scripted(step, sgd, net=network()), amp(level), BATCHES[:2])


class Looks(pl.Callback):
    """Records the gradients after each pass, and halves them where they are."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.seen.append(torch.cat([p.grad.float().flatten() for p in module.parameters()]))
        for p in module.parameters():
            p.grad.mul_(0.5)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c07_a_hook_after_each_pass_of_a_window_sees_and_edits_true_gradients(level):
    def train(plugin: Any) -> tuple[list[Tensor], Tensor]:
        module, looks = automatic()(), Looks()
        fit(module, plugin, BATCHES[:5], accumulate_grad_batches=3, callbacks=[looks])
        return looks.seen, torch.cat([p.detach().flatten() for p in module.parameters()])

    (seen, weights), (plain, expected) = train(amp(level, loss_scale=1024.0)), train(None)
    tolerance = {"O1": 2e-3, "O2": 2e-3, "O3": 2e-2}[level]
    for mine, theirs in zip([*seen, weights], [*plain, expected], strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()
