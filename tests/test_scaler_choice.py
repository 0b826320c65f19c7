"""Which scaler a pass runs under: the loss id, the optimizers named, the lone one, the toggled ones, those reached."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_amp.engine import Engine
from tests.helpers.engines import engine_of, param


class Gan:
    """Three parameters with an optimizer each, and the engine."""

    def __init__(self, count: int = 3, **engine: Any) -> None:
        self.params = [param(1.0) for _ in range(count)]
        self.optimizers = [SGD([p], lr=1.0) for p in self.params]
        self.engine: Engine = engine_of("O1", self.optimizers, engine=engine)

    def loss(self, *which: int) -> Tensor:
        """A loss that reaches these parameters."""
        return torch.stack([self.params[i].sum() for i in which]).sum()

    def used(self) -> set[str]:
        """The names of the scalers that have seen a pass."""
        return {name for name, account in self.engine.accounts().items() if account.attempts}


@pytest.mark.parametrize(
    ("reaches", "given", "frozen", "name"),
    [
        ((0,), {"loss_id": 2}, (), "loss_2"),
        ((0,), {"loss_id": 0, "optimizers": [1]}, (1, 2), "loss_0"),
        ((0,), {"optimizers": [2, 1, 2]}, (), "optimizer_1_2"),
        ((0,), {"optimizers": 1}, (1, 2), "optimizer_1"),
        ((0,), {"optimizers": []}, (), "optimizer_0"),
        ((0,), {}, (1, 2), "optimizer_0"),
        ((0, 2), {}, (1,), "optimizer_0_2"),
        ((0,), {}, (1,), "optimizer_0_2"),  # toggling goes before the walk
        ((1,), {}, (), "optimizer_1"),
        ((0, 2), {}, (), "optimizer_0_2"),
        ((0, 1, 2), {}, (), "optimizer_0_1_2"),
    ],
)
def test_the_first_that_applies_chooses(reaches: Any, given: Any, frozen: Any, name: str) -> None:
    gan = Gan()
    loss = gan.loss(*reaches)
    for i in frozen:
        gan.params[i].requires_grad_(False)
    if isinstance(named := given.get("optimizers"), list):
        given = given | {"optimizers": [gan.optimizers[i] for i in named]}
    elif named is not None:
        given = given | {"optimizers": gan.optimizers[named]}
    gan.engine.backward(loss, **given)
    assert gan.used() == {name}


def test_a_lone_optimizer_has_one_scaler_whatever_a_loss_reaches() -> None:
    gan = Gan(1)
    gan.engine.backward(gan.loss(0))
    gan.engine.backward((gan.loss(0).detach() * torch.ones(1, requires_grad=True)).sum())
    assert gan.used() == {"optimizer_0"}


@pytest.mark.parametrize("distributed", [False, True])
def test_a_loss_that_reaches_none_of_them_and_several_processes_use_the_default(distributed: bool) -> None:
    gan = Gan(distributed=distributed)
    loss = gan.loss(0) if distributed else (torch.ones(1, requires_grad=True) * 2).sum()
    gan.engine.backward(loss)
    assert gan.used() == {"default"}


def test_with_several_processes_toggling_and_names_still_choose() -> None:
    gan = Gan(distributed=True)
    gan.engine.backward(gan.loss(0), loss_id=1)
    gan.params[1].requires_grad_(False)
    gan.engine.backward(gan.loss(0))
    assert gan.used() == {"loss_1", "optimizer_0_2"}


def test_a_graph_too_large_to_walk_uses_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_amp.scaler_choice.reached_leaves", lambda loss: None)
    gan = Gan()
    gan.engine.backward(gan.loss(0))
    assert gan.used() == {"default"}


@pytest.mark.parametrize("loss_id", [3, -1, True, "0", 1.0])
def test_a_loss_id_out_of_range_is_refused_before_anything_runs(loss_id: Any) -> None:
    gan = Gan()
    with pytest.raises(ValueError, match=r"loss_id=.* is out of range: num_losses=3 allows 0 to 2\. Raise num_losses"):
        gan.engine.backward(gan.loss(0), loss_id=loss_id)
    assert gan.params[0].grad is None
    gan.engine.backward(gan.loss(0), loss_id=2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_may_be_wrapped_and_must_be_one_of_them(wrapped: bool) -> None:
    gan = Gan()
    wrap = (lambda o: SimpleNamespace(_optimizer=o)) if wrapped else (lambda o: o)
    assert [gan.engine.index(wrap(o)) for o in gan.optimizers] == [0, 1, 2]
    stranger = wrap(SGD([gan.params[0]], lr=1.0))
    for call in (gan.engine.index, gan.engine.step, gan.engine.outcome, gan.engine.norm, gan.engine.lent_masters):
        with pytest.raises(ValueError, match=r"SGD is not one of the 3 optimizers of this training\. Use those that"):
            call(stranger)
    with pytest.raises(ValueError, match="SGD is not one of"):
        gan.engine.backward(gan.loss(0), optimizers=[stranger])
    assert gan.params[0].grad is None
