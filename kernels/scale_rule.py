"""The loss scaler's state machine, written once for Python numbers and for tensors alike.

A scale is raised after ``growth_interval`` clean backward passes in a row and lowered on an overflow, as in NVIDIA's
"Mixed Precision Training" (Micikevicius et al., 2018, section 3.2), with a floor, a ceiling and hysteresis. The rule
has no branch on a value: ``where`` decides, so the same lines run on the host (floats) and on a device without a
synchronisation (0-dim tensors), and `next_state` is the definition that every kernel is tested against.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

FIRST_BAD_NONE = 2**31 - 1
"""The value of ``first_bad`` when every gradient was finite (the identity of an integer minimum)."""


@dataclass(frozen=True)
class ScaleRule:
    """How a loss scale moves.

    Attributes:
        dynamic: Whether the scale moves at all. A static scale is checked and its bad steps are skipped just the same.
        growth_factor: Multiplies the scale after ``growth_interval`` clean backward passes in a row.
        backoff_factor: Multiplies the scale on an overflow.
        growth_interval: Clean backward passes in a row before the scale grows.
        min_scale: The scale never goes below this.
        max_scale: The scale never goes above this.
        hysteresis: Overflows tolerated, less one, before the scale is lowered; refilled when the scale grows.
        excuse_loss: Whether an overflow whose loss was itself non-finite leaves the scale where it is: no scale could
            have cured it.
    """

    dynamic: bool = True
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    hysteresis: int = 1
    excuse_loss: bool = True


class ScaleState(NamedTuple):
    """What a scaler remembers; the order is that of the float32 state vector on the device.

    Counts are exact up to 2^24 and stay there.

    Attributes:
        scale: The factor the next loss is multiplied by.
        inv_scale: ``1 / scale``, kept so that no backward pass has to compute it.
        clean: Clean backward passes in a row.
        hysteresis: Overflows left before the scale is lowered.
        overflows: Backward passes so far with a non-finite gradient.
        bad_losses: Those of them whose loss was itself non-finite.
        streak: Backward passes in a row, up to now, with a non-finite gradient.
        lowest: The lowest scale so far.
        highest: The highest scale so far.
        last_bad: Index of the first non-finite gradient of the latest overflow, -1 if there was none.
    """

    scale: Any
    inv_scale: Any
    clean: Any = 0.0
    hysteresis: Any = 1.0
    overflows: Any = 0.0
    bad_losses: Any = 0.0
    streak: Any = 0.0
    lowest: Any = 0.0
    highest: Any = 0.0
    last_bad: Any = -1.0


def initial_state(scale: float, rule: ScaleRule) -> ScaleState:
    """Returns the state of a scaler that has seen nothing yet."""
    return ScaleState(scale, 1.0 / scale, hysteresis=float(rule.hysteresis), lowest=scale, highest=scale)


def _pick(condition: bool, yes: Any, no: Any) -> Any:
    return yes if condition else no


def next_state(
    state: ScaleState,
    first_bad: Any,
    loss_finite: Any,
    rule: ScaleRule,
    where: Callable[[Any, Any, Any], Any] = _pick,
) -> ScaleState:
    """Returns the state after one backward pass (or one delayed window of them).

    Args:
        state: The state before: Python floats, or 0-dim float32 tensors.
        first_bad: Index of the first non-finite gradient, `FIRST_BAD_NONE` if all were finite: an int, or a 0-dim int
            tensor.
        loss_finite: Whether the loss was finite: a bool, or a 0-dim bool tensor.
        rule: The scaler's settings.
        where: ``where(condition, yes, no)`` for the kind of numbers in use (`torch.where` for tensors).

    Returns:
        The next state, of the same kind of numbers.

    Example:
        >>> rule = ScaleRule(growth_interval=1)
        >>> next_state(initial_state(8.0, rule), FIRST_BAD_NONE, True, rule).scale
        16.0
        >>> next_state(initial_state(8.0, rule), 0, True, rule).scale
        4.0
    """
    overflow = first_bad < FIRST_BAD_NONE
    if overflow is False and (not rule.dynamic or state.clean + 1.0 < rule.growth_interval):
        scale, inv_scale, clean, hysteresis, overflows, bad_losses, _, *rest = state
        # The host may leave out what cannot move.
        return ScaleState(scale, inv_scale, clean + 1.0, hysteresis, overflows, bad_losses, 0.0, *rest)
    fault = overflow & loss_finite if rule.excuse_loss else overflow
    clean = where(overflow, 0.0, state.clean + 1.0)
    hysteresis = where(fault, state.hysteresis - 1.0, state.hysteresis)
    hysteresis = where(hysteresis < 0.0, 0.0, hysteresis)
    scale = state.scale
    if rule.dynamic:
        grow = clean >= rule.growth_interval
        grown, lowered = scale * rule.growth_factor, scale * rule.backoff_factor
        grown = where(grown > rule.max_scale, rule.max_scale, grown)
        lowered = where(lowered < rule.min_scale, rule.min_scale, lowered)
        lower = fault & (hysteresis <= 0.0)
        scale = where(lower, lowered, where(grow, grown, scale))
        clean = where(grow, 0.0, clean)
        hysteresis = where(grow, float(rule.hysteresis), hysteresis)
    return ScaleState(
        scale=scale,
        inv_scale=1.0 / scale,
        clean=clean,
        hysteresis=hysteresis,
        overflows=where(overflow, state.overflows + 1.0, state.overflows),
        bad_losses=where(loss_finite, state.bad_losses, where(overflow, state.bad_losses + 1.0, state.bad_losses)),
        streak=where(overflow, state.streak + 1.0, 0.0),
        lowest=where(scale < state.lowest, scale, state.lowest),
        highest=where(scale > state.highest, scale, state.highest),
        last_bad=where(overflow, first_bad * 1.0, state.last_bad),
    )
