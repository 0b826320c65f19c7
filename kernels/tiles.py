"""How a program walks its chunk of a tensor in 16-byte accesses; every kernel over lists is built on `walk`.

A list of tensors reaches a kernel as a row of addresses, one int64 each, which the compiler knows nothing about. It
moves 16 bytes a thread all the same where three things hold: the pointer itself carries the alignment hint (one on the
integer is lost in the cast), the mask's bound is a multiple of the vector length, and the offset is the program's own
chunk number times a constant. So the elements before the first aligned address, and those behind the last whole vector,
are peeled off into a tile of their own, which the program of chunk 0 handles. Two lists whose addresses cannot be
aligned at once take a third, scalar tile.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import os

import triton
import triton.language as tl

CHUNK = 2048
"""Elements that one program handles."""

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in Triton's interpreter: on the CPU, slowly, for tests."""

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def narrow(x, T: tl.constexpr):
    """Rounds to the nearest value of type ``T``, ties to even."""
    if _INTERPRETED and tl.bfloat16 == T:  # the interpreter cuts the low bits off instead
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(T)


@triton.jit
def widen(x):
    """Returns the values in the type they are computed in: float64 stays, all others become float32."""
    if x.dtype == tl.float64:
        return x
    elif _INTERPRETED and x.dtype == tl.bfloat16:  # the interpreter makes zeros of subnormal numbers
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def walk(
    FN: tl.constexpr,
    a,
    b,
    n,
    chunk,
    factor,
    A: tl.constexpr,
    B: tl.constexpr,
    FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Applies ``FN`` to one chunk of two tensors in step, and returns the sum of what it returns.

    Args:
        FN: ``FN(pointers into a, pointers into b, positions in the tile, mask, factor, FLAGS)``, returns a scalar.
        a: Address of the first tensor.
        b: Address of the second, which may be the first again.
        n: Elements in each.
        chunk: Which chunk of them.
        factor: A scalar handed through.
        A: Element type of the first tensor.
        B: Element type of the second, at least as wide.
        FLAGS: Handed through.
        BLOCK: Elements in a chunk.
    """
    SIZE_A: tl.constexpr = A.primitive_bitwidth // 8
    SIZE_B: tl.constexpr = B.primitive_bitwidth // 8
    V: tl.constexpr = 16 // SIZE_B
    head = tl.minimum((16 - b % 16) % 16 // SIZE_B, n)
    body = (n - head) // V * V
    start = chunk.to(tl.int64) * BLOCK
    if (a + head * SIZE_A) % (V * SIZE_A) + (b + head * SIZE_B) % 16 == 0:
        at = tl.arange(0, BLOCK)
        first_a = (a + (head + start) * SIZE_A).to(tl.pointer_type(A))
        first_b = (b + (head + start) * SIZE_B).to(tl.pointer_type(B))
        first_a = tl.multiple_of(first_a, V * SIZE_A)
        first_b = tl.multiple_of(first_b, 16)
        result = FN(first_a + at, first_b + at, at, at < body - start, factor, FLAGS)
        if chunk == 0:
            edge = tl.arange(0, 2 * V)
            where = tl.where(edge < head, edge, edge + body)
            edge_a = a.to(tl.pointer_type(A)) + where
            edge_b = b.to(tl.pointer_type(B)) + where
            result += FN(edge_a, edge_b, BLOCK + edge, where < n, factor, FLAGS)
    else:
        # Another shape of tile, or this branch would share its layout with the first and force a conversion on it.
        cell = tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
        plain_a = (a + start * SIZE_A).to(tl.pointer_type(A)) + cell
        plain_b = (b + start * SIZE_B).to(tl.pointer_type(B)) + cell
        result = FN(plain_a, plain_b, cell, cell < n - start, factor, FLAGS)
    return result
