"""What became of each optimizer's steps: plain data, read no earlier than somebody asks."""

from enum import Enum

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


class OutcomeRecord:
    """The outcomes of one optimizer: the latest, and how many there were of each.

    An outcome that only the device knows is copied to the host in the background and read when somebody asks, or when
    the next one arrives.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(Outcome, 0)
        self._latest: Outcome | None = None
        self._deferred: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def add(self, outcome: Outcome) -> None:
        """Records an outcome that the host knows."""
        self._settle()
        self._counts[outcome] += 1
        self._latest = outcome

    def defer(self, found_inf: Tensor) -> None:
        """Records an outcome that the device knows: no synchronisation.

        Args:
            found_inf: 0-dim, zero if the optimizer stepped.
        """
        self._settle()
        if found_inf.is_cuda:
            self._deferred = torch.empty((), dtype=found_inf.dtype, pin_memory=True)
            self._deferred.copy_(found_inf, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        else:
            self._deferred = found_inf

    def _settle(self) -> None:
        if self._deferred is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        found, self._deferred, self._copied = self._deferred, None, None
        self.add(Outcome.SKIPPED if found.tolist() else Outcome.STEPPED)

    @property
    def latest(self) -> Outcome | None:
        """The latest outcome, None before the first step; waits for the device where it alone knows it."""
        self._settle()
        return self._latest

    @property
    def counts(self) -> dict[Outcome, int]:
        """How often each outcome occurred; waits for the device as `latest` does."""
        self._settle()
        return dict(self._counts)

    def load_counts(self, counts: dict[str, int]) -> None:
        """Takes over totals that were saved, by the outcome's value.

        Args:
            counts: As ``{outcome.value: n}``; names that are not outcomes are ignored.
        """
        self._settle()
        self._counts = {outcome: int(counts.get(outcome.value, 0)) for outcome in Outcome}
