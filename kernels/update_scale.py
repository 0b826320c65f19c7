"""Update: the loss scaler's state machine in one program; `lightning_amp.kernels.scale_rule` is its definition."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from lightning_amp.kernels.scale_rule import FIRST_BAD_NONE
from lightning_amp.kernels.tiles import widen

_NONE: tl.constexpr = tl.constexpr(FIRST_BAD_NONE)


@triton.jit
def move(
    state,
    first_bad,
    loss,
    growth_factor,
    backoff_factor,
    growth_interval,
    min_scale,
    max_scale,
    full_hysteresis,
    overflowed,
    LOOK_AT_LOSS: tl.constexpr,
    EXCUSE_LOSS: tl.constexpr,
    DYNAMIC: tl.constexpr,
    TELL: tl.constexpr,
):
    """Moves the state on by one backward pass and clears ``first_bad``; for the only program, or the last.

    Args:
        state: float32 ``[10]``, the fields of `ScaleState` in their order.
        first_bad: int32; read past the L1 cache, since other programs of the launch may have lowered it.
        loss: One floating value, any type.
        growth_factor: float32, and so all that follow: the fields of `ScaleRule`.
        backoff_factor: See there.
        growth_interval: See there.
        min_scale: See there.
        max_scale: See there.
        full_hysteresis: See there.
        overflowed: float32, becomes 1 if this pass overflowed, else 0; not touched unless ``TELL``.
        LOOK_AT_LOSS: Whether there is a loss.
        EXCUSE_LOSS: See `ScaleRule`.
        DYNAMIC: See `ScaleRule`.
        TELL: See ``overflowed``.
    """
    bad = tl.load(first_bad, cache_modifier=".cg")
    scale = tl.load(state)
    clean = tl.load(state + 2)
    hysteresis = tl.load(state + 3)
    overflows = tl.load(state + 4)
    bad_losses = tl.load(state + 5)
    streak = tl.load(state + 6)
    overflow = bad < _NONE
    fault = overflow
    if LOOK_AT_LOSS:
        value = widen(tl.load(loss))
        loss_finite = (value - value) == 0.0
        bad_losses = tl.where(overflow & (loss_finite == 0), bad_losses + 1.0, bad_losses)
        if EXCUSE_LOSS:
            fault = overflow & loss_finite
    clean = tl.where(overflow, 0.0, clean + 1.0)
    hysteresis = tl.maximum(tl.where(fault, hysteresis - 1.0, hysteresis), 0.0)
    if DYNAMIC:
        grow = clean >= growth_interval
        lower = fault & (hysteresis <= 0.0)
        grown = tl.minimum(scale * growth_factor, max_scale)
        lowered = tl.maximum(scale * backoff_factor, min_scale)
        scale = tl.where(lower, lowered, tl.where(grow, grown, scale))
        clean = tl.where(grow, 0.0, clean)
        hysteresis = tl.where(grow, full_hysteresis, hysteresis)
    tl.store(state, scale)
    tl.store(state + 1, tl.div_rn(1.0, scale))
    tl.store(state + 2, clean)
    tl.store(state + 3, hysteresis)
    tl.store(state + 4, tl.where(overflow, overflows + 1.0, overflows))
    tl.store(state + 5, bad_losses)
    tl.store(state + 6, tl.where(overflow, streak + 1.0, 0.0))
    tl.store(state + 7, tl.minimum(tl.load(state + 7), scale))
    tl.store(state + 8, tl.maximum(tl.load(state + 8), scale))
    tl.store(state + 9, tl.where(overflow, bad.to(tl.float32), tl.load(state + 9)))
    if TELL:
        tl.store(overflowed, overflow.to(tl.float32))
    tl.store(first_bad, _NONE)


@triton.jit(do_not_specialize_on_alignment=["state", "first_bad", "loss", "overflowed"])
def update_kernel(
    state,
    first_bad,
    loss,
    growth_factor,
    backoff_factor,
    growth_interval,
    min_scale,
    max_scale,
    full_hysteresis,
    overflowed,
    LOOK_AT_LOSS: tl.constexpr,
    EXCUSE_LOSS: tl.constexpr,
    DYNAMIC: tl.constexpr,
    TELL: tl.constexpr,
):
    """Moves the state on where there is nothing to collect; see `move`."""
    move(
        state,
        first_bad,
        loss,
        growth_factor,
        backoff_factor,
        growth_interval,
        min_scale,
        max_scale,
        full_hysteresis,
        overflowed,
        LOOK_AT_LOSS,
        EXCUSE_LOSS,
        DYNAMIC,
        TELL,
    )
