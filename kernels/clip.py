"""Clip: scales a list to a norm, or clamps it to a value, by what `read` left on the device."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from lightning_amp.kernels.tiles import narrow, walk, widen


@triton.jit
def _scale(grad, again, at, mask, coefficient, FLAGS: tl.constexpr):
    value = widen(tl.load(grad, mask=mask, other=0.0)) * coefficient
    tl.store(grad, narrow(value, grad.dtype.element_ty), mask=mask)
    return 0


@triton.jit
def _clamp(grad, again, at, mask, bound, FLAGS: tl.constexpr):
    value = widen(tl.load(grad, mask=mask, other=0.0))
    bound = bound.to(value.dtype)
    if tl.max(tl.abs(value)) > bound:
        value = tl.minimum(tl.maximum(value, -bound), bound)
        tl.store(grad, narrow(value, grad.dtype.element_ty), mask=mask)
    return 0


@triton.jit(do_not_specialize_on_alignment=["reading"])
def clip_kernel(chunks, sizes, grads, reading, bound, BY_VALUE: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr):
    """One program a chunk. Where there is nothing to clip, no gradient is touched.

    Args:
        chunks: int32 ``[programs, 3]``: tensor, chunk of it, its kind.
        sizes: int64 ``[tensors]``: elements of each.
        grads: int64 ``[tensors]``: their addresses.
        reading: float32: the norm, or found_inf where clipping by value.
        bound: float32: the largest norm, or the largest value.
        BY_VALUE: Which of the two.
        KINDS: The element type of each kind.
        BLOCK: Elements in a chunk.
    """
    program = tl.program_id(0)
    tensor = tl.load(chunks + program * 3)
    chunk = tl.load(chunks + program * 3 + 1)
    kind = tl.load(chunks + program * 3 + 2)
    found = tl.load(reading)
    n = tl.load(sizes + tensor)
    grad = tl.load(grads + tensor)
    if BY_VALUE:
        wanted = found == 0.0
        factor = bound
    else:
        factor = tl.div_rn(bound, found + 1e-6)
        wanted = (factor > 0.0) & (factor < 1.0)  # an infinite norm gives 0, a NaN neither
    if wanted:
        for K in tl.static_range(len(KINDS)):
            if kind == K:
                if BY_VALUE:
                    walk(_clamp, grad, grad, n, chunk, factor, KINDS[K], KINDS[K], 0, BLOCK)
                else:
                    walk(_scale, grad, grad, n, chunk, factor, KINDS[K], KINDS[K], 0, BLOCK)
