"""Refresh: masters into half weights. Adopt: edits of half weights into masters."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from lightning_amp.kernels.tiles import narrow, walk


@triton.jit
def _mark(half, at, mask):
    """Returns a fingerprint of half values: two 32-bit sums over their bits, mixed with where they stand.

    One edited value always changes the first sum, since the mixing is one-to-one. Several edits would have to cancel
    in both sums at once: one chance in 2^64.
    """
    bits = half.to(tl.uint16, bitcast=True).to(tl.uint32)
    z = bits + at.to(tl.uint32) * 0x9E3779B1
    z = (z ^ (z >> 15)) * 0x85EBCA77
    z = tl.where(mask, z ^ (z >> 13), 0)
    low = tl.sum(z).to(tl.int64)
    high = tl.sum(z * z).to(tl.int64)
    return (high << 32) + low


@triton.jit
def _round(half, master, at, mask, factor, FLAGS: tl.constexpr):
    value = narrow(tl.load(master, mask=mask, other=0.0), half.dtype.element_ty)
    tl.store(half, value, mask=mask)
    return _mark(value, at, mask)


@triton.jit
def _look(half, master, at, mask, factor, FLAGS: tl.constexpr):
    return _mark(tl.load(half, mask=mask, other=0.0), at, mask)


@triton.jit
def _take_over(half, master, at, mask, factor, FLAGS: tl.constexpr):
    new = tl.load(half, mask=mask, other=0.0)
    old = tl.load(master, mask=mask, other=0.0)
    edited = new != narrow(old, half.dtype.element_ty)
    if tl.max(edited.to(tl.int32)) > 0:
        tl.store(master, tl.where(edited, new.to(old.dtype), old), mask=mask)
    return 0


@triton.jit
def refresh_kernel(chunks, sizes, halves, masters, marks, KINDS: tl.constexpr, BLOCK: tl.constexpr):
    """``half = round(master)``; one program a chunk, which leaves the fingerprint of what it wrote.

    Args:
        chunks: int32 ``[programs, 3]``: tensor, chunk of it, its kind.
        sizes: int64 ``[tensors]``: elements of each.
        halves: int64 ``[tensors]``: addresses of the half weights.
        masters: int64 ``[tensors]``: addresses of their masters.
        marks: int64 ``[programs]``: the fingerprints.
        KINDS: For each kind ``(type of half, type of master)``.
        BLOCK: Elements in a chunk.
    """
    program = tl.program_id(0)
    tensor = tl.load(chunks + program * 3)
    chunk = tl.load(chunks + program * 3 + 1)
    kind = tl.load(chunks + program * 3 + 2)
    n = tl.load(sizes + tensor)
    half = tl.load(halves + tensor)
    master = tl.load(masters + tensor)
    for K in tl.static_range(len(KINDS)):
        if kind == K:
            mark = walk(_round, half, master, n, chunk, 0, KINDS[K][0], KINDS[K][1], 0, BLOCK)
            tl.store(marks + program, mark)


@triton.jit
def adopt_kernel(chunks, sizes, halves, masters, marks, KINDS: tl.constexpr, BLOCK: tl.constexpr):
    """``master = where(half == round(master), master, half)``; one program a chunk.

    Where the half weights still bear the fingerprint that `refresh_kernel` left, nobody has edited them, and the
    master is not even read.

    Args:
        chunks: int32 ``[programs, 3]``: tensor, chunk of it, its kind.
        sizes: int64 ``[tensors]``: elements of each.
        halves: int64 ``[tensors]``: addresses of the half weights.
        masters: int64 ``[tensors]``: addresses of their masters.
        marks: int64 ``[programs]``: the fingerprints; zero, which none is likely to be, before there are any.
        KINDS: For each kind ``(type of half, type of master)``.
        BLOCK: Elements in a chunk.
    """
    program = tl.program_id(0)
    tensor = tl.load(chunks + program * 3)
    chunk = tl.load(chunks + program * 3 + 1)
    kind = tl.load(chunks + program * 3 + 2)
    mark = tl.load(marks + program)
    n = tl.load(sizes + tensor)
    half = tl.load(halves + tensor)
    master = tl.load(masters + tensor)
    for K in tl.static_range(len(KINDS)):
        if kind == K:
            seen = walk(_look, half, master, n, chunk, 0, KINDS[K][0], KINDS[K][1], 0, BLOCK)
            if seen != mark:
                walk(_take_over, half, master, n, chunk, 0, KINDS[K][0], KINDS[K][1], 0, BLOCK)
