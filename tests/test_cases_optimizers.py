"""Cases C-10, C-11, C-15, C-17, C-21, C-33 and C-80: several losses, several optimizers, one scale a backward pass."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp import Outcome
from tests.helpers.modules import HALF_LEVELS, LEVELS, SCALE, SCALED_LEVELS, amp, linear, run, same, sgd, weights

ONE = torch.ones(1, 1)


@pytest.mark.parametrize("level", SCALED_LEVELS)
@pytest.mark.parametrize("event", ["overflow of a", "growth"])
@pytest.mark.parametrize("joint", [False, True], ids=["a loss each", "one loss"])
def test_c10_a_scale_that_moves_between_two_steps(level: str, event: str, joint: bool) -> None:
    """Both backward passes, then both steps: each gradient is divided by the scale of its own pass."""
    plugin = amp(level, growth_interval=1 if event == "growth" else 2000)
    factor = 1e37 if event != "growth" else 1.0

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        a, b = module.optimizers()
        loss_a, loss_b = 2 * module.a(ONE).float().sum(), 2 * module.b(ONE).float().sum()
        if joint:
            module.manual_backward(loss_a + loss_b)
        else:
            module.manual_backward(loss_a * (factor if batch_idx == 0 else 1.0))
            module.manual_backward(loss_b)
        a.step()
        b.step()
        module.zero_grad()

    module = run(step, sgd("a", "b"), plugin, 3, a=linear(8.0), b=linear(8.0))
    lost = 2.0 if event != "growth" and not joint else 0.0
    assert (module.a.weight.item(), module.b.weight.item()) == (2.0 + lost, 2.0)
    scales = set(plugin.loss_scales().values())
    assert scales == ({8 * SCALE} if event == "growth" else {SCALE} if joint else {SCALE / 2, SCALE})


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("why", ["no backward", "frozen", "zeroed"])
@pytest.mark.parametrize("first", [True, False], ids=["from the start", "later"])
def test_c11_a_step_without_gradients_does_nothing(level: str, why: str, first: bool) -> None:
    """Counted as idle, not as skipped; no weight, no optimizer state, no scale moves."""
    plugin = amp(level, growth_interval=1, loss_scale="dynamic", max_loss_scale=2 * SCALE)
    outcomes: list[Outcome | None] = []

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        a, b = module.optimizers()
        idle = first or batch_idx > 0
        if why == "frozen":
            module.b.requires_grad_(not idle)
        both = module.a(ONE) if idle and why == "no backward" else module.a(ONE) + module.b(ONE)
        module.manual_backward(both.sum(), loss_id=0)
        if idle and why == "zeroed":
            b.zero_grad()
        before, state = weights(module.b), str(b.state)
        scales = plugin.loss_scales()
        for optimizer in (a, b):
            optimizer.step()
        outcomes.extend(map(plugin.outcome, (a, b)))
        assert (same(weights(module.b), before) and str(b.state) == state) is idle
        assert plugin.loss_scales() == scales
        module.zero_grad()

    run(step, sgd("a", "b", momentum=0.5), plugin, 3, a=linear(8.0), b=linear(8.0))
    b_outcomes = [Outcome.IDLE] * 3 if first else [Outcome.STEPPED, Outcome.IDLE, Outcome.IDLE]
    assert outcomes == [x for b in b_outcomes for x in (Outcome.STEPPED, b)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("after", ["nothing", "a proper step", "a pass of its own"])
def test_c15_plain_backward_gives_gradients_that_never_carried_a_scale(level: str, after: str) -> None:
    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        if after == "a proper step":
            module.manual_backward(module.net(ONE).sum())
            optimizer.step()
            optimizer.zero_grad()
        if after == "a pass of its own":
            module.manual_backward(module.net(ONE).sum())
        module.net(ONE).sum().backward()
        optimizer.step()

    net = run(step, sgd("net"), amp(level, init_scale=8.0), net=linear(4.0)).net
    assert net.weight.item() == (3.0 if after == "nothing" else 2.0)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c15_plain_backward_onto_what_a_delayed_pass_left_is_not_lost(level: str) -> None:
    """Autograd adds to what is there; asked for first, the pending gradient is true and the sum is right."""

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        module.manual_backward(module.net(ONE).sum(), delay_unscale=True)
        module.clip_gradients(optimizer, 100.0, "norm")
        module.net(ONE).sum().backward()
        optimizer.step()

    assert run(step, sgd("net"), amp(level, init_scale=8.0), net=linear(4.0)).net.weight.item() == 2.0


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("how", ["walked", "named by id", "named by optimizers"])
def test_c17_a_loss_into_two_optimizers_has_one_scale(level: str, how: str) -> None:
    """The optimizers' own losses run at 8 and 1024; their shared loss is exact for both."""
    plugin = amp(level, num_losses=3, loss_scale="dynamic", init_scale=8.0, growth_interval=1, max_loss_scale=SCALE)

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        a, b = module.optimizers()
        for _ in range(8):
            module.manual_backward(module.b(ONE).sum(), optimizers=[b])  # grows to the top
        module.zero_grad()
        if batch_idx == 0:
            module.manual_backward(module.a(ONE).float().sum() * 1e38, optimizers=[a])  # falls
            module.zero_grad()
        names = {"walked": {}, "named by id": {"loss_id": 2}, "named by optimizers": {"optimizers": [b, a]}}[how]
        module.manual_backward((2 * module.a(ONE) + module.b(ONE)).sum(), **names)
        module.manual_backward(module.a(ONE).sum(), optimizers=[a])
        a.step()
        b.step()
        module.zero_grad()

    module = run(step, sgd("a", "b"), plugin, 2, a=linear(8.0), b=linear(8.0))
    assert (module.a.weight.item(), module.b.weight.item()) == (2.0, 6.0)
    assert len(set(plugin.loss_scales().values())) > 1


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("ask", ["clip", "norm", "masters", "nothing"])
@pytest.mark.parametrize("delay", [False, True])
def test_c21_gradients_may_be_asked_for_after_each_micro_batch(level: str, ask: str, delay: bool) -> None:
    """Each time they are true and the pass after it adds correctly, also in a short last window."""
    plugin = amp(level, loss_scale="dynamic", growth_interval=1)
    seen: list[float] = []

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        module.manual_backward(module.net(ONE).sum(), delay_unscale=delay)
        for _ in range(2):
            if ask == "clip":
                module.clip_gradients(optimizer, 100.0, "norm")
            elif ask == "norm":
                plugin.grad_norm(optimizer)
            elif ask == "masters":
                plugin.engine.unscale(optimizer)
            if ask != "nothing":
                seen.append(module.net.weight.grad.item())
        if batch_idx in (1, 3, 4):
            optimizer.step()
            optimizer.zero_grad()

    assert run(step, sgd("net"), plugin, 5, net=linear(16.0)).net.weight.item() == 11.0
    assert seen == ([] if ask == "nothing" else [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0])


BAD: dict[str, Callable[[Tensor], Tensor]] = {
    "finite loss": lambda out: (out.float() * 0.0).sqrt().sum(),  # zero, with a NaN for a gradient
    "NaN loss": lambda out: out.float().sum() * torch.nan,
}


def bad_for(steps: int, cause: str) -> Any:
    """Returns a training step whose loss 1 is bad for a while and good from then on; loss 0 is always good."""

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        a, b = module.optimizers()
        module.manual_backward(module.a(ONE).sum(), loss_id=0)
        good = torch.sum if batch_idx >= steps else BAD[cause]
        module.manual_backward(good(module.b(ONE)), loss_id=1)
        a.step()
        b.step()
        module.zero_grad()

    return step


@pytest.mark.parametrize("level", SCALED_LEVELS)
@pytest.mark.parametrize("cause", BAD)
def test_c33_two_hundred_bad_steps_and_a_good_one(level: str, cause: str) -> None:
    """The scale ends at its floor, or where it was if the loss itself was bad; the good gradient is still right."""
    plugin = amp(level, num_losses=2, min_loss_scale=2.0**-6, max_consecutive_skips=None)
    layers = {"a": linear(8.0), "b": linear(8.0)}
    told = pytest.warns(UserWarning, match="loss_1 is at its floor, 0.015625.*b.weight, and the loss was finite")
    with told if cause == "finite loss" else nullcontext():
        module = run(bad_for(200, cause), sgd("a", "b", lr=2.0**-6), plugin, 201, **layers)
    assert plugin.loss_scales() == {"loss_0": SCALE, "loss_1": 2.0**-6 if cause == "finite loss" else SCALE}
    assert (module.a.weight.item(), module.b.weight.item()) == (8 - 201 * 2.0**-6, 8 - 2.0**-6)


@pytest.mark.parametrize("level", SCALED_LEVELS)
@pytest.mark.parametrize("cause", BAD)
def test_c33_the_alarm_names_optimizer_loss_parameter_and_cause(level: str, cause: str) -> None:
    plugin = amp(level, num_losses=2, max_consecutive_skips=20)
    with pytest.raises(RuntimeError) as alarm:
        run(bad_for(200, cause), sgd("a", "b", lr=2.0**-6), plugin, 201, a=linear(8.0), b=linear(8.0))
    for part in ("optimizer 1", "20", "loss_1", "b.weight"):
        assert part in str(alarm.value)
    assert ("loss itself" in str(alarm.value)) is (cause == "NaN loss")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("steps_between", [False, True], ids=["both after", "in between"])
def test_c80_a_parameter_owned_by_two_optimizers(level: str, steps_between: bool) -> None:
    """Unscaled once, one master; with a step in between the second optimizer starts from where the first left it."""

    def make(module: Any) -> Any:
        return [torch.optim.SGD(module.net.parameters(), lr=1.0) for _ in range(2)]

    def step(module: Any, *_: Any) -> None:
        for optimizer in module.optimizers() if steps_between else [None]:
            module.zero_grad()
            module.manual_backward(module.net(ONE).sum())
            for other in module.optimizers() if optimizer is None else [optimizer]:
                other.step()

    # 2^-13 is below what a half weight near one can show: only one and the same master adds it up.
    start = 1 + 2.0**-13
    net = run(step, make, amp(level, init_scale=8.0), net=linear(start)).net
    assert net.weight.item() == (-1.0 if level == "O3" else start - 2.0)


def test_c80_two_optimizers_share_one_master() -> None:
    plugin = amp("O2")

    def step(module: Any, *_: Any) -> None:
        a, b = module.optimizers()
        with plugin.masters(a):
            one = a.param_groups[0]["params"][0]
        with plugin.masters(b):
            assert b.param_groups[0]["params"][0] is one

    run(step, lambda m: [torch.optim.SGD(m.net.parameters(), 1.0) for _ in range(2)], plugin, net=linear(1.0))
