"""Checked values out of what a checkpoint holds."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the key and says what to do."""


class Reader:
    """Takes checked values out of an entry, and knows where it is when one is damaged.

    Args:
        entry: What was saved.
        where: How messages call it, beginning with its name in the checkpoint.
        without: What becomes of a training that is resumed without that entry.

    Raises:
        CheckpointError: It is no dict; the methods raise it too.
    """

    def __init__(self, entry: Any, where: str, without: str = "loss scales and totals then start anew") -> None:
        self.where, self.without = where, without
        if not isinstance(entry, Mapping):
            raise self.damaged(None, f"is {short(entry)}, and a dict is expected")
        self.entry: Mapping[str, Any] = entry

    def damaged(self, key: str | None, what: str) -> CheckpointError:
        where = self.where if key is None else f"{self.where}[{key!r}]"
        return CheckpointError(
            f"The mixed-precision state of this checkpoint is damaged: {where} {what}. Use another copy of the "
            f"checkpoint, or delete its entry {self.where.split('[')[0]!r}: {self.without}."
        )

    def get(self, key: str) -> Any:
        if key not in self.entry:
            raise self.damaged(key, f"is missing (there are: {', '.join(map(str, self.entry)) or 'none'})")
        return self.entry[key]

    def below(self, key: str) -> "Reader":
        return Reader(self.get(key), f"{self.where}[{key!r}]", self.without)

    def values(self, key: str) -> list[Any]:
        values = self.get(key)
        if not isinstance(values, (list, tuple)):
            raise self.damaged(key, f"is {short(values)}, and a list is expected")
        return list(values)

    def list(self, key: str) -> "list[Reader]":
        return [Reader(v, f"{self.where}[{key!r}][{i}]", self.without) for i, v in enumerate(self.values(key))]

    def number(self, key: str, low: float = 0.0) -> float:
        value = self.get(key)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < math.inf:
            raise self.damaged(key, f"is {short(value)}, and a finite number of at least {low:g} is expected")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value == 0.0:
            raise self.damaged(key, "is 0, and a positive number is expected")
        return value

    def count(self, key: str) -> int:
        value = self.number(key)
        if value != int(value):
            raise self.damaged(key, f"is {value!r}, and a whole number is expected")
        return int(value)


def short(value: Any) -> str:
    """Returns a value as messages show it: its ``repr``, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
