"""Comparison of the engine's world with its model, number by number."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_amp.master_weights import merged
from tests.helpers.engine_model import EngineModel
from tests.helpers.engine_script import LATE, Loss
from tests.helpers.engine_world import World

FLOAT32, HALF = 4e-6, 2e-3
"""Tolerances, relative to the largest number that a tensor has held: a few roundings each."""


class Comparison:
    """Compares, and lets the model take over how half numbers were rounded.

    Args:
        model: The model.
    """

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self._peaks: dict[str, float] = {}

    def resumed(self, model: EngineModel) -> None:
        """Goes on with a model that took over a checkpoint."""
        self.model = model

    # Numbers

    def _close(self, what: str, found: Tensor, expected: Any, rounded: bool) -> Any:
        """Asserts closeness and returns the number to go on with: that of the world where it was rounded to half."""
        got = found.detach().double().numpy()
        assert got.shape == np.shape(expected), f"{what}: shape {got.shape}, expected {np.shape(expected)}"
        good = np.isfinite(expected)
        assert (np.isfinite(got) == good).all(), f"{what}: {got}, expected {expected}"
        peak = max(1.0, self._peaks.get(what, 0.0), np.abs(expected[good]).max(initial=0.0))
        self._peaks[what] = peak
        off = np.abs(got[good] - expected[good]).max(initial=0.0)
        assert off <= (HALF if rounded else FLOAT32) * peak, f"{what}: {got}, expected {expected}"
        return np.where(good, got, np.nan) if rounded else expected

    def tensors(self, what: str, found: Sequence[Tensor | None], expected: Sequence[Any]) -> None:
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert mine is not None
            assert mine.dtype is torch.float32
            self._close(f"{what} {i}", mine, theirs, False)

    def norm(self, found: Tensor, expected: float) -> None:
        got = found.item()
        close = np.isclose(got, expected, rtol=HALF if self.model.setup.level == "O3" else FLOAT32)
        assert close if np.isfinite(expected) else not np.isfinite(got), f"norm {got}, expected {expected}"

    def loss(self, loss: Loss, found: Tensor) -> None:
        """Compares a loss's value, by which a stale copy of a weight is found out."""
        expected, size = 0.0, 1.0
        for term in loss.terms:
            if term.net == 3:
                y = self.model.weights[LATE].shown
            else:
                weight, bias = (self.model.weights[f"{term.net}.{n}"].shown for n in ("weight", "bias"))
                y = weight @ np.array(term.x) + bias
                size += np.abs(weight).sum() * 4 + np.abs(bias).sum() * 2
            expected += y @ np.array(term.c)
        if loss.poison in (None, "dy", "dw"):
            assert abs(found.item() - expected) <= HALF * size, f"loss {found}, expected {expected}"
        else:
            assert not np.isfinite(found.item())

    # State

    def everything(self, world: World) -> None:
        for name, param in world.params.items():
            self._weight(world, name, param)
            self._grad(name, param)
        for index, optimizer in enumerate(world.optimizers):
            self._state(world, index, optimizer)
        self._scalers(world)

    def _weight(self, world: World, name: str, param: Tensor) -> None:
        weight = self.model.weights[name]
        assert param.dtype is (torch.float16 if weight.is_half else torch.float32), name
        assert param.requires_grad == weight.trainable, name
        if weight.is_half and weight.exact is None:
            assert (param.detach().double().numpy() == weight.shown).all(), f"{name}: {param}, expected {weight.shown}"
        elif weight.is_half:
            weight.shown = self._close(name, param, weight.exact, True)
            weight.written = weight.shown if self.model.lends else weight.written
            weight.exact = None
        else:
            self._close(name, param, weight.shown, False)
        master = world.masters.of(param)
        if master is not None:
            self._close(f"master of {name}", merged(param, master), weight.truth(), False)

    def _grad(self, name: str, param: Tensor) -> None:
        weight = self.model.weights[name]
        assert (param.grad is None) == (weight.grad is None), f"{name}.grad is {param.grad}, expected {weight.grad}"
        if param.grad is not None:
            is_half = weight.is_half and (not self.model.lends or weight.grad_is_half)
            assert param.grad.dtype is (torch.float16 if is_half else torch.float32), f"{name}.grad: {param.grad.dtype}"
            # At O3 a clip by norm carries the roundings of half gradients into float32 ones.
            rounded = is_half or self.model.setup.level == "O3"
            weight.grad = self._close(f"{name}.grad", param.grad, weight.grad, rounded)

    def _state(self, world: World, index: int, optimizer: Any) -> None:
        mine = self.model.optimizers[index].state
        names = {id(param): name for name, param in world.params.items()}
        theirs = {
            names[id(p)]: state for p, state in optimizer.state.items() if any(v is not None for v in state.values())
        }
        assert [names[id(p)] for p in world.held(index)] == self.model.owned[index]
        assert set(theirs) == set(mine), f"optimizer {index} has state for {set(theirs)}, expected {set(mine)}"
        for name, state in theirs.items():
            for key, value in state.items():
                is_half = value.dtype is torch.float16
                assert not is_half or self.model.setup.level == "O3"
                expected = np.asarray(mine[name][key], dtype=np.float64)
                mine[name][key] = self._close(f"{name} {key} {index}", value, expected, is_half)

    def _scalers(self, world: World) -> None:
        scalers = {"_".join([kind, *map(str, ids)]): s for (kind, ids), s in self.model.scalers.items()}
        assert world.engine.loss_scales() == {name: s.scale for name, s in scalers.items()}
        for scaler in world.engine.scalers:
            state, expected = scaler.read(), scalers[scaler.name]
            for name in ("scale", "clean", "overflows", "bad_losses", "streak", "lowest", "highest"):
                assert getattr(state, name) == getattr(expected, name), f"{scaler.name}.{name}: {state}, {expected}"
            assert state.inv_scale == np.float32(1 / expected.scale)
            assert scaler.attempts == expected.attempts
            if scaler.rule.dynamic:
                assert state.hysteresis == expected.tolerance

    def outcome(self, world: World, index: int) -> None:
        account, optimizer = self.model.accounts[index], world.optimizers[index]
        latest = world.engine.outcome(optimizer)
        assert (None if latest is None else latest.value) == account.latest, f"{latest}, expected {account}"
        assert {o.value: n for o, n in world.engine.counts(optimizer).items()} == account.counts

    def left_as_found(self, world: World) -> None:
        """Compares what is left after the training: float32 everywhere, and nobody's hooks."""
        for name, param in world.params.items():
            weight = self.model.weights[name]
            if name == LATE:
                continue
            assert param.dtype is torch.float32
            self._close(f"master of {name}", param, weight.truth(), False)
            assert (param.grad is None) == (weight.grad is None)
        for module in world.root.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
            assert not module._state_dict_hooks
        for optimizer in world.optimizers:
            assert not optimizer._optimizer_step_pre_hooks
            assert not optimizer._optimizer_step_post_hooks
