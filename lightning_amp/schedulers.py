"""A learning-rate scheduler that moves only when its optimizer did."""

from collections.abc import Callable
from typing import Any


class SkipAwareScheduler:
    """Stands in for a scheduler: ``step()`` does nothing if the optimizer was stepped since the last call, in vain.

    Everything else is the scheduler's own; it counts as an instance of the scheduler's class. Where the outcome of a
    step is known to the device alone, it is taken for a real one, and a later call is held back if it was not.

    Args:
        scheduler: The scheduler; nothing is patched on it.
        progress: Gives the optimizer's ``step()`` calls so far, and how many of them moved it, as far as is known.
    """

    def __init__(self, scheduler: Any, progress: Callable[[], tuple[int, int]]) -> None:
        self._scheduler = scheduler
        self._progress = progress
        self._attempts, self._steps = progress()

    __class__ = property(lambda self: type(self._scheduler))  # for isinstance

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_scheduler"], name)

    @property
    def since_last_call(self) -> dict[str, int]:
        """Steps ``tried`` and ``made`` since the last call; -1 made where one was taken for real that was not."""
        attempts, steps = self._progress()
        return {"tried": attempts - self._attempts, "made": steps - self._steps}

    def go_on(self, tried: int, made: int) -> None:
        """Takes up where another left off.

        Args:
            tried: The other's `since_last_call`.
            made: Likewise.
        """
        attempts, steps = self._progress()
        self._attempts, self._steps = attempts - tried, steps - made

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the scheduler, unless its optimizer was stepped since the last call and did not move.

        Args:
            *args: The scheduler's own.
            **kwargs: Likewise.
        """
        attempts, steps = self._progress()
        held = attempts > self._attempts and steps <= self._steps
        self._attempts, self._steps = attempts, max(steps, self._steps)
        if not held:
            self._scheduler.step(*args, **kwargs)
