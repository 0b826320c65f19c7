"""What the float64 model of the engine is made of: a weight, a loss scale, a delayed window, an optimizer's account."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.helpers.engine_script import Setup

Array = Any

HALF_LIMIT = 65520.0
"""The least number that float16 rounds to infinity."""


def narrow(values: Array) -> Array:
    """Returns what float16 makes of numbers whose significant bits it can hold."""
    return np.where(np.abs(values) < HALF_LIMIT, values, np.nan)


def half(values: Array) -> Array:
    """Returns numbers rounded to float16, as float64."""
    return np.asarray(values).astype(np.float16).astype(np.float64)


@dataclass
class Weight:
    """A parameter. A half one has a float32 side, which ``written`` stands for as long as it is shown."""

    shown: Array
    is_half: bool = False
    master: Array = None
    written: Array = None
    grad: Array = None
    pending: bool = False
    grad_is_half: bool = False
    trainable: bool = True
    exact: Array = None
    """What ``shown`` was rounded from, until the world has been looked at."""
    held: set["Note"] = field(default_factory=set)
    """The overflows that are answered for as long as this gradient is there."""
    edited: bool = False
    """Whether the gradient was edited in place since the engine last saw it."""

    def __post_init__(self) -> None:
        if self.is_half:
            self.master, self.written = self.shown, half(self.shown)
            self.shown = self.written

    def truth(self) -> Array:
        """Returns the float32 value that the parameter stands for."""
        return self.shown if self.master is None else np.where(self.shown == self.written, self.master, self.shown)

    def adopt(self) -> None:
        self.master, self.written = self.truth(), self.shown

    def refresh(self) -> None:
        self.shown, self.exact = half(self.master), self.master
        self.written = self.shown

    def write(self, values: Array) -> None:
        """Overwrites what is shown, as an edit from outside does."""
        self.shown = half(values) if self.is_half else np.asarray(values)

    def load(self, values: Array) -> None:
        """Takes a float32 value over, as loading a state dict does."""
        self.write(values)
        if self.is_half:
            self.master, self.written = np.asarray(values), self.shown

    def clear(self) -> None:
        self.grad, self.pending, self.grad_is_half = None, False, False
        self.held, self.edited = set(), False


@dataclass
class Scaler:
    """A loss scale, what it has been through, and how it moves."""

    setup: Setup
    scale: float
    clean: int = 0
    tolerance: int = 0
    attempts: int = 0
    overflows: int = 0
    bad_losses: int = 0
    streak: int = 0
    lowest: float = 0.0
    highest: float = 0.0
    version: int = 0

    def __post_init__(self) -> None:
        self.tolerance = self.setup.hysteresis
        self.lowest = self.highest = self.scale

    def update(self, overflow: bool, loss_finite: bool) -> None:
        self.attempts += 1
        self.version += 1
        dynamic = self.setup.loss_scale == "dynamic"
        if overflow:
            self.overflows += 1
            self.streak += 1
            self.clean = 0
            self.bad_losses += not loss_finite
            if loss_finite and dynamic:
                self.tolerance = max(self.tolerance - 1, 0)
                if self.tolerance == 0:
                    self.scale = max(self.scale / 2, self.setup.min_scale)
        else:
            self.streak = 0
            self.clean += 1
            if dynamic and self.clean >= self.setup.growth_interval:
                self.scale = min(self.scale * self.setup.growth_factor, self.setup.max_scale)
                self.clean, self.tolerance = 0, self.setup.hysteresis
        self.lowest, self.highest = min(self.lowest, self.scale), max(self.highest, self.scale)


@dataclass
class Window:
    """Delayed backward passes whose gradients still carry their scale."""

    scaler: Scaler
    version: int
    scale: float
    finite: bool = True


@dataclass
class Account:
    """One optimizer's outcomes."""

    latest: str | None = None
    counts: dict[str, int] = field(default_factory=lambda: {"stepped": 0, "skipped": 0, "idle": 0})

    def add(self, outcome: str) -> None:
        self.latest = outcome
        self.counts[outcome] += 1


@dataclass(eq=False)
class Note:
    """An overflow that an optimizer answers for: in any case, or once one of its gradients has been edited."""

    sure: bool = False
    if_edited: bool = False
