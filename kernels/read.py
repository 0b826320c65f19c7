"""Read: finiteness and 2-norm of a list, in one pass that writes nothing but the result."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from lightning_amp.kernels.tiles import walk, widen

PROGRAMS = 2048
"""The most programs of one read: each takes every `PROGRAMS`-th chunk, the last to finish adds up what all found."""

_PROGRAMS: tl.constexpr = tl.constexpr(PROGRAMS)


SMALL = 2.0**-96
"""What values are multiplied by whose squares overflow float32: then they do not, and none that counts underflows."""

_SMALL: tl.constexpr = tl.constexpr(SMALL)


@triton.jit
def _square(grad, again, at, mask, factor, FLAGS: tl.constexpr):
    """Returns the sum of squares: inf where only that overflows, NaN where a value is non-finite."""
    value = widen(tl.load(grad, mask=mask, other=0.0))
    return tl.sum((value - value) + value * value).to(FLAGS)


@triton.jit
def _small_squares(chunks, count, sizes, grads, ACC: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the sum of the squares of all values, each times `SMALL`; in small tiles, for the sake of registers."""
    total = tl.zeros((), ACC)
    each = count * 0
    while each < count:
        tensor = tl.load(chunks + each * 3)
        start = tl.load(chunks + each * 3 + 1).to(tl.int64) * BLOCK
        kind = tl.load(chunks + each * 3 + 2)
        end = tl.minimum(tl.load(sizes + tensor), start + BLOCK)
        grad = tl.load(grads + tensor)
        while start < end:
            at = start + tl.arange(0, 128)
            for K in tl.static_range(len(KINDS)):
                if kind == K:
                    value = tl.load(grad.to(tl.pointer_type(KINDS[K])) + at, mask=at < end, other=0.0)
                    value = widen(value) * _SMALL
                    total += tl.sum(value * value).to(ACC)
            start += 128
        each += 1
    return total


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["also"])
def read_kernel(
    chunks,
    count,
    sizes,
    grads,
    partials,
    ticket,
    result,
    also,
    ALSO: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the norm and whether any value is non-finite.

    The order of all sums is fixed by the sizes and the alignment of the tensors: the norm of the same numbers there
    never changes, whatever the device.

    Args:
        chunks: int32 ``[count, 3]``: tensor, chunk of it, its kind.
        count: How many chunks there are.
        sizes: int64 ``[tensors]``: elements of each.
        grads: int64 ``[tensors]``: their addresses.
        partials: ``[PROGRAMS]``, scratch; float64 where a gradient is, else float32.
        ticket: int32, scratch; zero before and after.
        result: float32 ``[3]``: norm, found_inf, and found_inf of the gradients alone.
        also: float32, the least that found_inf becomes; not looked at unless ``ALSO``.
        ALSO: See there.
        KINDS: The element type of each kind.
        BLOCK: Elements in a chunk.
    """
    program = tl.program_id(0)
    ACC: tl.constexpr = partials.dtype.element_ty
    DOUBLE: tl.constexpr = ACC == tl.float64  # noqa: SIM300
    total = tl.zeros((), ACC)
    each = program
    while each < count:
        tensor = tl.load(chunks + each * 3)
        chunk = tl.load(chunks + each * 3 + 1)
        kind = tl.load(chunks + each * 3 + 2)
        n = tl.load(sizes + tensor)
        grad = tl.load(grads + tensor)
        for K in tl.static_range(len(KINDS)):
            if kind == K:
                total += walk(_square, grad, grad, n, chunk, 0, KINDS[K], KINDS[K], ACC, BLOCK)
        each += _PROGRAMS
    tl.store(partials + program, total)
    tl.debug_barrier()  # the partial is out before the ticket is drawn
    programs = tl.num_programs(0)
    if tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1:
        at = tl.arange(0, _PROGRAMS)
        square = tl.sum(tl.load(partials + at, mask=at < programs, other=0.0, cache_modifier=".cg"))
        if square == float("inf"):  # so rare that the one program may go through all of it alone
            square = _small_squares(chunks, count, sizes, grads, ACC, KINDS, BLOCK)
            unit = tl.full((), 1 / _SMALL, ACC)
        else:
            unit = tl.full((), 1.0, ACC)
        if DOUBLE:
            tl.store(result, (tl.sqrt(square) * unit).to(tl.float32))
        else:
            tl.store(result, tl.sqrt_rn(square) * unit)
        found = (square != square).to(tl.float32)
        tl.store(result + 2, found)
        if ALSO:
            found = tl.maximum(found, tl.load(also))
        tl.store(result + 1, found)
        tl.store(ticket, 0)
