"""`plugin.grad`: autograd.grad under a loss scale of its own, for penalties and adaptive loss weights."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp import Engine, Outcome, resolve
from tests.helpers.modules import Scripted, amp, fit

SCALED = [("O1", "float16"), ("O2", "float16"), ("O1", "bfloat16"), ("O2", "bfloat16")]


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def penalty_step(history: list[float]) -> Any:
    """WGAN-GP's critic step; under a plain precision `torch.autograd.grad` takes the place of the plugin's."""

    def step(module: Any, batch: torch.Tensor, i: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        x = batch.clone().requires_grad_(True)
        score = module.net(x)
        grad = getattr(module.trainer.precision_plugin, "grad", None) or torch.autograd.grad
        (slope,) = grad(score, x, torch.ones_like(score), create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        history.append(penalty.item())
        module.manual_backward(score.mean() + 10 * penalty)
        optimizer.step()

    return step


@pytest.mark.parametrize(("level", "dtype"), SCALED)
def test_c42_fifty_penalty_steps_stay_with_fp32(level, dtype):
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(50)]
    runs = []
    for plugin in (None, amp(level, dtype=dtype)):
        history: list[float] = []
        module = Scripted(penalty_step(history), lambda m: torch.optim.SGD(m.parameters(), lr=0.02), net=critic())
        fit(module, plugin, batches)
        runs.append((torch.tensor(history), torch.cat([p.detach().flatten() for p in module.parameters()])))
    tolerance = 4e-3 if dtype == "float16" else 3.2e-2  # three bits fewer, eight times the error
    for wanted, given in zip(*runs, strict=True):
        assert ((given - wanted).abs().mean() / wanted.abs().mean()).item() < tolerance


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_c45_tiny_gradients_of_a_half_weight_come_back_true_in_fp32(level):
    history: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(module: Any, batch: torch.Tensor, i: int) -> None:
        out = module.net(batch).float().mean() * 1e-6
        (g,) = module.trainer.precision_plugin.grad(out, module.net[-1].weight, retain_graph=True)
        hidden = module.net[:-1](batch).float()
        history.append((g, hidden.mean(0, keepdim=True) * 1e-6))

    module = Scripted(step, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), net=critic())
    fit(module, amp(level), [torch.ones(8, 4)])
    ((given, wanted),) = history
    assert given.dtype is torch.float32
    torch.testing.assert_close(given, wanted, rtol=2e-3, atol=0.0)


def test_an_overflow_lowers_its_own_scale_and_skips_the_step_made_of_it():
    model = critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(resolve("O1", init_scale=1024.0), [optimizer], [model])
    x = torch.ones(2, 4, requires_grad=True)

    def penalty(factor: float) -> torch.Tensor:
        score = (model(x).half() * factor).sum()
        (slope,) = engine.grad(score, x, create_graph=True)
        assert slope is not None
        return slope.square().mean()

    before = [p.detach().clone() for p in model.parameters()]
    engine.backward(penalty(1000.0))
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.SKIPPED
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    scales = engine.loss_scales()
    assert scales["grad"] == 512.0
    assert scales["optimizer_0"] == 1024.0  # the loss was non-finite: no fault of its scale
    optimizer.zero_grad()
    engine.backward(penalty(1.0))
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.STEPPED


def test_unused_inputs_and_grad_outputs_go_to_autograd():
    engine = Engine(resolve("O1", init_scale=8.0), [], [])
    x, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    given = engine.grad(x * 2, [x, unused], torch.tensor([1.0, 2.0, 3.0]), allow_unused=True)
    assert given[1] is None
    torch.testing.assert_close(given[0], torch.tensor([2.0, 4.0, 6.0]))


def test_zero_slope_gives_a_finite_penalty():
    engine = Engine(resolve("O1", init_scale=8.0), [], [])
    x = torch.tensor([[0.0, 0.0, 0.0], [3.0, 0.0, 4.0]], requires_grad=True)
    seconds = []
    for grad in (engine.grad, torch.autograd.grad):
        (slope,) = grad(x.square().sum(), x, create_graph=True)
        seconds += torch.autograd.grad((slope.norm(dim=1) - 1).square().mean(), x)
    assert torch.isfinite(seconds[1]).all()
    torch.testing.assert_close(*seconds)
