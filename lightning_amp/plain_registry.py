"""The plain-PyTorch trainings of this process, and how one is found from its models and optimizers."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lightning_amp.plain_training import PlainTraining


def listed(given: Any) -> list[Any]:
    """Returns what was given as a list: its items if it is a list or a tuple, else the thing alone."""
    return list(given) if isinstance(given, (list, tuple)) else [given]


class Trainings:
    """The trainings under way, in the order of their `amp.initialize`; models and optimizers keep them alive."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[PlainTraining]] = []
        self.left_alone: list[Callable[[], Any]] = []
        """References to the optimizers that came with ``enabled=False``."""

    def add(self, training: PlainTraining) -> None:
        """Adds a training; it is held weakly."""
        self._refs.append(weakref.ref(training))

    def leave_alone(self, optimizers: Sequence[Any]) -> None:
        """Notes optimizers for which every call is to do nothing."""
        self.left_alone += map(_reference, optimizers)

    def alive(self) -> list[PlainTraining]:
        """Returns those that were neither ended nor dropped."""
        found = [training for ref in self._refs if (training := ref()) is not None and not training.ended]
        self._refs = [weakref.ref(training) for training in found]
        return found

    def beside(self, training: PlainTraining) -> list[PlainTraining]:
        """Returns the others under way in a training's thread; those of other threads run passes of their own."""
        return [other for other in self.alive() if other is not training and other.thread == training.thread]

    def refuse_used(self, things: Sequence[Any]) -> None:
        """Refuses models and optimizers that are of a training already.

        Args:
            things: Models and optimizers.

        Raises:
            ValueError: One is.
        """
        for training in self.alive():
            for thing in things:
                if training.owns(thing):
                    raise ValueError(
                        f"{type(thing).__name__} was given to amp.initialize before. Give each model and optimizer to "
                        "it once, all that train together in one call, or end that training with amp.deinitialize()."
                    )

    def find(self, optimizers: Any) -> PlainTraining | None:
        """Returns the training of one optimizer or several, None where ``enabled=False``.

        Args:
            optimizers: An optimizer or a list of them.

        Raises:
            RuntimeError: One is of no training.
            ValueError: They are of several.
        """
        named = listed(optimizers)
        for training in reversed(self.alive()):
            owned = [training.owns(optimizer) for optimizer in named]
            if owned and all(owned):
                return training
            if any(owned):
                stranger, mine = named[owned.index(False)], named[owned.index(True)]
                raise ValueError(
                    f"This {type(stranger).__name__} and this {type(mine).__name__} were not given to the same "
                    "amp.initialize. Give all optimizers that share a loss to one call."
                )
        if named and all(map(self._is_left_alone, named)):
            return None
        what = type(named[0]).__name__ if named else "empty list of optimizers"
        raise RuntimeError(
            f"amp.initialize has not seen this {what}. Call "
            "model, optimizer = amp.initialize(model, optimizer, ...) first, and use the optimizer that it returns."
        )

    def _is_left_alone(self, optimizer: Any) -> bool:
        self.left_alone = [ref for ref in self.left_alone if ref() is not None]
        groups = getattr(optimizer, "param_groups", None)
        return groups is not None and any(ref().param_groups is groups for ref in self.left_alone)

    def chosen(self, optimizers: Any) -> PlainTraining | None:
        """Returns the training of these optimizers, or the latest one where they are None.

        Args:
            optimizers: An optimizer, a list of them, or None.

        Raises:
            RuntimeError: As `find`.
            ValueError: As `find`.
        """
        if optimizers is not None:
            return self.find(optimizers)
        alive = self.alive()
        return alive[-1] if alive else None


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # a class with slots
        return lambda: thing


trainings = Trainings()
