"""What the engine should do, in float64 and with none of its code: the reference of the stateful test.

It is simple where the engine is fast: a gradient is a number and a flag that says whether it carries a scale. Numbers
are small dyadic fractions, so that half arithmetic is exact and only overflow has to be modelled; whatever is not
finite is NaN here.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from tests.helpers.engine_optimizers import Optimizer, make_optimizer
from tests.helpers.engine_parts import Account, Array, Note, Scaler, Weight, Window, narrow
from tests.helpers.engine_script import LATE, Loss, Pass, Setup, Term

Key = tuple[str, tuple[int, ...]]


class EngineModel:
    """The engine, its optimizers and their parameters.

    Args:
        setup: The training.
        values: Every parameter's float32 value, by name ("0.weight").
        owned: Who owns which parameter now, where that is no longer as in ``setup``.
    """

    def __init__(self, setup: Setup, values: dict[str, Array], owned: list[list[str]] | None = None) -> None:
        self.setup = setup
        self.owned = owned or [list(names) for names in setup.owners]
        self.optimizers: list[Optimizer] = [make_optimizer(kind) for kind in setup.kinds]
        self.accounts = [Account() for _ in setup.kinds]
        self.scalers: dict[Key, Scaler] = {}
        self.window: Window | None = None
        self.notes: list[list[Note]] = [[] for _ in setup.kinds]
        self.weights = {name: Weight(value, self.is_half(name)) for name, value in values.items()}

    # Dtypes

    @property
    def lends(self) -> bool:
        return self.setup.level == "O2"

    def is_half(self, name: str) -> bool:
        return self.setup.level in ("O2", "O3") and name[0] != str(self.setup.kept)

    def computes_in_half(self, net: int) -> bool:
        return self.is_half(LATE) if net == 3 else self.setup.level == "O1" or self.is_half(str(net))

    def _held(self, weight: Weight, grad: Array) -> Array:
        """Returns what a parameter's ``.grad`` makes of a number."""
        return narrow(grad) if weight.is_half and (not self.lends or weight.grad_is_half) else grad

    # Scalers

    def key(self, loss: Loss, loss_id: int | None, optimizers: Sequence[int] | None) -> Key:
        if loss_id is not None:
            return "loss", (loss_id,)
        if optimizers is not None:
            return "optimizer", tuple(sorted(set(optimizers)))
        if len(self.owned) == 1:
            return "optimizer", (0,)
        trained = [i for i, names in enumerate(self.owned) if any(self.weights[n].trainable for n in names)]
        if 0 < len(trained) < len(self.owned):
            return "optimizer", tuple(trained)
        reached = set(self.reached(loss))
        touched = tuple(i for i, names in enumerate(self.owned) if reached & set(names))
        return ("optimizer", touched) if touched else ("default", ())

    def scaler(self, key: Key) -> Scaler:
        """Returns a key's scaler; a new one starts from the narrowest that covers it."""
        if key not in self.scalers:
            start = self.setup.init_scale if self.setup.loss_scale == "dynamic" else float(self.setup.loss_scale)
            if key[0] == "grad" and self.setup.loss_scale == "dynamic":
                start = max(min(start, 2.0**10), self.setup.min_scale)
            new = Scaler(self.setup, start)
            wider = [k for k in self.scalers if k[0] == "optimizer" and set(key[1]) < set(k[1])]
            cover = min(wider if key[0] == "optimizer" else [], key=lambda k: len(k[1]), default=("default", ()))
            if key[0] != "grad" and cover in self.scalers:
                other = self.scalers[cover]
                new.scale, new.clean, new.tolerance = other.scale, other.clean, other.tolerance
                new.lowest = new.highest = new.scale
            self.scalers[key] = new
        return self.scalers[key]

    # Backward

    def reached(self, loss: Loss) -> list[str]:
        """Returns the parameters that a loss gives a gradient."""
        names: list[str] = []
        for term in loss.terms:
            names += [LATE] if term.net == 3 else [f"{term.net}.weight", f"{term.net}.bias"]
        return [name for name in names if self.weights[name].trainable]

    def fresh(self, loss: Loss, scale: float, terms: Iterable[Term] | None = None) -> dict[str, Array]:
        """Returns the gradients of ``scale * loss``, rounded to half where it is computed in half."""
        seed = narrow(scale) if loss.half else np.float64(scale)
        if loss.poison == "loss * inf":
            seed = np.nan
        grads: dict[str, Array] = {}
        for i, term in enumerate(loss.terms if terms is None else terms):
            fit = narrow if self.computes_in_half(term.net) else np.asarray
            poison = loss.poison if i == 0 else None
            dy = fit(seed * np.array(term.c))
            if term.net == 3:
                grads[LATE] = dy
                continue
            x = np.array([np.nan if poison in ("x inf", "x nan") else term.x[0], term.x[1]])
            if poison == "dy":
                dy = np.array([np.nan, dy[1]])
            dw = fit(np.outer(dy, x))
            grads[f"{term.net}.weight"] = dw * np.nan if poison == "dw" else dw
            grads[f"{term.net}.bias"] = dy
        return {name: grad for name, grad in grads.items() if self.weights[name].trainable}

    def backward(self, loss: Loss, one: Pass, named: Sequence[int], fails: bool = False) -> None:
        """Runs one pass; one that fails has reached all but the first term."""
        self.review(before_pass=True)
        scaler = self.scaler(self.key(loss, one.loss_id, named if one.how == "named" else None))
        window = self.window
        if window is not None and (window.scaler is not scaler or window.version != scaler.version):
            self.collect()
        fresh = self.fresh(loss, scaler.scale, loss.terms[1:] if fails else None)
        only = one.inputs(loss)
        if only is not None and self.weights[only].trainable:
            fresh = {name: grad for name, grad in fresh.items() if name == only}
        true = any(w.trainable and w.grad is not None and not w.pending for w in self.weights.values())
        if one.delay and not self.lends and not true:
            self._delay(scaler, fresh, fails or loss.finite, fails)
        elif fails:
            for name, grad in fresh.items():
                if self.weights[name].pending and not one.create_graph:  # which adds out of place
                    self._accumulate(self.weights[name], grad)
        else:
            self._finish(scaler, fresh, loss.finite)
        self._seen()

    def _accumulate(self, weight: Weight, grad: Array) -> None:
        weight.grad = self._held(weight, grad if weight.grad is None else weight.grad + grad)

    def _delay(self, scaler: Scaler, fresh: dict[str, Array], finite: bool, fails: bool) -> None:
        for name, grad in fresh.items():
            self._accumulate(self.weights[name], grad)
            self.weights[name].pending = True
        if self.window is None and fails and not any(weight.pending for weight in self.weights.values()):
            return
        if self.window is None:
            self.window = Window(scaler, scaler.version, scaler.scale)
        self.window.finite &= finite

    def _finish(self, scaler: Scaler, fresh: dict[str, Array], finite: bool) -> None:
        if self.window is not None:
            finite &= self.window.finite
            self.window = None
        overflow, reached = False, []
        for name, weight in self.weights.items():
            new = fresh.get(name)
            if weight.pending:
                if new is not None:
                    self._accumulate(weight, new)
                new, weight.grad, weight.pending = weight.grad, None, False
            if new is not None:
                overflow |= bool(np.isnan(new).any())
                reached.append(name)
                weight.grad_is_half = False
                true = self._held(weight, new / scaler.scale)
                weight.grad = true if weight.grad is None else self._held(weight, weight.grad + true)
        scaler.update(overflow, finite)
        for index, notes in enumerate(self.notes):
            mine = set(reached) & set(self.owned[index])
            if overflow and mine:
                notes.append(Note(sure=len(mine) == len(reached), if_edited=len(mine) < len(reached)))
                for name in mine:
                    self.weights[name].held.add(notes[-1])
        self._seen()

    # Overflows that gradients need not show: they count as long as the gradients are there

    def review(self, before_pass: bool = False) -> None:
        """Looks which gradients are gone, and which were edited."""
        for notes in self.notes:
            for note in list(notes):
                held = [weight for weight in self.weights.values() if note in weight.held]
                if not held:
                    notes.remove(note)
                elif any(weight.edited for weight in held):
                    note.sure, note.if_edited = note.sure or note.if_edited, False
                if before_pass and not any(weight.grad.any() for weight in held):
                    note.sure = False
        self._seen()

    def _seen(self) -> None:
        for weight in self.weights.values():
            weight.edited = False

    def collect(self) -> None:
        """Makes pending gradients true."""
        self.review()
        if self.window is not None:
            self._finish(self.window.scaler, {}, True)

    def plain_backward(self, loss: Loss) -> None:
        for name, grad in self.fresh(loss, 1.0).items():
            weight = self.weights[name]
            weight.grad_is_half |= weight.grad is None and weight.is_half and self.lends
            weight.edited = True
            self._accumulate(weight, grad)

    def grad(self, loss: Loss) -> dict[str, Array]:
        """Returns the true gradients of a loss, under a scale of their own."""
        scaler = self.scaler(("grad", ()))
        scale = scaler.scale
        fresh = self.fresh(loss, scale)
        scaler.update(any(np.isnan(g).any() for g in fresh.values()), True)
        return {name: grad / scale for name, grad in fresh.items()}

    # Step

    def _grads(self, index: int) -> list[Array]:
        return [self.weights[n].grad for n in self.owned[index] if self.weights[n].grad is not None]

    def norm(self, index: int) -> float:
        self.collect()
        return float(np.sqrt(sum((g**2).sum() for g in self._grads(index))))

    def clip(self, index: int, value: float, algorithm: str) -> None:
        norm = self.norm(index)
        if not np.isfinite(norm):
            return
        for weight in (self.weights[n] for n in self.owned[index]):
            if weight.grad is None:
                continue
            if algorithm == "norm":
                weight.grad = weight.grad * min(1.0, value / (norm + 1e-6))
            else:
                weight.grad = np.clip(weight.grad, -value, value)

    def _lent(self, index: int) -> list[Weight]:
        """Returns the weights of an optimizer whose masters it borrows."""
        return [self.weights[n] for n in self.owned[index] if self.lends and self.weights[n].is_half]

    def borrow(self, index: int) -> None:
        for weight in self._lent(index):
            weight.adopt()
            weight.grad_is_half = False

    def give_back(self, index: int) -> None:
        for weight in self._lent(index):
            weight.refresh()

    def can_step(self, index: int) -> bool:
        """Tells whether torch's optimizer can: its fused SGD takes no mix of parameters with momentum and without."""
        known = {n in self.optimizers[index].state for n in self.owned[index] if self.weights[n].grad is not None}
        return self.setup.kinds[index] != "sgd fused" or len(known) < 2

    def step(self, index: int, lent: bool = False) -> None:
        """Steps an optimizer; ``lent``: it holds its masters already."""
        self.collect()
        grads = self._grads(index)
        others = [g for i in range(len(self.owned)) if self.setup.joint for g in self._grads(i)]
        optimizer = self.optimizers[index]
        if not grads:
            self.accounts[index].add("idle")
            return
        answering = self.notes if self.setup.joint else [self.notes[index]]
        hidden = any(note.sure for notes in answering for note in notes)
        skip = hidden or any(np.isnan(g).any() for g in grads + others)
        if len(answering) == 1:
            self.notes[index] = []
        names = [n for n in self.owned[index] if self.weights[n].grad is not None]
        # A fused optimizer that has its state is called for a skipped step too: it decides on the device.
        called = not skip or (optimizer.fused and all(n in optimizer.state for n in names))
        if called and not lent:
            self.borrow(index)
        for name in () if skip else names:
            self._move(self.weights[name], name, optimizer)
        if called and not lent:
            self.give_back(index)
        self.accounts[index].add("skipped" if skip else "stepped")

    def _move(self, weight: Weight, name: str, optimizer: Optimizer) -> None:
        if weight.is_half and self.lends:
            weight.master = optimizer.update(name, weight.master, weight.grad)
            return
        moved = optimizer.update(name, weight.shown, weight.grad)
        weight.write(moved)
        if weight.is_half:
            weight.exact = moved
            weight.master, weight.written = weight.shown, weight.shown

    # State

    def add_late(self, value: Array) -> None:
        self.weights[LATE] = Weight(value, self.is_half(LATE))

    def save(self) -> dict[str, Any]:
        return deepcopy(
            {
                "weights": {name: weight.truth() for name, weight in self.weights.items()},
                "scalers": self.scalers,
                "states": [optimizer.state for optimizer in self.optimizers],
                "accounts": self.accounts,
            }
        )

    def load(self, saved: dict[str, Any]) -> None:
        """Takes over what `save` gave; gradients stay."""
        saved = deepcopy(saved)
        for name, value in saved["weights"].items():
            self.weights[name].load(value)
        self.scalers = saved["scalers"]
        for optimizer, state in zip(self.optimizers, saved["states"], strict=True):
            optimizer.state = state
        self.accounts = saved["accounts"]
