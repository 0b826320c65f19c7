"""The engine against a float64 model of it: any sequence of calls, then every number compared.

By default 500 sequences, the same ones each time. Many more, and new ones each time:

    ENGINE_MODEL=20000 OMP_NUM_THREADS=1 python -m pytest tests/test_engine_model.py
"""

import os
import sys
from contextlib import nullcontext
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.engine_compare import Comparison
from tests.helpers.engine_model import LATE, EngineModel, Loss, Pass, Setup, Term
from tests.helpers.engine_strategies import NAMES, losses, names, passes, places, rarely, setups
from tests.helpers.engine_world import NETS, BackwardError, World, first_values

GIVEN = os.environ.get("ENGINE_MODEL")
"""How many sequences; without it the same 500 each time."""

window_events = st.sampled_from(
    ["pass", "pass", "failing pass", "freeze", "thaw", "= 0.75", "grad = None", "grad.zero_()"]
)
zeroing = st.sampled_from(["optimizer", "optimizer", "net", "root", "grad = None", "grad.zero_()"])


class EngineMachine(RuleBasedStateMachine):
    """Calls the engine and its model alike."""

    world: World
    model: EngineModel

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        values = {name: np.float64(np.float32(value)) for name, value in first_values().items()}
        self.setup = setup
        self.world, self.model = World(setup, values), EngineModel(setup, values)
        self.comparison = Comparison(self.model)
        self.groups = [[list(names)] for names in setup.owners]
        self.saved: tuple[bytes, dict[str, Any]] | None = None
        self.stash: dict[str, Any] = {}

    def place(self, index: int) -> int:
        """Returns an optimizer's index from any number."""
        return index % len(self.setup.kinds)

    # Backward

    @rule(
        loss=losses,
        passes=passes,
        named=st.lists(places, min_size=1, max_size=2),
        toggled=st.none() | places,
        fails=rarely,
    )
    def backward(
        self, loss: Loss, passes: list[Pass], named: list[int], toggled: int | None = None, fails: bool = False
    ) -> None:
        """One or two passes over one graph."""
        was = self._toggle(toggled)
        optimizers = [self.place(i) for i in named]
        fails = fails and loss.poison is None and bool(self.model.reached(Loss(loss.terms[:1])))
        with self.world.region(), self.world.loss(loss, fails) as total:
            self.comparison.loss(loss, total)
            for left, one in enumerate(passes, 1 - len(passes)):
                fault = BackwardError if fails else RuntimeError if not self.model.reached(loss) else None
                with nullcontext() if fault is None else pytest.raises(fault):
                    self.world.backward(total, loss, one, optimizers, retain_graph=left < 0)
                self.model.backward(loss, one, optimizers, fails=fault is not None)
        self._set_trainable(was)

    def _toggle(self, index: int | None) -> dict[str, bool]:
        was = {name: weight.trainable for name, weight in self.model.weights.items()}
        if index is not None:
            mine = self.model.owned[self.place(index)]
            others = {n for names in self.model.owned for n in names} - set(mine)
            self._set_trainable(dict.fromkeys(others, False))
        return was

    def _set_trainable(self, flags: dict[str, bool]) -> None:
        for name, flag in flags.items():
            self.model.weights[name].trainable = flag
            self.world.params[name].requires_grad_(flag)

    @rule(
        loss=losses,
        other=losses,
        how=st.sampled_from(["id 0", "named", "walk"]),
        index=places,
        events=st.lists(st.tuples(window_events, names), max_size=4),
        end=st.sampled_from(["pass", "step", "clip", "unscale", "nothing"]),
    )
    def window(self, loss: Loss, other: Loss, how: str, index: int, events: list[tuple[str, str]], end: str) -> None:
        """Delayed passes under one scale, and what may come between them and their end."""
        delayed = Pass(how, delay=True)
        self.backward(loss, [delayed], [index])
        for event, name in events:
            if event in ("pass", "failing pass"):
                self.backward(other, [delayed], [index], fails=event == "failing pass")
            elif event in ("freeze", "thaw"):
                self._set_trainable({name: event == "thaw"})
            elif event == "= 0.75":
                self.edit_grad(event, name)
            else:
                self.zero_grad(event, True, index, name)
            self.agree()
        if end == "pass":
            self.backward(other, [Pass(how)], [index])
        elif end == "step":
            self.step(index, False)
        elif end == "clip":
            self.clip(index, "norm", 2.0)
        elif end == "unscale":
            self.unscale(index)

    @rule(loss=losses)
    def plain_backward(self, loss: Loss) -> None:
        reached = self.model.reached(loss)
        if not reached or any(self.model.weights[n].pending for n in reached):
            return  # onto pending gradients it is outside the contract
        with self.world.region(), self.world.loss(loss) as total:
            total.backward()
        self.model.plain_backward(loss)

    @rule(loss=losses)
    def grad(self, loss: Loss) -> None:
        reached = self.model.reached(loss)
        if not reached:
            return
        with self.world.region(), self.world.loss(loss) as total:
            found = self.world.engine.grad(total, [self.world.params[n] for n in reached])
        self.comparison.tensors("grad", found, list(self.model.grad(loss).values()))

    @rule(index=places, loss_net=places)
    @precondition(lambda self: LATE in self.world.params)
    def backward_late(self, index: int, loss_net: int) -> None:
        self.backward(
            Loss((Term(NETS, (1.0, 1.0), (1.0, 2.0)), Term(loss_net, (1.0, 1.0), (1.0, 1.0)))),
            [Pass()],
            [index],
        )

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
                weight.grad = weight.grad * 0 if np.isfinite(weight.grad).all() else np.zeros_like(weight.grad)

    @rule(index=places, algorithm=st.sampled_from(["norm", "value"]), bound=st.sampled_from([0.5, 2.0, 64.0]))
    def clip(self, index: int, algorithm: str, bound: float) -> None:
        index = self.place(index)
        with self.world.region():
            self.world.engine.clip(self.world.optimizers[index], bound, algorithm)
        self.model.clip(index, bound, algorithm)

    @rule(index=st.none() | places)
    def unscale(self, index: int | None) -> None:
        self.world.engine.unscale(None if index is None else self.world.optimizers[self.place(index)])
        self.model.collect()

    @rule(index=places)
    def norm(self, index: int) -> None:
        index = self.place(index)
        self.comparison.norm(self.world.engine.norm(self.world.optimizers[index]), self.model.norm(index))

    @rule(how=st.sampled_from(["* 0.5", "= 0.75", "= half", "nan_to_num", "inf", "+ 1"]), name=names)
    def edit_grad(self, how: str, name: str) -> None:
        param, weight = self.world.params[name], self.model.weights[name]
        if how.startswith("="):
            as_half = weight.is_half and (how == "= half" or not self.model.lends)
            param.grad = torch.full_like(param, 0.75, dtype=torch.float16 if as_half else torch.float32)
            weight.clear()
            weight.grad, weight.grad_is_half = np.full(param.shape, 0.75), as_half and self.model.lends
        elif param.grad is not None:
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

    # Steps

    @rule(index=places, look=st.booleans())
    def step(self, index: int, look: bool) -> None:
        index = self.place(index)
        if not self.model.can_step(index):
            return
        loss = Loss((Term(0, (1.0, 2.0), (1.0, -1.0)), Term(1, (1.0, 2.0), (1.0, -1.0))))
        with self.world.region():
            with self.world.loss(loss) as before:  # in a region it leaves its casts in autocast's cache
                self.comparison.loss(loss, before)
            self.world.engine.step(self.world.optimizers[index])
            self.model.step(index)
            with self.world.loss(loss) as after:
                self.comparison.loss(loss, after)
        if look:
            self.comparison.outcome(self.world, index)

    @rule(index=places, how=st.sampled_from(["walk", "named"]), loss=losses)
    def train(self, index: int, how: str, loss: Loss) -> None:
        """What scripts do most: ``zero_grad``, backward, step."""
        self.zero_grad("optimizer", True, index, NAMES[0])
        self.backward(loss, [Pass(how)], [index])
        self.step(index, False)

    @rule(index=places)
    @precondition(lambda self: LATE not in self.world.params)
    def add_late(self, index: int) -> None:
        """A parameter that is in no module joins an optimizer: half, where weights are."""
        self.world.add_late()
        self.model.add_late(self.world.params[LATE].detach().double().numpy())
        self.add_group(index, LATE)

    @rule(index=places, name=names)
    def add_group(self, index: int, name: str) -> None:
        index = self.place(index)
        if name in self.model.owned[index]:
            return
        self.world.optimizers[index].add_param_group({"params": [self.world.params[name]]})
        self.model.owned[index].append(name)
        self.groups[index].append([name])
        self.saved = None  # it does not fit any more

    # State

    @rule()
    @precondition(lambda self: LATE not in self.world.params)
    def save(self) -> None:
        self.saved = self.world.save(), self.model.save()

    @rule(level=st.sampled_from(["O0", "O1", "O2", "O3"]), same_level=st.booleans(), load_late=st.booleans())
    @precondition(lambda self: self.saved is not None)
    def resume(self, level: str, same_level: bool, load_late: bool) -> None:
        """Goes on in fresh objects, at any level."""
        assert self.saved is not None
        flags = {name: weight.trainable for name, weight in self.model.weights.items()}
        self.world.close()
        self.setup = self.setup if same_level else self.setup.at(level)
        values = {name: np.zeros_like(value) for name, value in first_values().items()}
        self.world = World(self.setup, values, self.groups, self.saved[0], load_late)
        self.model = EngineModel(self.setup, values, self.model.owned)
        self.model.load(self.saved[1])
        self._set_trainable(flags)
        self.stash = {}
        self.comparison.resumed(self.model)

    @rule()
    @precondition(lambda self: self.saved is not None)
    def roll_back(self) -> None:
        """Loads into the objects that are there."""
        assert self.saved is not None
        self.world.load(self.saved[0])
        self.model.load(self.saved[1])
        self.comparison.resumed(self.model)

    # Comparison

    @invariant()
    def agree(self) -> None:
        self.comparison.everything(self.world)

    def teardown(self) -> None:
        if hasattr(self, "world") and sys.exc_info()[0] is None:  # else a rule has failed already
            for index in range(len(self.setup.kinds)):
                self.comparison.outcome(self.world, index)
            self.world.close()
            self.comparison.left_as_found(self.world)


TestEngineModel = EngineMachine.TestCase
TestEngineModel.settings = settings(
    max_examples=int(GIVEN or 500),
    derandomize=GIVEN is None,
    stateful_step_count=30,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
