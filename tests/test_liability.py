"""Optimizers named with one loss skip together, as long as the gradients concerned are there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import Outcome, amp
from lightning_amp.engine import Engine
from lightning_amp.liability import Liability
from lightning_amp.loss_scaler import LossScaler
from lightning_amp.opt_levels import resolve
from tests.helpers.plain import ONE, SCALE, ZEROING, block, pair, values, zero


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    amp.deinitialize()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_partner_skips_once_though_its_own_gradient_is_finite(level: str) -> None:
    models, optimizers = pair(level)
    block(models[0](ONE) + models[1](ONE), optimizers, overflow=models[0])
    assert models[1].weight.grad.item() == 1.0, "and its gradient stays the true one"
    for optimizer in reversed(optimizers):
        optimizer.step()
    assert values(models) == [1.0, 1.0]
    assert [amp.outcome(o) for o in optimizers] == [Outcome.SKIPPED] * 2
    optimizers[1].step()
    assert values(models) == [1.0, 0.0], "its next step only"


def test_an_optimizer_that_was_not_named_steps() -> None:
    models, optimizers = pair()
    block(models[0](ONE) + models[1](ONE), optimizers[0], overflow=models[0])
    for optimizer in optimizers:
        optimizer.step()
    assert values(models) == [1.0, 0.0]


def test_a_later_clean_loss_does_not_undo_a_skip() -> None:
    models, optimizers = pair(num_losses=2)
    block(models[0](ONE) + models[1](ONE), optimizers, overflow=models[0])
    block(models[1](ONE), optimizers[1], loss_id=1)
    block(models[0](ONE) + models[1](ONE), optimizers, loss_id=1)
    assert models[1].weight.grad.item() == 3.0
    for optimizer in optimizers:
        optimizer.step()
    assert values(models) == [1.0, 1.0]
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [SCALE / 2, SCALE]


@pytest.mark.parametrize("way", ZEROING)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zeroing_takes_back_the_skip_of_a_partner(way: str, level: str) -> None:
    """As a script does that looks at the loss and starts the iteration anew."""
    models, optimizers = pair(level)
    block(models[0](ONE) + models[1](ONE), optimizers, overflow=models[0])
    zero(models, optimizers, way)
    block(models[0](ONE) + models[1](ONE), optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert values(models) == [0.0, 0.0]


def test_a_gradient_put_in_by_hand_takes_back_the_skip() -> None:
    models, optimizers = pair()
    block(models[0](ONE) + models[1](ONE), optimizers, overflow=models[0])
    models[1].weight.grad = torch.full((1, 1), 0.5)
    for optimizer in optimizers:
        optimizer.step()
    assert values(models) == [1.0, 0.5]


def test_a_partner_skips_though_the_culprit_has_stepped_and_was_zeroed() -> None:
    models, optimizers = pair()
    block(models[0](ONE) + models[1](ONE), optimizers, overflow=models[0])
    optimizers[0].step()
    optimizers[0].zero_grad()
    optimizers[1].step()
    assert values(models) == [1.0, 1.0]


def test_a_partner_without_gradients_skips_what_it_gets_later_in_the_iteration() -> None:
    models, optimizers = pair()
    block(models[0](ONE), optimizers, overflow=models[0])
    block(models[1](ONE), optimizers[1])
    optimizers[1].step()
    assert values(models) == [1.0, 1.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_clip_by_value_does_not_hide_an_overflow(level: str) -> None:
    models, optimizers = pair(level)
    block(models[0](ONE), optimizers[0], overflow=models[0])
    nn.utils.clip_grad_value_(amp.master_params(optimizers[0]), 0.5)
    assert models[0].weight.grad.item() == 0.5
    optimizers[0].step()
    assert values(models) == [1.0, 1.0]


def test_an_overflow_of_the_sum_is_not_one_of_the_loss() -> None:
    """Two finite gradients whose sum is not: nothing is stepped, and no scale is to blame."""
    weight = nn.Parameter(torch.ones(1))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], 1.0)
    amp.initialize(model, optimizer, opt_level="O1", init_scale=1.0, verbosity=0)
    for _ in range(2):
        block(weight * 3e38, optimizer)
    assert weight.grad.isinf()
    optimizer.step()
    assert weight.item() == 1.0
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1.0, "unskipped": 2}


def test_a_non_finite_loss_lowers_the_scale_too() -> None:
    models, optimizers = pair()
    block(models[0](ONE) * float("nan"), optimizers[0])
    optimizers[0].step()
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": SCALE / 2, "unskipped": 0}
    assert values(models) == [1.0, 1.0]


def test_what_a_device_found_earlier_is_not_forgotten_over_what_it_found_later() -> None:
    """Where only the device knows, clean passes are noted too."""
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    liability = Liability([weight], lambda grads: torch.stack([g.norm() for g in grads]).norm())
    for found in (0.0, 1.0, 0.0):
        liability.note(torch.tensor(found))
        liability.hold()
        liability.look(closely=False)
    assert liability.found == 1.0
    assert not liability.void
    weight.grad = None
    liability.look(closely=False)
    assert liability.void


def test_a_clean_pass_does_not_prolong_what_was_noted_of_others_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own gradients outlive those of the overflow, where the host does not know that it was clean."""
    monkeypatch.setattr(LossScaler, "known_clean", property(lambda _: False, lambda *_: None), raising=False)
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([a, b], 1.0)
    engine = Engine(resolve("O1", init_scale=8.0), [optimizer], [nn.ParameterList([a, b])])
    engine.backward(a.sum() * 3e38)
    engine.backward(b.sum())
    nn.utils.clip_grad_value_([a], 1.0)
    a.grad = None
    engine.step(optimizer)
    assert (a.item(), b.item()) == (1.0, 0.0)


def test_the_joint_skip_is_decided_on_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the block and the step nobody asks for a value, where the device is not the host."""
    _, optimizers = pair()
    engine = amp.engine(optimizers[0])
    seen: list[Any] = []
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda _: False))
    monkeypatch.setattr(Tensor, "tolist", lambda _: seen.append("tolist"))
    monkeypatch.setattr(Tensor, "__bool__", lambda _: seen.append("bool") or True)
    engine._liable.note(engine.scalers.get(("loss", (0,))), engine.gradients.lists(), {0, 1})
    assert len(engine._liable.noted) == 2
    engine._liable.review()
    assert seen == []
