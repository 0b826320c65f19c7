"""A step after a clip reads the gradients again only where somebody has touched them in between."""

import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import Engine, Outcome, kernels, resolve


def trained() -> tuple[Engine, torch.optim.Optimizer, list[Tensor]]:
    """Returns an engine with one optimizer whose two gradients are true and finite, and have been clipped."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    engine = Engine(resolve("O1"), [optimizer])
    engine.backward(sum((p.sum() for p in params), torch.zeros(())))
    engine.clip(optimizer, 1.0)
    return engine, optimizer, list(params)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all lists of gradients that are read."""
    backend = kernels.backend(torch.device("cpu"))
    seen: list[int] = []

    def watched(original: Callable[..., object], grads: list[Tensor], also: Tensor | None = None) -> object:
        seen.append(len(grads))
        return original(grads, also)

    for name in ("read", "found_inf"):
        monkeypatch.setattr(backend, name, partial(watched, getattr(backend, name)))
    return seen


def test_a_step_after_a_clip_reads_nothing_again(reads: list[int]) -> None:
    engine, optimizer, _ = trained()
    reads.clear()
    engine.step(optimizer)
    assert reads == []
    assert engine.outcome(optimizer) is Outcome.STEPPED


def _edit(params: list[Tensor]) -> None:
    grad = params[1].grad
    assert grad is not None
    grad[0] = torch.nan


def _replace(params: list[Tensor]) -> None:
    params[0].grad = torch.full((3,), torch.inf)


def _backward(params: list[Tensor]) -> None:
    (params[0].sum() * torch.inf).backward()


@pytest.mark.parametrize("change", [_edit, _replace, _backward])
def test_a_step_sees_what_was_done_since_the_clip(change: Callable[[list[Tensor]], None]) -> None:
    engine, optimizer, params = trained()
    change(params)
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.SKIPPED
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)


def test_what_a_clip_read_lasts_for_one_step(reads: list[int]) -> None:
    engine, optimizer, params = trained()
    engine.step(optimizer)
    reads.clear()
    engine.step(optimizer)
    assert reads == [2]
    params[0].grad = None
    engine.clip(optimizer, 1.0)
    params[1].grad = None
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.IDLE


def test_a_clip_keeps_no_gradient_alive() -> None:
    engine, optimizer, params = trained()
    assert params[0].grad is not None
    alive = weakref.ref(params[0].grad)
    params[0].grad = None
    assert alive() is None
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.STEPPED
