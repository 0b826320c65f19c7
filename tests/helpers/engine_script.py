"""The words that the stateful test is made of: a training, a loss, a backward pass."""

from dataclasses import dataclass, replace

LATE = "late"
"""The parameter that joins an optimizer in the middle of a training and is in no module."""


@dataclass(frozen=True)
class Setup:
    """One training: its level, its scalers, and who owns which parameter."""

    level: str
    loss_scale: str | float
    init_scale: float
    growth_interval: int
    growth_factor: float
    hysteresis: int
    min_scale: float
    max_scale: float
    kinds: tuple[str, ...]
    owners: tuple[tuple[str, ...], ...]
    kept: int | None
    joint: bool
    region: bool
    cache_casts: bool | str

    def at(self, level: str) -> "Setup":
        """Returns the same at another level."""
        return replace(self, level=level)


@dataclass(frozen=True)
class Term:
    """One network's part of a loss: ``sum(c * net(x))``."""

    net: int
    x: tuple[float, float]
    c: tuple[float, float]


@dataclass(frozen=True)
class Loss:
    """A sum of terms, linear in the weights, with at most one fault in it.

    ``poison``: ``"x inf"`` and ``"x nan"`` are in the first term's input, ``"dy"`` and ``"dw"`` in the gradient of its
    output and of its weight, ``"loss * inf"`` and ``"loss + nan"`` in the loss. ``half``: its dtype is float16.
    """

    terms: tuple[Term, ...]
    poison: str | None = None
    half: bool = False

    @property
    def finite(self) -> bool:
        return self.poison in (None, "dy", "dw")


@dataclass(frozen=True)
class Pass:
    """One backward pass: how its scaler is named ("id 0", "named" by optimizers, "walk"), and autograd's options."""

    how: str = "walk"
    delay: bool = False
    first_weight_only: bool = False
    create_graph: bool = False

    @property
    def loss_id(self) -> int | None:
        return int(self.how[-1]) if self.how.startswith("id") else None

    def inputs(self, loss: Loss) -> str | None:
        """Returns the one parameter that is to get a gradient, None for all."""
        return f"{loss.terms[0].net}.weight" if self.first_weight_only and loss.terms[0].net != 3 else None
