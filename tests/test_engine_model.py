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
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.helpers.engine_compare import Comparison
from tests.helpers.engine_edits import EditingMachine
from tests.helpers.engine_model import EngineModel
from tests.helpers.engine_script import LATE, Loss, Pass, Setup, Term
from tests.helpers.engine_strategies import NAMES, losses, names, passes, places, rarely, setups
from tests.helpers.engine_world import NETS, BackwardError, World, first_values

GIVEN = os.environ.get("ENGINE_MODEL")
"""How many sequences; without it the same 500 each time."""

window_events = st.sampled_from(
    ["pass", "pass", "failing pass", "freeze", "thaw", "= 0.75", "grad = None", "grad.zero_()"]
)


class EngineMachine(EditingMachine):
    """Calls the engine and its model alike."""

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        values = {name: np.float64(np.float32(value)) for name, value in first_values().items()}
        self.setup = setup
        self.world, self.model = World(setup, values), EngineModel(setup, values)
        self.stash = {}
        self.comparison = Comparison(self.model)
        self.groups = [[list(names)] for names in setup.owners]
        self.saved: tuple[bytes, dict[str, Any]] | None = None

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
