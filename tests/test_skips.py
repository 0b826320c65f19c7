"""Skips told truthfully: outcomes, accounts, schedulers, joint skips, the step count and the alarm."""

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from lightning_amp import Outcome
from lightning_amp.alarm import TrainingDivergedError
from tests.helpers.modules import HALF_LEVELS, SCALED_LEVELS, Scripted, amp, fit

BATCHES = [torch.full((2, 4), 1.0 + i) for i in range(6)]


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def loss_of(module: Any, batch: torch.Tensor, bad: bool) -> torch.Tensor:
    """A loss whose gradient is infinite where ``bad`` says so, while the loss itself is finite."""
    out = module.net(batch).mean()
    if bad:
        out.register_hook(lambda g: g * torch.inf)
    return out


def automatic(bad: tuple[int, ...], fused: bool = False, scheduler: Any = None) -> Scripted:
    def optimizers(module: Any) -> Any:
        optimizer = torch.optim.Adam(module.parameters(), lr=1.0, fused=fused, eps=1e-3)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler(optimizer), "interval": "step"}}

    return Scripted(lambda module, batch, i: loss_of(module, batch, i in bad), optimizers, automatic=True, net=linear())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c28_c29_outcomes_and_accounts_tell_every_skip(level, fused):
    plugin = amp(level)
    trainer = fit(automatic((1, 2), fused), plugin, BATCHES)
    counts = plugin.engine.counts(trainer.optimizers[0])
    assert counts == {Outcome.STEPPED: 4, Outcome.SKIPPED: 2, Outcome.IDLE: 0}
    account = plugin.accounts()["optimizer_0"]
    assert (account.attempts, account.overflows, account.nonfinite_losses) == (6, 2, 0)
    if level in SCALED_LEVELS:
        assert (account.scale, account.lowest, account.highest) == (256.0, 256.0, 1024.0)


@pytest.mark.parametrize("settings", [{"loss_scale": 128.0}, {"min_loss_scale": 1024.0}, {"dtype": "bfloat16"}])
def test_c28_a_skip_is_told_where_the_scale_cannot_move(settings):
    plugin = amp("O1", **settings)
    trainer = fit(automatic((1, 2)), plugin, BATCHES)
    assert plugin.engine.counts(trainer.optimizers[0])[Outcome.SKIPPED] == 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c27_a_scheduler_stays_put_on_a_skipped_step(level, fused):
    module = automatic((0, 1), fused, lambda o: ExponentialLR(o, 0.5))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")  # torch's warning of a wrong call order
        trainer = fit(module, amp(level), BATCHES)
    # A fused step is known one step late: what it owes is held back at the next one that fails, or not at all.
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5**4)


def test_c27_schedulers_can_be_left_alone():
    module = automatic((0, 1), False, lambda o: ExponentialLR(o, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = fit(module, amp("O1", hold_schedulers=False), BATCHES)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5**6)


def test_held_scheduler_passes_for_the_scheduler_itself():
    module = automatic((), False, lambda o: ExponentialLR(o, 0.5))
    trainer = fit(module, amp("O1"), BATCHES)
    held = trainer.lr_scheduler_configs[0].scheduler
    assert isinstance(held, ExponentialLR)
    assert not isinstance(held, ReduceLROnPlateau)
    assert held.optimizer is trainer.optimizers[0]
    assert "step" not in held.state_dict()
    assert held.get_last_lr() == [pytest.approx(0.5**6)]


def test_c32_a_manual_scheduler_waits_while_its_optimizer_is_idle():
    def step(module: Any, batch: torch.Tensor, i: int) -> None:
        if i >= 3:
            module.manual_backward(module.net(batch).mean())
        module.optimizers().step()
        module.optimizers().zero_grad()
        module.lr_schedulers().step()

    def optimizers(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]

    trainer = fit(Scripted(step, optimizers, net=linear()), amp("O1"), BATCHES)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5**3)


def two_networks(bad: Any) -> Scripted:
    """Manual optimization of two networks whose backward passes both come before the steps; ``bad(i)`` names one."""

    def step(module: Any, batch: torch.Tensor, i: int) -> None:
        for name in "ab":
            out = getattr(module, name)(batch).mean()
            if bad(i) == name:
                out.register_hook(lambda g: g * torch.inf)
            module.manual_backward(out)
        for optimizer in module.optimizers():
            optimizer.step()
        for optimizer in module.optimizers():
            optimizer.zero_grad()

    def optimizers(module: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (module.a, module.b)]

    return Scripted(step, optimizers, a=linear(), b=linear())


@pytest.mark.parametrize("level", SCALED_LEVELS)
@pytest.mark.parametrize(("groups", "expected"), [(None, [5, 6]), ([[0, 1]], [5, 5])])
def test_c13_optimizers_skip_alone_or_together_as_the_user_says(level, groups, expected):
    plugin = amp(level, skip_together=groups)
    trainer = fit(two_networks(lambda i: "a" if i == 2 else None), plugin, BATCHES)
    assert [plugin.engine.counts(o)[Outcome.STEPPED] for o in trainer.optimizers] == expected
    assert sorted(plugin.loss_scales().values()) == [512.0, 1024.0]


def test_a_group_names_only_optimizers_that_are_there():
    with pytest.raises(ValueError, match=r"skip_together names optimizer 2; there are 2, so 0 to 1"):
        fit(two_networks(lambda i: None), amp("O1", skip_together=[[0, 2]]), BATCHES)


@pytest.mark.parametrize("manual", [False, True])
def test_c31_global_step_counts_skipped_steps_unless_told_not_to(manual):
    def module() -> Scripted:
        return two_networks(lambda i: "a" if i in (1, 3) else None) if manual else automatic((1, 3))

    per_batch = 2 if manual else 1
    assert fit(module(), amp("O1"), BATCHES).global_step == 6 * per_batch
    assert fit(module(), amp("O1", count_skipped_steps=False), BATCHES).global_step == 6 * per_batch - 2


def test_c33_c34_the_alarm_names_loss_optimizer_parameter_and_cause():
    def step(module: Any, batch: torch.Tensor, i: int) -> None:
        module.optimizers().zero_grad()
        hidden = module.net(batch)
        hidden.register_hook(lambda g: g * torch.nan)
        module.manual_backward(module.head(hidden).mean(), loss_id=1)
        module.optimizers().step()

    def optimizers(module: Any) -> Any:
        return torch.optim.SGD([*module.head.parameters(), *module.net.parameters()], lr=0.1)

    module = Scripted(step, optimizers, net=linear(), head=nn.Linear(1, 1))
    with pytest.raises(TrainingDivergedError) as caught:
        fit(module, amp("O1", max_consecutive_skips=5, num_losses=2), BATCHES)
    text = str(caught.value)
    assert "optimizer 0 skipped 5 steps in a row" in text
    assert "loss_1" in text
    assert "net.weight" in text
    assert "the loss was finite" in text


def test_c34_the_alarm_says_when_the_loss_itself_was_non_finite():
    module = Scripted(
        lambda m, batch, i: m.net(batch).mean() * torch.nan,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        automatic=True,
        net=linear(),
    )
    plugin = amp("O1", max_consecutive_skips=5)
    with pytest.raises(TrainingDivergedError, match="the loss itself was non-finite"):
        fit(module, plugin, BATCHES)
    assert plugin.loss_scales() == {"optimizer_0": 1024.0}


@pytest.mark.filterwarnings("ignore:The scale of optimizer_0 is at its floor")
def test_the_alarm_can_be_turned_off():
    plugin = amp("O1", max_consecutive_skips=None)
    trainer = fit(automatic(tuple(range(150))), plugin, BATCHES[:1] * 150)
    assert plugin.outcome(trainer.optimizers[0]) is Outcome.SKIPPED


def test_c33_a_scale_at_its_floor_is_told_once():
    with pytest.warns(UserWarning, match="at its floor, 512") as told:
        fit(automatic(tuple(range(40))), amp("O1", min_loss_scale=512.0), BATCHES[:1] * 40)
    assert sum("floor" in str(w.message) for w in told) == 1


def test_c12_an_optimizer_that_never_has_a_gradient_is_pointed_out_once():
    def step(module: Any, batch: torch.Tensor, i: int) -> None:
        module.manual_backward(module.b(module.a(batch).detach().expand(2, 4)).mean())
        for optimizer in module.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    module = Scripted(
        step, lambda m: [torch.optim.SGD(n.parameters(), lr=0.1) for n in (m.a, m.b)], a=linear(), b=linear()
    )
    with pytest.warns(UserWarning, match=r"optimizer 0 had nothing to do in 50 steps.*0 of its 2 parameters") as told:
        fit(module, amp("O1"), BATCHES[:1] * 120)
    assert sum("nothing to do" in str(w.message) for w in told) == 1


def test_c38_the_first_skip_is_one_calm_line(caplog):
    with caplog.at_level(logging.INFO, logger="lightning_amp"):
        fit(automatic((0, 2)), amp("O1"), BATCHES)
    assert sum("skipped a step" in record.message for record in caplog.records) == 1
