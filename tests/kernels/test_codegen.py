"""What the compiler makes of the kernels, for GPUs that are not there: 128-bit accesses, no spills, few registers."""

import json
import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.codegen import ARCHITECTURES, CALLS, TABLE, Build, Call, build, compiled, launches

WRITTEN: dict[str, Any] = json.loads(TABLE.read_text())
REGISTERS: dict[str, dict[str, int]] = WRITTEN["registers"]


def faults(name: str, built: Build, architecture: int) -> list[str]:
    """Returns what is wrong with a build, in words."""
    _, loads, stores = CALLS[name]
    # Another compiler takes other registers: what is held against the table is this code, not that.
    same = WRITTEN["triton"] == triton.__version__
    allowed = REGISTERS[name][str(architecture)] * 5 / 4 if same else 255
    found = []
    if built.spilled:
        found.append(f"{built.spilled} bytes a thread spilled")
    if (built.loads, built.stores) != (loads, stores):
        found.append(f"{built.loads} wide loads and {built.stores} wide stores, not {loads} and {stores}")
    if built.registers > allowed:
        found.append(f"{built.registers} registers where {allowed:.0f} are allowed")
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", CALLS)
def test_every_variant(name: str, architecture: int) -> None:
    assert faults(name, build(launches()[name], architecture), architecture) == []


@pytest.mark.parametrize("name", CALLS)
def test_subnormal_numbers_are_not_made_zeros(name: str) -> None:
    assert ".ftz" not in compiled(launches()[name], 90).asm["ptx"]


@triton.jit
def hint_on_the_integer(chunks, sizes, news, outs, inv_scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.load(sizes) // 4 * 4
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    new = tl.multiple_of(tl.load(news), 16).to(tl.pointer_type(tl.float32))
    out = tl.multiple_of(tl.load(outs), 16).to(tl.pointer_type(tl.float32))
    tl.store(out + at, tl.load(new + at, mask=at < n) * tl.load(inv_scale), mask=at < n)


@triton.jit
def any_size(chunks, sizes, news, outs, inv_scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.load(sizes)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    new = tl.multiple_of(tl.load(news).to(tl.pointer_type(tl.float32)), 16)
    out = tl.multiple_of(tl.load(outs).to(tl.pointer_type(tl.float32)), 16)
    tl.store(out + at, tl.load(new + at, mask=at < n) * tl.load(inv_scale), mask=at < n)


@triton.jit
def hint_behind_the_cast(chunks, sizes, news, outs, inv_scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.load(sizes) // 4 * 4
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    new = tl.multiple_of(tl.load(news).to(tl.pointer_type(tl.float32)), 16)
    out = tl.multiple_of(tl.load(outs).to(tl.pointer_type(tl.float32)), 16)
    tl.store(out + at, tl.load(new + at, mask=at < n) * tl.load(inv_scale), mask=at < n)


@pytest.mark.parametrize(
    ("kernel", "is_wide"), [(hint_behind_the_cast, True), (hint_on_the_integer, False), (any_size, False)]
)
def test_a_wrong_idiom_is_seen(kernel: Any, is_wide: bool) -> None:
    args = launches()["collect f32"].args[:5]
    found = faults("collect f32", build(Call(kernel, args, {"BLOCK": 2048}, 4), 90), 90)
    assert found == ([] if is_wide else ["0 wide loads and 0 wide stores, not 4 and 4"])


def events(name: str, architecture: int) -> tuple[list[tuple[str, str]], tuple[str, str], list[tuple[str, str]]]:
    """Returns what a program does to global memory, as (predicate, instruction): before, with, after its ticket."""
    ptx = compiled(launches()[name], architecture).asm["ptx"]
    names = r"st\.global\.b32|bar\.sync|atom\.global[\w.]*|ld\.global[\w.]*"
    found = re.findall(rf"(?:@(%p\d+) )?({names})", ptx)
    (ticket,) = (i for i, (_, name) in enumerate(found) if name == "atom.global.gpu.acq_rel.add.u32")
    return found[:ticket], found[ticket], found[ticket + 1 :]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_last_program_sees_what_all_others_read(architecture: int) -> None:
    # One thread stores the partial and then draws the ticket, acquiring and releasing; the L1 cache is passed by.
    before, (thread, _), after = events("read f32", architecture)
    assert before[-2:] == [(thread, "st.global.b32"), ("", "bar.sync")]
    assert next(name for _, name in after if name.startswith("ld.")).startswith("ld.global.cg.")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_last_program_sees_what_all_others_collected(architecture: int) -> None:
    # All threads have done with the old scale before the ticket is drawn; the index is read past the L1 cache.
    before, _, after = events("collect f32, update", architecture)
    assert [name for _, name in before[-2:]] == ["atom.global.gpu.acq_rel.min.s32", "bar.sync"]
    assert next(name for _, name in after if name.startswith("ld.")) == "ld.global.cg.b32"


def test_what_spills_or_grows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WRITTEN, "triton", triton.__version__)
    wanted = REGISTERS["collect f32"]["90"]
    assert faults("collect f32", Build(wanted + wanted // 4, 0, 4, 4), 90) == []
    assert len(faults("collect f32", Build(wanted * 4 // 3, 8, 4, 4), 90)) == 2


def test_the_table_knows_every_variant() -> None:
    assert {name: set(row) for name, row in REGISTERS.items()} == {
        name: {str(architecture) for architecture in ARCHITECTURES} for name in CALLS
    }


def test_launches_are_caught_on_fake_tensors_of_a_gpu() -> None:
    assert all(call.args[0].device.type == "cuda" for call in launches().values())
    assert not torch.cuda.is_initialized()
