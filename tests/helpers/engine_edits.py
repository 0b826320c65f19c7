"""What a user does to gradients and weights between the calls of the engine, to the world and its model alike."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.helpers.engine_model import EngineModel
from tests.helpers.engine_script import Setup
from tests.helpers.engine_strategies import NAMES, names, places, rarely
from tests.helpers.engine_world import World

zeroing = st.sampled_from(["optimizer", "optimizer", "net", "root", "grad = None", "grad.zero_()"])


class EditingMachine(RuleBasedStateMachine):
    """The rules that edit."""

    setup: Setup
    world: World
    model: EngineModel
    stash: dict[str, Any]
    """Weights put aside, as an average is swapped in."""

    def place(self, index: int) -> int:
        """Returns an optimizer's index from any number."""
        return index % len(self.setup.kinds)

    def _set_trainable(self, flags: dict[str, bool]) -> None:
        for name, flag in flags.items():
            self.model.weights[name].trainable = flag
            self.world.params[name].requires_grad_(flag)

    # Gradients

    @rule(how=zeroing, to_none=st.booleans(), index=places, name=names)
    def zero_grad(self, how: str, to_none: bool, index: int, name: str) -> None:
        index = self.place(index)
        targets: list[str] = {
            "optimizer": self.model.owned[index],
            "net": [n for n in NAMES if n[0] == name[0]],
            "root": list(NAMES),
        }.get(how, [name])
        if how in ("grad = None", "grad.zero_()"):
            to_none, param = how == "grad = None", self.world.params[name]
            if to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        else:
            net = self.world.root.nets[int(name[0])]
            owner = {"optimizer": self.world.optimizers[index], "net": net, "root": self.world.root}[how]
            owner.zero_grad(set_to_none=to_none)
        for weight in (self.model.weights[n] for n in targets):
            if to_none:
                weight.clear()
            elif weight.grad is not None:
                weight.edited = True
                weight.grad = weight.grad * 0 if np.isfinite(weight.grad).all() else np.zeros_like(weight.grad)

    @rule(how=st.sampled_from(["* 0.5", "= 0.75", "= half", "nan_to_num", "inf", "+ 1"]), name=names)
    def edit_grad(self, how: str, name: str) -> None:
        param, weight = self.world.params[name], self.model.weights[name]
        if how.startswith("="):
            as_half = weight.is_half and (how == "= half" or not self.model.lends)
            param.grad = torch.full_like(param, 0.75, dtype=torch.float16 if as_half else torch.float32)
            weight.clear()
            weight.grad, weight.grad_is_half = np.full(param.shape, 0.75), as_half and self.model.lends
        elif param.grad is not None:
            weight.edited |= how != "+ 1" or not weight.pending
            with torch.no_grad():
                if how == "* 0.5":
                    param.grad.mul_(0.5)
                    weight.grad = weight.grad * 0.5
                elif how == "nan_to_num":
                    param.grad.nan_to_num_(0.0, 0.0, 0.0)
                    weight.grad = np.nan_to_num(weight.grad)
                elif how == "inf":
                    param.grad.view(-1)[0] = torch.inf
                    weight.grad = weight.grad.copy()
                    weight.grad.flat[0] = np.nan
                elif not weight.pending:
                    param.grad.add_(1.0)
                    weight.grad = weight.grad + 1.0

    # Weights

    @rule(
        how=st.sampled_from(["clamp_", "copy_", "mul_", "load", "stash", "restore"]),
        name=names,
        value=st.sampled_from([0.5, 0.1, -0.3]),
    )
    def edit_weight(self, how: str, name: str, value: float) -> None:
        param, weight = self.world.params[name], self.model.weights[name]
        exact = float(np.float32(value))
        with torch.no_grad():
            if how == "clamp_":
                param.data.clamp_(-0.5, 0.5)
                weight.write(np.clip(weight.shown, -0.5, 0.5))
            elif how == "copy_":
                param.data.copy_(torch.full(param.shape, value))
                weight.write(np.full(param.shape, exact))
            elif how == "mul_":
                param.mul_(0.5)
                weight.write(weight.shown * 0.5)
            elif how == "load":
                new = torch.full(param.shape, value)
                self.world.root.load_state_dict({f"nets.{name}": new}, strict=False)
                weight.load(np.full(param.shape, exact))
            elif how == "stash":
                self.stash[name] = param.detach().clone(), weight.shown
            elif name in self.stash:
                param.copy_(self.stash[name][0])
                weight.write(self.stash[name][1])

    @rule(
        indices=st.lists(places, min_size=1, max_size=2),
        acts=st.lists(st.sampled_from(["clamp_", "nudge", "zero_grad", "step", "step"]), min_size=1, max_size=3),
        clears=rarely,
    )
    def lend(self, indices: list[int], acts: list[str], clears: bool) -> None:
        """Edits and steps inside ``masters(...)``."""
        indices = list(dict.fromkeys(map(self.place, indices)))
        with self.world.region(), self.world.lent(indices):
            for i in indices:
                self.model.borrow(i)
            for act in acts:
                for i in indices:
                    self._act(act, i)
            if clears:
                self.world.root.zero_grad()
                for name in NAMES:
                    self.model.weights[name].clear()
        for i in indices:
            self.model.give_back(i)

    def _act(self, act: str, index: int) -> None:
        weights = [self.model.weights[n] for n in self.model.owned[index]]
        optimizer = self.world.optimizers[index]
        if act == "step":
            if self.model.can_step(index):
                self.world.engine.step(optimizer)
                self.model.step(index, lent=True)
        elif act == "zero_grad":
            optimizer.zero_grad()
            for weight in weights:
                weight.clear()
        else:
            with torch.no_grad():
                for p in self.world.held(index):
                    p.clamp_(-0.5, 0.5) if act == "clamp_" else p.add_(1e-4)
            for weight in weights:
                masters = self.model.lends and weight.is_half
                value = weight.master if masters else weight.shown
                value = np.clip(value, -0.5, 0.5) if act == "clamp_" else value + float(np.float32(1e-4))
                if masters:
                    weight.master = value
                else:
                    weight.exact = value if weight.is_half else None
                    weight.write(value)

    @rule(chosen=st.sets(names, min_size=1, max_size=4), flag=st.sampled_from([True, True, False]))
    def freeze(self, chosen: set[str], flag: bool) -> None:
        self._set_trainable(dict.fromkeys(chosen, flag))
