"""Each kernel against float64, at awkward sizes, offsets, types and values.

The file runs as it stands with the reference, and once more in Triton's interpreter (see test_interpreter.py).
"""

import copy
import math
import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor

from lightning_amp import kernels
from lightning_amp.kernels.scale_rule import FIRST_BAD_NONE, ScaleRule, ScaleState, initial_state, next_state

CPU = torch.device("cpu")
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
SIZES = (0, 1, 5, 17, 1000, 1024, 2050, 4097)
SMALL = (3, 40, 0, 2050)
OFFSETS = (0, 1, 3, 4, 8)
BAD = (math.inf, -math.inf, math.nan)
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-22, torch.float64: 2**-22}

ops = kernels.backend(CPU)


def draw(sizes: Sequence[int], dtype: torch.dtype, offset: int = 0) -> list[Tensor]:
    """Returns random tensors that start ``offset`` elements behind an aligned address."""
    return [torch.randn(n + offset).to(dtype)[offset:] for n in sizes]


def doubles(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.to(torch.float64, copy=True) for t in tensors]


def check(found: Sequence[Tensor], wanted: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Compares with float64 results, to the rounding of the type that each result is to have."""
    for got, want, dtype in zip(found, wanted, dtypes, strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), want, rtol=ROUNDING[dtype], atol=1e-7, equal_nan=True)


def types(tensors: Sequence[Tensor]) -> list[torch.dtype]:
    return [t.dtype for t in tensors]


def first_bad(value: int = FIRST_BAD_NONE) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


INV = torch.tensor(1 / 96)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("widen", "in_place"), [(True, True), (True, False), (False, True), (False, False)])
def test_collect_unscales(dtype: torch.dtype, widen: bool, in_place: bool) -> None:
    new = [*draw(SIZES, dtype), torch.randn(()).to(dtype)]
    before = doubles(new)
    bad = first_bad()
    out = ops.collect(new, [None] * len(new), INV, bad, widen=widen, in_place=in_place)
    wide = widen and dtype in HALVES
    check(out, [g * INV.double() for g in before], [torch.float32 if wide else dtype] * len(new))
    assert bad.item() == FIRST_BAD_NONE
    if in_place and not wide:
        assert all(a is b for a, b in zip(out, new, strict=True))
    else:
        check(new, before, types(new))


@pytest.mark.parametrize("offset", OFFSETS[1:])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_collect_at_misaligned_addresses(dtype: torch.dtype, offset: int) -> None:
    new = draw(SMALL, dtype, offset)
    wanted = [g * INV.double() for g in doubles(new)]
    check(ops.collect(new, [None] * len(new), INV, first_bad(), widen=False), wanted, [dtype] * 4)


@pytest.mark.parametrize(("here", "there"), [(0, 0), (2, 1), (3, 0), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_collect_adds_to_what_is_there(dtype: torch.dtype, here: int, there: int) -> None:
    new, old = draw(SMALL, dtype, here), draw(SMALL, torch.float32, there)
    into: list[Tensor | None] = [old[0], None, *old[2:]]
    wanted = [g * INV.double() + (0 if i == 1 else old[i].double()) for i, g in enumerate(doubles(new))]
    out = ops.collect(new, into, INV, first_bad())
    check(out, wanted, [torch.float32] * 4)
    assert all(o is t for o, t in zip(out, into, strict=True) if t is not None)


def test_collect_without_a_scale_leaves_values_as_they_are() -> None:
    new = [t for dtype in DTYPES for t in draw(SMALL, dtype)]
    before = doubles(new)
    out = ops.collect(new, [None] * len(new), None, first_bad())
    check(out, before, [torch.float32 if g.dtype in HALVES else g.dtype for g in new])
    same = ops.collect(out, [None] * len(out), None, first_bad())
    assert all(a is b for a, b in zip(same, out, strict=True))
    check(same, before, types(out))


def test_collect_takes_a_mixed_list_in_one_call() -> None:
    new = [t for dtype in (*DTYPES, torch.float32) for t in draw((7, 2051), dtype)]
    old = [None, torch.randn(2051), None, None, torch.randn(7), None, None, torch.randn(2051).double(), None, None]
    wanted = [g * INV.double() + (0 if t is None else t.double()) for g, t in zip(doubles(new), old, strict=True)]
    full, double = torch.float32, torch.float64
    check(ops.collect(new, old, INV, first_bad()), wanted, [*[full] * 6, double, double, full, full])


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_collect_finds_the_first_bad_tensor(dtype: torch.dtype, value: float) -> None:
    for tensor, place in [(1, 0), (2, 39), (3, 2049), (3, 1024)]:
        new = draw((0, 1, 40, 2050), dtype)
        new[tensor][place] = value
        bad = first_bad()
        ops.collect(new, [None] * 4, INV, bad, offset=100)
        assert bad.item() == 100 + tensor


def test_collect_keeps_an_earlier_bad_index() -> None:
    new = draw(SMALL, torch.float32)
    for i in (1, 3):
        new[i][0] = math.nan
    bad = first_bad()
    ops.collect([g.clone() for g in new], [None] * 4, INV, bad, offset=10)
    assert bad.item() == 11
    ops.collect(new, [None] * 4, INV, bad, offset=20)
    assert bad.item() == 11


def test_collect_checks_before_it_multiplies() -> None:
    huge = torch.full((9,), 1e30)
    bad = first_bad()
    (out,) = ops.collect([huge], [None], torch.tensor(1e30), bad)
    assert bool(out.isinf().all())
    assert bad.item() == FIRST_BAD_NONE
    (out,) = ops.collect([torch.full((9,), math.inf)], [None], torch.tensor(0.0), bad)
    assert bad.item() == 0


@pytest.mark.parametrize("value", BAD)
def test_collect_does_not_report_what_was_there_already(value: float) -> None:
    new, old = draw(SMALL, torch.float16), draw(SMALL, torch.float32)
    old[1][3] = value
    bad = first_bad()
    out = ops.collect(new, list(old), INV, bad)
    assert bad.item() == FIRST_BAD_NONE
    assert not out[1].isfinite().all()


def layouts() -> Iterator[Tensor]:
    yield torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)  # dense, not contiguous
    yield torch.randn(40, 30).t()
    yield torch.randn(20, 60)[:, ::2]  # not dense
    yield torch.randn(63).as_strided((7, 1, 9), (9, 5, 1))  # the stride of a single element says nothing
    yield torch.randn(2050)[1:]
    yield torch.randn(())


def test_collect_of_any_layout() -> None:
    new = list(layouts())
    before, kinds = doubles(new), types(new)
    wanted = [g * INV.double() for g in before]
    check(ops.collect([g.clone() for g in new], [None] * len(new), INV, first_bad()), wanted, kinds)
    check(ops.collect(new, [None] * len(new), INV, first_bad(), in_place=False), wanted, kinds)
    check(new, before, kinds)
    old = [torch.randn(g.shape) for g in new]  # contiguous: the layouts of a pair differ
    sums = [w + t.double() for w, t in zip(wanted, old, strict=True)]
    check(ops.collect(new, list(old), INV, first_bad()), sums, kinds)


def test_bad_values_are_found_in_any_layout() -> None:
    for i in range(len(list(layouts()))):
        new = list(layouts())
        new[i].view(-1)[-1:].fill_(math.inf) if new[i].is_contiguous() else new[i][-1, -1].fill_(math.inf)
        bad = first_bad()
        found = ops.read(new).found_inf
        ops.collect(new, [None] * len(new), INV, bad, offset=5)
        assert bad.item() == 5 + i
        assert found.item() == 1.0


def test_autograd_is_told_of_what_is_written() -> None:
    grads, old = draw(SMALL, torch.float32), draw(SMALL, torch.float32)
    written = [
        lambda: ops.clip_norm(grads, torch.tensor(9.0), 1.0),
        lambda: ops.clip_value(grads, torch.tensor(0.0), 0.1),
        lambda: ops.read_and_clip(grads, "norm", 0.1),
    ]
    for write in written:
        before = grads[3]._version
        write()
        assert grads[3]._version > before
    before = old[3]._version
    ops.collect(draw(SMALL, torch.float32), list(old), INV, first_bad())
    assert old[3]._version > before
    before = old[3]._version
    ops.adopt([g.half() + 1 for g in old], old)
    assert old[3]._version > before


def total(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_read(dtype: torch.dtype, offset: int) -> None:
    grads = draw(SIZES, dtype, offset)
    before, versions = [g.clone() for g in grads], [g._version for g in grads]
    norm, found = ops.read(grads)
    alone = ops.found_inf(grads)
    assert norm.dtype is found.dtype is alone.dtype is torch.float32
    assert norm.shape == found.shape == alone.shape == ()
    assert norm.item() == pytest.approx(total(grads), rel=1e-5)
    assert found.item() == alone.item() == 0.0
    assert all(map(torch.equal, grads, before))
    assert [g._version for g in grads] == versions


def test_read_of_mixed_types_and_layouts() -> None:
    grads = [t for dtype in DTYPES for t in draw(SMALL, dtype)] + list(layouts())
    assert ops.read(grads).norm.item() == pytest.approx(total(grads), rel=1e-5)
    assert ops.found_inf(grads).item() == 0.0


def test_read_of_nothing_but_empty_tensors() -> None:
    assert tuple(map(float, ops.read(draw((0, 0), torch.float32)))) == (0.0, 0.0)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_read_finds_bad_values(dtype: torch.dtype, value: float) -> None:
    for tensor, place in [(1, 0), (3, 2049)]:
        grads = draw((0, 1, 40, 2050), dtype)
        grads[tensor][place] = value
        norm, found = ops.read(grads)
        assert found.item() == ops.found_inf(grads).item() == 1.0
        assert not math.isfinite(norm.item())


def test_a_norm_that_overflows_is_no_bad_value() -> None:
    grads = [torch.full((2050,), 3e38)]
    norm, found = ops.read(grads)
    assert norm.item() == math.inf
    assert found.item() == ops.found_inf(grads).item() == 0.0


@pytest.mark.parametrize("value", [1e18, 3e19, 1e20, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_squares_that_overflow_float32_do_not_spoil_the_norm(dtype: torch.dtype, value: float) -> None:
    for sizes in ((1,), (3, 0, 4097), (2050, 40)):
        grads = [torch.full((n + 1,), value, dtype=dtype)[1:] for n in sizes] + [torch.ones(7, dtype=torch.float64)]
        for some in (grads[:-1], grads):
            norm = total(some)
            reading = ops.read_and_clip(some, "norm", 2.0)
            assert reading.norm.item() == pytest.approx(norm, rel=1e-5)
            assert reading.found_inf.item() == 0.0
            assert total(some) == pytest.approx(2.0, rel=1e-2)  # bfloat16 has three digits
            for g in grads[:-1]:
                g.fill_(value)
        grads[0][-1] = math.nan
        assert ops.read(grads).found_inf.item() == 1.0


def extremes(dtype: torch.dtype) -> Tensor:
    """Returns the least and the largest numbers of a type, signed zeros, and one."""
    info = torch.finfo(dtype)
    least = info.tiny * info.eps  # subnormal
    values = [least, -least, info.tiny - least, info.tiny, info.max, -info.max, 0.0, -0.0, 1.0]
    return torch.tensor(values * 3, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("scale", [2.0**24, 2.0**-24, 2.0**-14, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_collect_is_exact_at_the_limits_of_a_type(dtype: torch.dtype, scale: float) -> None:
    new = extremes(dtype)
    for widen in (True, False):
        bad = first_bad()
        (out,) = ops.collect([new.clone()], [None], torch.tensor(1 / scale), bad, widen=widen)
        wanted = (new.double() / scale).to(out.dtype)
        assert torch.equal(out, wanted)
        assert torch.equal(out.signbit(), wanted.signbit())
        assert bad.item() == FIRST_BAD_NONE, "what overflows in the multiply is no fault of the pass"


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_at_the_limits_of_a_type(dtype: torch.dtype) -> None:
    master = torch.cat([extremes(dtype).float(), extremes(torch.float32), torch.tensor([math.inf, -math.inf])])
    half, before = torch.zeros_like(master, dtype=dtype), master.clone()
    ops.refresh([half], [master])
    assert torch.equal(half, master.to(dtype))
    ops.adopt([half], [master])
    assert torch.equal(master, before), "a master beyond the half type is not an edit"


def test_readings_do_not_share_memory() -> None:
    first = ops.read(draw((40,), torch.float32))
    norm = first.norm.item()
    ops.read([g * 2 for g in draw((40,), torch.float32)])
    assert first.norm.item() == norm


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_norm_bites(dtype: torch.dtype, offset: int) -> None:
    grads = draw(SMALL, dtype, offset)
    before, norm = doubles(grads), total(grads)
    ops.clip_norm(grads, ops.read(grads).norm, 1.5)
    check(grads, [g * (1.5 / (norm + 1e-6)) for g in before], [dtype] * 4)


@pytest.mark.parametrize("bound", [1e-7, 4e-6])
def test_tiny_gradients_are_clipped_as_torch_does(bound: float) -> None:
    """What torch adds to a norm before it divides by it is a fifth of this one."""
    grads = [torch.full((n,), 1e-6) for n in (1, 0, 24)]
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, bound)
    ops.clip_norm(grads, ops.read(grads).norm, bound)
    for p, g in zip(params, grads, strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-6, atol=0.0)
    assert grads[0].item() < 0.8e-6


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_read_and_clip_is_both(algorithm: Literal["norm", "value"]) -> None:
    grads = [*draw(SMALL, torch.float32), *layouts()]
    twins = [g.clone() for g in grads]
    reading, alone = ops.read_and_clip(grads, algorithm, 0.5), ops.read(twins)
    torch.testing.assert_close(tuple(reading), tuple(alone))
    if algorithm == "norm":
        ops.clip_norm(twins, alone.norm, 0.5)
    else:
        ops.clip_value(twins, alone.found_inf, 0.5)
    check(grads, doubles(twins), types(twins))


@pytest.mark.parametrize("norm", [0.5, 0.0, *BAD[::2]])
def test_clip_norm_leaves_gradients_alone(norm: float) -> None:
    grads = [*draw(SMALL, torch.float16), *draw(SMALL, torch.float32)]
    before = [g.clone() for g in grads]
    ops.clip_norm(grads, torch.tensor(norm), 1.5)
    assert all(map(torch.equal, grads, before))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_value(dtype: torch.dtype, offset: int) -> None:
    grads = [*draw(SMALL, dtype, offset), *(t.to(dtype) for t in layouts())]
    wanted = [g.double().clamp(-0.25, 0.25) for g in grads]
    ops.clip_value(grads, torch.tensor(0.0), 0.25)
    check(grads, wanted, [dtype] * len(grads))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_clip_leaves_bad_values_where_they_are(dtype: torch.dtype, value: float) -> None:
    for tensor, place in [(1, 0), (3, 2049)]:
        grads = draw((0, 1, 40, 2050), dtype)
        grads[tensor][place] = value
        before = doubles(grads)
        for algorithm in ("norm", "value"):
            assert ops.read_and_clip(grads, algorithm, 0.25).found_inf.item() == 1.0
        assert all(torch.equal(g.double().nan_to_num(7), b.nan_to_num(7)) for g, b in zip(grads, before, strict=True))


def test_clip_takes_any_layout() -> None:
    grads = list(layouts())
    before, norm = doubles(grads), total(grads)
    ops.clip_norm(grads, ops.read(grads).norm, 0.5)
    check(grads, [g * (0.5 / (norm + 1e-6)) for g in before], types(grads))


def pairs(dtype: torch.dtype, here: int = 0, there: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    masters = [*draw(SMALL, torch.float32, there), *layouts()]
    halves = [*draw(SMALL, dtype, here), *(t.to(dtype) for t in layouts())]
    return halves, masters


@pytest.mark.parametrize(("here", "there"), [(0, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("dtype", HALVES)
def test_refresh_rounds_to_nearest(dtype: torch.dtype, here: int, there: int) -> None:
    halves, masters = pairs(dtype, here, there)
    before, version = [m.clone() for m in masters], halves[3]._version
    ops.refresh(halves, masters)
    assert all(torch.equal(h, m.to(dtype)) for h, m in zip(halves, masters, strict=True))
    assert all(map(torch.equal, masters, before))
    assert halves[3]._version > version


@pytest.mark.parametrize(("here", "there"), [(0, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("refreshed", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_adopt_takes_over_what_was_edited(dtype: torch.dtype, refreshed: bool, here: int, there: int) -> None:
    halves, masters = pairs(dtype, here, there)
    if refreshed:
        ops.refresh(halves, masters)
    else:
        for h, m in zip(halves, masters, strict=True):
            h.copy_(m)
    ops.adopt(halves, masters)
    low_bits = [m.clone() for m in masters]
    assert all(torch.equal(h, m.to(dtype)) for h, m in zip(halves, masters, strict=True))
    halves[3].clamp_(-0.5, 0.5)
    halves[1][7] = math.nan
    halves[-2][-1] = -halves[-2][-1]
    halves[4][1, 1, 1, 1] += 1
    wanted = [torch.where(h == m.to(dtype), m, h.float()) for h, m in zip(halves, low_bits, strict=True)]
    after = [h.clone() for h in halves]
    ops.adopt(halves, masters)
    check(masters, doubles(wanted), types(wanted))
    assert not torch.equal(masters[3], low_bits[3])
    assert all(torch.equal(h.view(torch.int16), a.view(torch.int16)) for h, a in zip(halves, after, strict=True))


def test_adopt_sees_a_swap_and_a_change_of_one_bit() -> None:
    half, master = torch.randn(2050).half(), torch.empty(2050)
    master.copy_(half)
    for edit in range(3):
        ops.refresh([half], [master])
        if edit == 0:
            half[[3, 1500]] = half[[1500, 3]]
        elif edit == 1:
            half.view(torch.int16)[2049] ^= 1
        else:
            half.neg_()
        assert not torch.equal(master, half.float())
        ops.adopt([half], [master])
        assert torch.equal(master, half.float())


def test_adopt_takes_both_half_types_and_empty_tensors() -> None:
    halves = [torch.ones(3, dtype=torch.float16), torch.ones(0, dtype=torch.float16), torch.ones(3).bfloat16()]
    masters = [h.float() + 1e-5 for h in halves]
    before = [m.clone() for m in masters]
    ops.adopt(halves, masters)
    assert all(map(torch.equal, masters, before))
    halves[2][1] = 2.0
    ops.adopt(halves, masters)
    assert masters[2].tolist() == [before[2][0].item(), 2.0, before[2][2].item()]
    assert all(map(torch.equal, masters[:2], before))
    ops.adopt(halves[1:2], masters[1:2])


def test_empty_lists() -> None:
    assert ops.collect([], [], INV, first_bad()) == []
    ops.adopt([], [])
    ops.refresh([], [])
    ops.clip_norm([], torch.tensor(9.0), 1.0)
    ops.clip_value([], torch.tensor(0.0), 1.0)
    for algorithm in ("norm", "value"):
        assert tuple(map(float, ops.read_and_clip(draw((0, 0), torch.float32), algorithm, 1.0))) == (0.0, 0.0)


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_what_else_speaks_against_a_step_is_in_the_reading(value: float) -> None:
    for also in (0.0, 1.0):
        grads = draw(SMALL, torch.float32)
        grads[1][3] = value
        flag, wanted = torch.tensor([9.0, also])[1], 1.0 if math.isnan(value) else also
        assert ops.read(grads, flag).found_inf.item() == ops.found_inf(grads, flag).item() == wanted
        before = grads[0].clone()
        assert ops.read_and_clip(grads, "value", 1e-3, flag).found_inf.item() == wanted
        assert torch.equal(grads[0], before) == math.isnan(value), "finite ones are clipped, stepped or not"


RULES = (
    ScaleRule(growth_interval=3),
    ScaleRule(growth_interval=1, max_scale=2.0**18, min_scale=2.0**13),
    ScaleRule(growth_interval=2, hysteresis=2, excuse_loss=False),
    ScaleRule(dynamic=False),
    ScaleRule(growth_factor=1.3, backoff_factor=0.7, growth_interval=2, hysteresis=3),
)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_update_follows_the_rule(rule: ScaleRule, together: bool) -> None:
    chance = random.Random(0)
    vector = torch.zeros(2, 11)[1, 1:]  # as a row of a larger table: not aligned
    vector.copy_(torch.tensor(initial_state(2.0**16, rule)))
    bad = first_bad()
    for _ in range(40):
        index = chance.choice([FIRST_BAD_NONE, FIRST_BAD_NONE, 0, 7])
        value = chance.choice([None, 1.0, 1.0, math.nan, math.inf])
        loss = None if value is None else torch.tensor(value)
        state = ScaleState(*vector.tolist())
        wanted = next_state(state, index, value is None or math.isfinite(value), rule)
        flag = torch.tensor([9.0, 9.0])[1]
        if together:
            grads = [torch.full((3,), math.inf if i == index else 1.0) for i in range(8)]
            out = ops.collect_and_update(grads, [None] * 8, vector[1], bad, vector, loss, rule, flag)
            assert out[1].tolist() == [state.inv_scale] * 3  # the old scale's, although the new one is there by now
        else:
            bad.fill_(index)
            ops.update(vector, bad, loss, rule, flag)
        assert flag.item() == (index != FIRST_BAD_NONE)
        torch.testing.assert_close(vector, torch.tensor(wanted), rtol=2e-7, atol=0)
        assert bad.item() == FIRST_BAD_NONE


@pytest.mark.parametrize("kind", ["none", "empty", "ragged", "half", "added", "layouts", "not dense"])
def test_collect_and_update_is_both(kind: str) -> None:
    new = {
        "none": [],
        "empty": draw((0, 0), torch.float32),
        "ragged": draw((2050, 1, 0, 4097), torch.float32),
        "half": draw((2050, 7), torch.float16) + draw((9,), torch.float32),
        "added": draw((2050, 7), torch.float16),
        "layouts": [torch.randn(()), torch.randn(40, 30).t(), torch.randn(7)],
        "not dense": [torch.randn(7), torch.randn(20, 60)[:, ::2]],
    }[kind]
    loss, rule = torch.tensor(2.0), ScaleRule()
    for value in (1.0, *BAD):
        results = []
        for together in (True, False):
            grads = copy.deepcopy(new)  # strides and all
            for g in grads[-1:]:
                g[..., -1:] *= value
            into = [torch.ones(g.shape) if kind == "added" else None for g in new]
            state, bad = torch.tensor(initial_state(96.0, rule)), first_bad()
            if together:
                out = ops.collect_and_update(grads, into, state[1], bad, state, loss, rule)
            else:
                out = ops.collect(grads, into, state[1], bad) if grads else []
                ops.update(state, bad, loss, rule)
            assert bad.item() == FIRST_BAD_NONE
            results.append((out, state))
        check(results[0][0], doubles(results[1][0]), types(results[1][0]))
        assert results[0][1].tolist() == results[1][1].tolist()
        found = bool(new) and new[-1].numel() > 0 and not math.isfinite(value)
        assert results[0][1][0].item() == (48.0 if found else 96.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_update_takes_any_loss(dtype: torch.dtype) -> None:
    rule = ScaleRule(growth_interval=1, growth_factor=1.0)
    for values, index in product(([], [1.0, 2.0], [1.0, math.nan], [[math.inf]], [60000.0]), (FIRST_BAD_NONE, 3)):
        loss = torch.tensor(values, dtype=dtype)
        vector, bad = torch.tensor(initial_state(1024.0, rule)), first_bad(index)
        ops.update(vector, bad, loss, rule)
        finite = bool(loss.isfinite().all())
        expected = next_state(initial_state(1024.0, rule), index, finite, rule)
        assert vector.tolist() == list(expected)
