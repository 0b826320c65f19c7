"""Promises 1, 2 and 4: visible gradients are true, divided once by their own scale, and never poison a weight."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import Outcome
from tests.helpers.modules import (
    HALF_LEVELS,
    SCALE,
    SCALED_LEVELS,
    Scripted,
    amp,
    fit,
    linear,
    run,
    same,
    sgd,
    watch_steps,
    weights,
)

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def objective(*outputs: Tensor) -> Tensor:
    return sum(((out.float() - 1.0) ** 2).mean() for out in outputs)  # type: ignore[return-value]


def reference(*networks: nn.Module) -> list[Tensor]:
    """Returns the float64 gradients of `objective` for these networks."""
    copies = [copy.deepcopy(network).double() for network in networks]
    sum(((network(X.double()) - 1.0) ** 2).mean() for network in copies).backward()  # type: ignore[union-attr]
    return [p.grad for network in copies for p in network.parameters()]  # type: ignore[misc]


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float = 0.01) -> None:
    """Compares whole gradients by the size of what differs: a scale left in, or taken out twice, is far off."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).norm() <= tolerance * e.norm(), (a, e)


# 1. A gradient that can be seen is true.


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_promise_1_gradients_are_true_when_manual_backward_returns(level: str, dtype: str) -> None:
    """In an optimizer or in none, on the first pass and on one that adds to it."""
    net, free = network(), network()
    expected = reference(net, free)
    seen: list[list[Tensor]] = []

    def step(module: Any, *_: Any) -> None:
        for _ in range(2):
            module.manual_backward(objective(module.net(X), module.free(X)))
            seen.append([p.grad.clone() for p in module.parameters()])

    run(step, sgd("net"), amp(level, dtype=dtype, loss_scale=SCALE), net=net, free=free)
    tolerance = 0.01 if dtype == "float16" else 0.05
    assert_close(seen[0], expected, tolerance)
    assert_close(seen[1], [2 * g for g in expected], tolerance)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_promise_1_a_tensor_named_as_input_gets_a_true_gradient(level: str) -> None:
    layer = linear(1.0, 2.0)
    point = torch.ones(1, 2, requires_grad=True)

    def step(module: Any, *_: Any) -> None:
        module.manual_backward(module.net(point).sum(), inputs=[point])
        assert module.net.weight.grad is None

    run(step, sgd("net"), amp(level, loss_scale=SCALE), net=layer)
    assert point.grad is not None
    assert point.grad.tolist() == [[1.0, 2.0]]


def test_promise_1_at_o2_the_gradient_is_the_masters_own() -> None:
    plugin = amp("O2")

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        module.manual_backward(objective(module.net(X)))
        params = list(module.net.parameters())
        grads = [p.grad for p in params]
        assert {(p.dtype, g.dtype) for p, g in zip(params, grads, strict=True)} == {(torch.float16, torch.float32)}
        with plugin.masters(optimizer):
            masters = optimizer.param_groups[0]["params"]
            assert all(m.grad is g for m, g in zip(masters, grads, strict=True))
            assert {m.dtype for m in masters} == {torch.float32}
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))

    run(step, sgd("net"), plugin, net=network())


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_promise_1_clipping_the_modules_parameters_clips_what_the_step_uses(level: str) -> None:
    used: list[Any] = []

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        used.append(watch_steps(optimizer.optimizer))
        module.manual_backward(8 * objective(module.net(X)))
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.125)
        optimizer.step()

    run(step, sgd("net"), amp(level, loss_scale=SCALE), net=network())
    assert torch.stack([g.norm() for g in used[0][0]]).norm() == pytest.approx(0.125, rel=1e-3)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_promise_1_lightnings_hooks_see_true_gradients_in_automatic_optimization(level: str) -> None:
    net = network()
    expected = reference(net)
    module = Scripted(lambda m, *_: objective(m.net(X)), sgd("net"), automatic=True, net=net)
    losses: list[Tensor] = []
    seen: list[list[Tensor]] = []

    def look(*_: Any) -> None:
        seen.append([p.grad.clone() for p in net.parameters()])  # type: ignore[union-attr]

    module.on_before_backward = losses.append  # type: ignore[method-assign, assignment]
    module.on_after_backward = look  # type: ignore[method-assign]
    module.on_before_optimizer_step = look  # type: ignore[method-assign]
    fit(module, amp(level, loss_scale=SCALE))
    assert len(seen) == 2
    for grads in seen:
        assert_close(grads, expected)
    assert losses[0].item() < 10.0


@pytest.mark.parametrize("level", SCALED_LEVELS)
def test_promise_1_an_optimizer_in_backward_is_refused_by_name(level: str) -> None:
    net = network()
    net[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"'net\.2\.weight' has a post-accumulate-grad hook.*loss_scale=1"):
        run(lambda *_: None, sgd("net"), amp(level), net=net)


# 2. A gradient is divided once, by the scale of its own backward.


def play(seed: int) -> Callable[..., None]:
    """Returns a training step of random backward passes, steps and zeroing over three shared networks.

    Gradients do not depend on weights and are small sums of powers of two: right is exact at every level.
    """
    moves = random.Random(seed)

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        optimizers = module.optimizers()
        for _ in range(8):
            kind, k = moves.choice(["backward"] * 4 + ["step"] * 2 + ["zero"]), moves.randrange(2)
            if kind == "step":
                optimizers[k].step()
            elif kind == "zero":
                optimizers[k].zero_grad()
            else:
                names = moves.sample(["a", "b", "both"], moves.randint(1, 3))
                loss = sum(getattr(module, name)(torch.full((1, 2), 2.0 ** moves.randrange(3))).sum() for name in names)
                how = moves.choice([{}, {"loss_id": 0}, {"loss_id": 1}, {"optimizers": [optimizers[k]]}])
                module.manual_backward(loss, **how, delay_unscale=moves.random() < 0.3)

    return step


def shared_optimizers(module: Any) -> list[torch.optim.Optimizer]:
    shared = list(module.both.parameters())
    return [torch.optim.SGD([*getattr(module, name).parameters(), *shared], lr=2.0**-6) for name in ("a", "b")]


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("seed", range(10))
def test_promise_2_any_order_of_passes_and_steps_is_exact(level: str, seed: int) -> None:
    """Each pass moves its own scale, three optimizer sets and two loss ids have one each, one layer is in both."""
    scales = {"loss_scale": "dynamic", "init_scale": 4.0, "growth_interval": 1, "max_loss_scale": 2.0**8}
    results = []
    for plugin in (amp("O0"), amp(level, num_losses=2, **scales)):
        layers = {"a": linear(1.0, 2.0), "b": linear(-1.0, 0.5), "both": linear(4.0, 8.0)}
        results.append(weights(run(play(seed), shared_optimizers, plugin, 4, **layers)))
    assert len(set(plugin.loss_scales().values())) > 1
    assert same(*results)


@pytest.mark.parametrize("level", SCALED_LEVELS)
def test_promise_2_an_overflow_elsewhere_does_not_change_a_gradient(level: str) -> None:
    """Loss 0 halves its scale between the backward pass of loss 1 and the step that uses it."""

    def step(module: Any, *_: Any) -> None:
        a, b = module.optimizers()
        module.manual_backward(module.b(torch.ones(1, 1)).sum(), loss_id=1)
        module.manual_backward(module.a(torch.ones(1, 1)).float().sum() * 1e38, loss_id=0)
        a.step()
        b.step()

    plugin = amp(level, num_losses=2)
    module = run(step, sgd("a", "b"), plugin, a=linear(1.0), b=linear(1.0))
    assert plugin.loss_scales() == {"loss_0": SCALE / 2, "loss_1": SCALE}
    assert (module.a.weight.item(), module.b.weight.item()) == (1.0, 0.0)


# 4. A non-finite gradient never reaches a weight or an optimizer state.

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda m: torch.optim.SGD(m.net.parameters(), 0.1, momentum=0.9),
    "fused sgd": lambda m: torch.optim.SGD(m.net.parameters(), 0.1, momentum=0.9, fused=True),
    # Adam's own epsilon is zero in half precision, which at O3 makes a NaN of a finite gradient.
    "adam": lambda m: torch.optim.Adam(m.net.parameters(), 0.1, eps=1e-4),
    "fused adamw": lambda m: torch.optim.AdamW(m.net.parameters(), 0.1, eps=1e-4, fused=True),
}

FAULTS: dict[str, Callable[[Any], None]] = {
    "overflow": lambda m: m.manual_backward(objective(m.net(X)) * 1e37),
    "infinite loss": lambda m: m.manual_backward(objective(m.net(X)) * torch.inf),
    "nan loss": lambda m: m.manual_backward(objective(m.net(X)) * torch.nan),
    "plain backward": lambda m: (objective(m.net(X)) * torch.nan).backward(),
    "edit": lambda m: (m.manual_backward(objective(m.net(X))), m.net[0].bias.grad.fill_(torch.inf)),
    "edit after a clip": lambda m: (
        m.manual_backward(objective(m.net(X))),
        m.clip_gradients(m.optimizers(), 1.0, "norm"),
        m.net[0].bias.grad.fill_(torch.nan),
    ),
    "delayed": lambda m: m.manual_backward(objective(m.net(X)) * torch.nan, delay_unscale=True),
}


def state_of(optimizer: Any) -> list[Tensor]:
    return [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("scale", ["dynamic", SCALE])
def test_promise_4_nothing_non_finite_gets_through(level: str, make: Any, fault: Any, scale: Any) -> None:
    """On the very first step, when there is no optimizer state yet, and on a later one."""
    plugin = amp(level, loss_scale=scale)
    outcomes: list[Outcome | None] = []

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        bad = batch_idx in (0, 2)
        before = weights(module), state_of(optimizer)
        optimizer.zero_grad()
        fault(module) if bad else module.manual_backward(objective(module.net(X)))
        optimizer.step()
        outcomes.append(plugin.outcome(optimizer))
        after = weights(module), state_of(optimizer)
        assert all(torch.isfinite(t).all() for ts in after for t in ts)
        assert (same(before[0], after[0]) and same(before[1], after[1])) is bad
        optimizer.zero_grad()
        optimizer.step()
        outcomes.append(plugin.outcome(optimizer))

    run(step, make, plugin, 4, net=network())
    assert outcomes == [Outcome.SKIPPED, Outcome.IDLE, Outcome.STEPPED, Outcome.IDLE] * 2


@pytest.mark.parametrize("level", SCALED_LEVELS)
def test_promise_4_gradients_decide_a_skip_not_a_remembered_flag(level: str) -> None:
    """An overflow that `zero_grad` threw away does not cost the clean pass after it."""
    plugin = amp(level)

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        module.manual_backward(module.net(torch.ones(1, 1)).sum() * 1e38)
        module.zero_grad()
        module.manual_backward(module.net(torch.ones(1, 1)).sum())
        optimizer.step()
        assert plugin.outcome(optimizer) is Outcome.STEPPED

    assert run(step, sgd("net"), plugin, net=linear(3.0)).net.weight.item() == 2.0


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_promise_4_a_clip_leaves_non_finite_gradients_as_they_are(level: str, algorithm: str, bad: float) -> None:
    """A norm clip would make NaN of all, a clamp would make a bound of infinity: neither could be told apart later."""
    plugin = amp(level)

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        module.manual_backward(module.net(torch.tensor([[1.0, 2.0]])).sum())
        module.net.weight.grad[0, 0] = bad
        module.clip_gradients(optimizer, 0.5, algorithm)
        assert str(module.net.weight.grad.tolist()) == str([[bad, 2.0]])
        optimizer.step()
        assert plugin.outcome(optimizer) is Outcome.SKIPPED

    run(step, sgd("net"), plugin, net=linear(1.0, 1.0))


@pytest.mark.parametrize("level", SCALED_LEVELS)
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_promise_4_a_clip_does_not_hide_a_non_finite_gradient(level: str, clip: str) -> None:
    module = Scripted(
        lambda m, batch, i: objective(m.net(X)) * (torch.inf if i == 1 else 1.0),
        sgd("net"),
        automatic=True,
        net=network(),
    )
    plugin, seen = amp(level), []
    module.on_train_batch_end = lambda *_: seen.append((plugin.outcome(module.optimizers()), weights(module)))  # type: ignore[method-assign]
    fit(module, plugin, [0, 1, 2], gradient_clip_val=0.5, gradient_clip_algorithm=clip)
    assert [outcome for outcome, _ in seen] == [Outcome.STEPPED, Outcome.SKIPPED, Outcome.STEPPED]
    assert same(seen[0][1], seen[1][1])
    assert not same(seen[1][1], seen[2][1])
