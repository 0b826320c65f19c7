"""What scripts do inside a ``scale_loss`` block besides the backward pass, and around it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import Outcome, amp
from tests.helpers.plain import ONE, SCALE, ZEROING, block, pair, plain, values, zero

LEVELS = ("O0", "O1", "O2", "O3")
SCALED = ("O1", "O2")


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    amp.deinitialize()


def grad(model: nn.Linear) -> float:
    assert model.weight.grad is not None
    return model.weight.grad.item()


# Gradients that are cleared in a block


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("way", ZEROING)
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_may_be_zeroed_in_the_block_as_well_as_before_it(level: str, way: str, delay: bool) -> None:
    models, optimizers = pair(level)
    for n in range(1, 4):
        with amp.scale_loss((models[0](ONE) * n).float().sum(), optimizers[0], delay_unscale=delay) as scaled:
            zero(models, optimizers, way)
            scaled.backward()
        next(amp.master_params(optimizers[0]))  # makes delayed gradients true
        assert grad(models[0]) == n


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_put_there_in_the_block_is_added_to(level: str) -> None:
    models, optimizers = pair(level)
    with amp.scale_loss(models[0](ONE).float().sum(), optimizers[0]) as scaled:
        models[0].weight.grad = torch.full((1, 1), 8.0, dtype=models[0].weight.dtype)
        scaled.backward()
    assert grad(models[0]) == 9.0


@pytest.mark.parametrize("level", SCALED)
def test_a_delayed_block_after_one_that_overflowed_is_not_blamed(level: str) -> None:
    models, optimizers = pair(level, num_losses=2)
    block(models[0](ONE), optimizers[0], loss_id=0, overflow=models[0])
    for _ in range(2):
        block(models[0](ONE), optimizers[0], loss_id=1, delay_unscale=True)
    optimizers[0].step()
    assert amp.outcome(optimizers[0]) is Outcome.SKIPPED
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [SCALE / 2, SCALE]


# Losses that are differentiated in other ways


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_c15_the_loss_itself_differentiated_in_a_block_never_carried_a_scale(level: str, delay: bool) -> None:
    models, optimizers = pair(level)
    block(models[0](ONE), optimizers[0])
    loss = models[0](ONE).float().sum()
    with amp.scale_loss(loss, optimizers[0], delay_unscale=delay):
        loss.backward()
    next(amp.master_params(optimizers[0]))
    assert grad(models[0]) == 2.0
    optimizers[0].step()
    assert values(models) == [-1.0, 1.0]


@pytest.mark.parametrize("level", SCALED)
def test_a_block_without_a_backward_pass_changes_nothing(level: str) -> None:
    models, optimizers = pair(level)
    block(models[0](ONE), optimizers[0])
    before = amp.state_dict()
    with amp.scale_loss(models[0](ONE).float().sum(), optimizers[0]):
        assert grad(models[0]) == 1.0
    with amp.scale_loss(torch.ones(()), optimizers[0]) as scaled, pytest.raises(RuntimeError, match="does not require"):
        scaled.backward()
    assert grad(models[0]) == 1.0
    assert amp.state_dict() == before


@pytest.mark.parametrize("level", SCALED)
def test_a_graph_gone_through_twice_in_a_block_counts_twice(level: str) -> None:
    models, optimizers = pair(level)
    block(models[0](ONE), optimizers[0])
    with amp.scale_loss(models[0](ONE).float().sum(), optimizers[0]) as scaled:
        scaled.backward(retain_graph=True)
        (scaled / 4).backward()
    assert grad(models[0]) == 2.25


@pytest.mark.parametrize("level", SCALED)
def test_a_scaled_loss_differentiated_after_its_block_is_refused(level: str) -> None:
    models, optimizers = pair(level)
    with amp.scale_loss(models[0](ONE).float().sum(), optimizers[0]) as scaled:
        scaled.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inside the block"):
        scaled.backward()
    assert grad(models[0]) == 1.0


def test_a_loss_without_a_scale_stays_the_users_own() -> None:
    models, optimizers = pair("O1", loss_scale=1.0)
    loss = models[0](ONE).float().sum()
    with amp.scale_loss(loss, optimizers[0]) as same:
        same.backward(retain_graph=True)
    loss.backward()
    assert grad(models[0]) == 2.0


# What has no place in a block


INSIDE: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer.step()": lambda models, optimizers: optimizers[1].step(),
    "amp.master_params": lambda models, optimizers: amp.master_params(optimizers[0]),
    "amp.scale_loss": lambda models, optimizers: block(models[1](ONE), optimizers[1]),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("what", INSIDE)
def test_what_needs_true_gradients_is_refused_inside_a_block(what: str, level: str) -> None:
    models, optimizers = pair(level)

    def run() -> None:
        with amp.scale_loss(models[0](ONE).float().sum(), optimizers[0]) as scaled:
            scaled.backward()
            INSIDE[what](models, optimizers)

    with pytest.raises(RuntimeError, match=f"^{what}.* inside a scale_loss block"):
        run()
    assert values(models) == [1.0, 1.0]
    assert models[0].weight.grad is None, "the block failed, so its gradients are dropped"
    block(models[0](ONE), optimizers[0])
    optimizers[0].step()
    assert values(models) == [0.0, 1.0], "and the next one works"


# Trainings beside each other


def test_what_needs_true_gradients_is_refused_inside_a_block_of_another_training_too() -> None:
    models, optimizers = pair()
    others, other_optimizers = pair("O2")

    def run(inside: Callable[[Any, Any], Any]) -> None:
        with amp.scale_loss(models[0](ONE).float().sum(), optimizers[0]) as scaled:
            scaled.backward()
            inside(others, other_optimizers)

    for what, inside in INSIDE.items():
        with pytest.raises(RuntimeError, match=f"^{what}.* inside a scale_loss block"):
            run(inside)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("other_level", LEVELS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_that_reaches_models_of_another_training_leaves_true_gradients_there(
    level: str, other_level: str, delay: bool
) -> None:
    """A GAN whose networks were given to a call of `initialize` each: the generator's loss goes through both."""
    (discriminator, _), (opt_d, _) = pair(level)
    (generator, _), (opt_g, _) = pair(other_level)
    for _ in range(2):
        for optimizer in (opt_d, opt_g):
            optimizer.zero_grad()
        score = discriminator(3 * ONE).float().sum()
        with amp.scale_loss(score, opt_d, delay_unscale=delay) as scaled:
            scaled.backward()
        fooled = discriminator(generator(2 * ONE).float()).float().sum()
        with amp.scale_loss(fooled, opt_g, delay_unscale=delay) as scaled:
            scaled.backward()
        assert [next(amp.master_params(o)).grad.item() for o in (opt_d, opt_g)] == [5.0, 2.0]
    opt_d.step()
    opt_g.step()
    assert values([discriminator, generator]) == [-4.0, -1.0]


@pytest.mark.parametrize("level", SCALED)
def test_an_overflow_in_models_of_another_training_is_seen_by_both(level: str) -> None:
    (discriminator, _), (opt_d, _) = pair(level)
    (generator, _), (opt_g, _) = pair(level)
    with amp.scale_loss(discriminator(generator(ONE)).float().sum(), opt_g) as scaled:
        scaled.backward()
        discriminator.weight.grad.fill_(float("inf"))
    opt_d.step()
    opt_g.step()
    assert [amp.outcome(o) for o in (opt_d, opt_g)] == [Outcome.SKIPPED] * 2
    scales = [amp.state_dict(optimizers=o)["loss_scaler0"]["loss_scale"] for o in (opt_d, opt_g)]
    assert scales == [SCALE, SCALE / 2], "the loss's own falls"


# A closure has a block of its own


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_with_zero_grad_in_its_block_trains_like_float32(level: str) -> None:
    def train(model: nn.Module, optimizer: Any, mixed: bool) -> list[Tensor]:
        for n in range(4):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(n))

            def closure(x: Tensor = x) -> Tensor:
                loss = (model(x).float() ** 2).mean()
                with amp.scale_loss(loss, optimizer) if mixed else plain(loss) as scaled:
                    optimizer.zero_grad()
                    scaled.backward()
                return loss

            optimizer.step(closure)
        return [p.detach().float() for p in model.parameters()]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    exact = copy.deepcopy(model)
    wanted = train(exact, torch.optim.SGD(exact.parameters(), 0.1, momentum=0.9), mixed=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, init_scale=SCALE)
    for mine, theirs in zip(train(model, optimizer, mixed=True), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.01, atol=0.005)
    if level != "O0":
        assert amp.outcome(optimizer) is Outcome.STEPPED
