"""The alarm: tells a person what the numbers mean when steps are skipped, or never have anything to do."""

import logging
import warnings
from collections.abc import Callable, Iterable

from torch import Tensor

from lightning_amp.loss_scaler import LossScaler, LossScalers
from lightning_amp.outcomes import Outcome, OutcomeRecord

log = logging.getLogger(__name__)

IDLE_STEPS = 50
"""Idle steps in a row after which an optimizer is pointed out."""

FLOOR_CHECK_EVERY = 10
"""Skips in a row between two looks at whether a scale is at its floor (a look is a host synchronisation)."""


class TrainingDivergedError(RuntimeError):
    """An optimizer skipped more steps in a row than are allowed: no loss scale will cure that."""


class Alarm:
    """Watches the outcomes of a training's optimizers.

    Args:
        limit: Skips in a row after which `TrainingDivergedError` is raised, or None for never.
        scalers: Whose states tell the cause.
        name_of: Gives a parameter's name.
        say: Prints a calm line.
    """

    def __init__(
        self,
        limit: int | None,
        scalers: LossScalers,
        name_of: Callable[[Tensor], str],
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._limit = limit
        self._scalers = scalers
        self._name_of = name_of
        self._say = say
        self._told: set[str] = set()

    def hear(self, name: str, record: OutcomeRecord, params: Iterable[Tensor]) -> None:
        """Looks at an optimizer's outcomes after a step; costs nothing while it steps.

        Args:
            name: How messages call the optimizer.
            record: Its outcomes so far.
            params: Its parameters.

        Raises:
            TrainingDivergedError: It skipped ``limit`` steps in a row.
        """
        outcome, streak = record.known_streak
        if outcome is Outcome.SKIPPED:
            self._hear_skip(name, streak)
        elif outcome is Outcome.IDLE and streak >= IDLE_STEPS and self._once(f"idle {name}"):
            params = list(params)
            trainable = sum(p.requires_grad for p in params)
            warnings.warn(
                f"{name} had nothing to do in {streak} steps in a row: 0 of its {len(params)} parameters had a "
                f"gradient ({trainable} require one). Does its loss reach them, or was something detached?",
                stacklevel=2,
            )

    def _hear_skip(self, name: str, streak: int) -> None:
        if self._once("skip"):
            self._say(
                f"{name} skipped a step: a gradient was non-finite at this loss scale. A few of these are normal while "
                "a dynamic scale settles."
            )
        if streak % FLOOR_CHECK_EVERY == 0:
            for scaler in self._scalers:
                scale = scaler.read().scale
                if scaler.rule.dynamic and scale <= scaler.rule.min_scale and self._once(f"floor {scaler.name}"):
                    warnings.warn(
                        f"The scale of {scaler.name} is at its floor, {scale:g}, and gradients are still non-finite. "
                        f"{self.cause(scaler)}",
                        stacklevel=2,
                    )
        if self._limit is not None and streak >= self._limit:
            worst = max(self._scalers, key=lambda s: s.read().streak, default=None)
            raise TrainingDivergedError(
                f"{name} skipped {streak} steps in a row. {self.cause(worst)} Look for a division by zero, a log or a "
                "square root at zero, or an activation beyond the range of half; train that part in float32 or "
                "bfloat16. max_consecutive_skips sets this limit, or turns it off."
            )

    def cause(self, scaler: LossScaler | None) -> str:
        """Returns a sentence on why a scaler's latest backward passes overflowed; one host synchronisation.

        Args:
            scaler: The scaler, or None where none is to blame.
        """
        state = None if scaler is None else scaler.read()
        if scaler is None or state is None or not state.streak:
            return "No backward pass produced a non-finite gradient: it came from an edit, or from a plain backward()."
        index = int(state.last_bad)
        where = self._name_of(scaler.sources[index]) if 0 <= index < len(scaler.sources) else "unknown"
        bad, overflows = state.bad_losses, state.overflows
        loss = (
            "the loss was finite"
            if not bad
            else "the loss itself was non-finite"
            if bad == overflows
            else f"the loss itself was non-finite in {bad:.0f} of {overflows:.0f} overflows so far"
        )
        passes = "last backward pass" if state.streak == 1 else f"last {state.streak:.0f} backward passes"
        return (
            f"The {passes} of {scaler.name} overflowed (scale now {state.scale:g}); the first parameter with a "
            f"non-finite gradient was {where}, and {loss}."
        )

    def causes(self) -> list[str]:
        """Returns a sentence for each scaler whose latest backward pass overflowed; one host synchronisation each."""
        return [self.cause(scaler) for scaler in self._scalers if scaler.read().streak]

    def _once(self, topic: str) -> bool:
        new = topic not in self._told
        self._told.add(topic)
        return new
