"""What became of each optimizer's steps, and of each loss: plain data, read no earlier than somebody asks."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Outcome(str, Enum):
    """What one ``step()`` did.

    ``STEPPED``: weights moved. ``SKIPPED``: a gradient was non-finite, nothing moved. ``IDLE``: no parameter had a
    gradient, nothing moved.
    """

    STEPPED = "stepped"
    SKIPPED = "skipped"
    IDLE = "idle"


@dataclass(frozen=True)
class LossAccount:
    """What one loss scale has been through.

    Attributes:
        attempts: Backward passes (windows, where delayed).
        overflows: Those with a non-finite gradient.
        nonfinite_losses: Those of them whose loss was itself non-finite.
        scale: The scale now.
        lowest: The lowest so far.
        highest: The highest so far.
    """

    attempts: int
    overflows: int
    nonfinite_losses: int
    scale: float
    lowest: float
    highest: float


class OutcomeRecord:
    """The outcomes of one optimizer: the latest, and how many there were of each.

    An outcome that only the device knows is copied to the host in the background and read when somebody asks, or when
    the next one arrives.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(Outcome, 0)
        self._latest: Outcome | None = None
        self._streak = 0
        self._calls = 0
        self._moves = 0
        self._deferred: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def add(self, outcome: Outcome) -> None:
        """Records an outcome that the host knows."""
        if self._deferred is not None:
            self.settle()
        self._counts[outcome] += 1
        self._calls += 1
        self._moves += outcome is Outcome.STEPPED
        self._streak = self._streak + 1 if outcome is self._latest else 1
        self._latest = outcome

    def defer(self, found_inf: Tensor) -> None:
        """Records an outcome that the device knows: no synchronisation.

        What a CUDA graph captures is not recorded: a replay runs no Python.

        Args:
            found_inf: 0-dim, zero if the optimizer stepped.
        """
        if found_inf.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self.settle()
        if found_inf.is_cuda:
            self._deferred = torch.empty((), dtype=found_inf.dtype, pin_memory=True)
            self._deferred.copy_(found_inf, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        else:
            self._deferred = found_inf

    def settle(self) -> None:
        """Reads an outcome that was left to the device; waits for it there."""
        if self._deferred is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        found, self._deferred, self._copied = self._deferred, None, None
        self.add(Outcome.SKIPPED if found.tolist() else Outcome.STEPPED)

    @property
    def latest(self) -> Outcome | None:
        """The latest outcome, None before the first step; waits for the device where it alone knows it."""
        self.settle()
        return self._latest

    @property
    def counts(self) -> dict[Outcome, int]:
        """How often each outcome occurred; waits for the device as `latest` does."""
        self.settle()
        return dict(self._counts)

    @property
    def known_streak(self) -> tuple[Outcome | None, int]:
        """The latest outcome the host knows, and how many of its kind there were in a row; waits for nothing."""
        return self._latest, self._streak

    @property
    def progress(self) -> tuple[int, int]:
        """Calls of ``step()`` on this object so far, and how many of them moved weights; waits for nothing.

        An outcome that only the device knows counts as a move until it is known not to be one.
        """
        unknown = int(self._deferred is not None)
        return self._calls + unknown, self._moves + unknown

    def state_dict(self) -> dict[str, Any]:
        """Returns the totals by the outcome's value, the latest outcome and its streak; waits as `latest` does."""
        self.settle()
        latest = None if self._latest is None else self._latest.value
        return {**{o.value: n for o, n in self._counts.items()}, "latest": latest, "streak": self._streak}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave.

        Args:
            state: The totals at least; without the latest outcome there is none yet.
        """
        self.settle()
        self._counts = {outcome: int(state[outcome.value]) for outcome in Outcome}
        latest = state.get("latest")
        self._latest = None if latest is None else Outcome(latest)
        self._streak = int(state.get("streak", 0))
