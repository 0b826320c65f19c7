"""Collect: ``out = [out +] new * inv_scale`` over a list, with a check of ``new`` before the multiply.

The program that finishes last moves the loss scaler on by what all have found, if it is to.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from lightning_amp.kernels.tiles import narrow, walk, widen
from lightning_amp.kernels.update_scale import move

SCALE, ADD, WRITE = 1, 2, 4
"""What is done with a new gradient besides the check; flags, to be added up."""


@triton.jit
def _unscale(new, out, at, mask, inv_scale, FLAGS: tl.constexpr):
    """Returns 0 where every new value is finite, NaN where not."""
    value = widen(tl.load(new, mask=mask, other=0.0))
    result = value
    if FLAGS & 1:  # SCALE
        result = result * inv_scale
    if FLAGS & 2:  # ADD
        result += widen(tl.load(out, mask=mask, other=0.0)).to(result.dtype)
    if FLAGS & 4:  # WRITE
        tl.store(out, narrow(result, out.dtype.element_ty), mask=mask)
    return tl.sum((value - value).to(tl.float32))


@triton.jit(
    do_not_specialize=["offset"],
    do_not_specialize_on_alignment=["inv_scale", "first_bad", "state", "loss", "overflowed"],
)
def collect_kernel(
    chunks,
    sizes,
    news,
    outs,
    inv_scale,
    first_bad,
    offset,
    ticket,
    state,
    loss,
    growth_factor,
    backoff_factor,
    growth_interval,
    min_scale,
    max_scale,
    full_hysteresis,
    overflowed,
    MOVE: tl.constexpr,
    LOOK_AT_LOSS: tl.constexpr,
    EXCUSE_LOSS: tl.constexpr,
    DYNAMIC: tl.constexpr,
    TELL: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a chunk.

    Args:
        chunks: int32 ``[programs, 3]``: tensor, chunk of it, its kind.
        sizes: int64 ``[tensors]``: elements of each.
        news: int64 ``[tensors]``: addresses of the new gradients.
        outs: int64 ``[tensors]``: addresses of the results, the same as in ``news`` where in place.
        inv_scale: float32.
        first_bad: int32, lowered to ``offset`` plus the index of the first tensor with a non-finite value.
        offset: Index of the first tensor.
        ticket: int32, scratch; zero before and after.
        state: See `move`, as for all up to ``overflowed``; not touched unless ``MOVE``.
        loss: See there.
        growth_factor: See there.
        backoff_factor: See there.
        growth_interval: See there.
        min_scale: See there.
        max_scale: See there.
        full_hysteresis: See there.
        overflowed: See there.
        MOVE: Whether the last program moves the scaler on.
        LOOK_AT_LOSS: See `move`.
        EXCUSE_LOSS: See `move`.
        DYNAMIC: See `move`.
        TELL: See `move`.
        KINDS: For each kind ``(type of new, type of out, flags)``.
        BLOCK: Elements in a chunk.
    """
    program = tl.program_id(0)
    tensor = tl.load(chunks + program * 3)
    chunk = tl.load(chunks + program * 3 + 1)
    kind = tl.load(chunks + program * 3 + 2)
    factor = tl.load(inv_scale)
    n = tl.load(sizes + tensor)
    new = tl.load(news + tensor)
    out = tl.load(outs + tensor)
    for K in tl.static_range(len(KINDS)):
        if kind == K:
            bad = walk(_unscale, new, out, n, chunk, factor, KINDS[K][0], KINDS[K][1], KINDS[K][2], BLOCK)
            if bad != 0.0:
                tl.atomic_min(first_bad, offset + tensor)
    if MOVE:
        tl.debug_barrier()  # all threads are done, with the old scale too, before the ticket is drawn
        if tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(0) - 1:
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
            tl.store(ticket, 0)
