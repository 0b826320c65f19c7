"""What only the Triton backend has: plans, rows, fingerprints, counts. Run by test_interpreter.py, in its process."""

import math
import weakref

import pytest
import torch
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder

from lightning_amp import kernels
from lightning_amp.kernels import plans, programs
from lightning_amp.kernels import read as read_module
from lightning_amp.kernels.launches import Launch, counting
from lightning_amp.kernels.scale_rule import FIRST_BAD_NONE

ops = kernels.backend(torch.device("cpu"))
INV = torch.tensor(1 / 96)


@pytest.fixture(autouse=True)
def _forget() -> None:
    plans._plans.clear()
    plans._recent.clear()


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of all values stored to memory by kernels."""
    seen: list[str] = []
    store = InterpreterBuilder.create_masked_store

    def watched(self: object, ptrs: object, value: object, *rest: object) -> object:
        seen.append(str(value.dtype))  # type: ignore[attr-defined]
        return store(self, ptrs, value, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watched)
    return seen


def first_bad() -> torch.Tensor:
    return torch.tensor(FIRST_BAD_NONE, dtype=torch.int32)


def names(log: list[Launch]) -> list[str]:
    return [launch.name for launch in log]


def test_the_interpreter_runs_the_triton_backend() -> None:
    assert ops.__name__ == "lightning_amp.kernels.triton_backend"


def test_a_list_is_listed_once_a_step() -> None:
    for _ in range(2):
        grads = [torch.randn(n) for n in (3, 40, 2050)]
        with counting() as log:
            out = ops.collect(grads, [None] * 3, INV, first_bad())
            reading = ops.read(out)
            ops.clip_norm(out, reading.norm, 1.0)
        assert names(log) == ["row", "collect", "read", "clip"]
        del grads, out


def test_plans_outlive_a_step_and_are_bounded() -> None:
    ops.read([torch.randn(40)])
    (plan,) = plans._plans.values()
    ops.read([torch.randn(40)])
    assert list(plans._plans.values()) == [plan]
    for n in range(1, 100):
        ops.read([torch.randn(n)])
    assert len(plans._plans) <= 2 * plans.RECENT
    assert len(plans._recent) <= plans.RECENT
    assert len(plans._facts) <= plans.RECENT


@pytest.mark.parametrize("other", ["dtype", "size", "layout", "absent", "float64"])
def test_a_changed_list_gets_another_plan(other: str) -> None:
    memory = torch.randn(40, 30)
    small = torch.randn(7)
    lists = {
        "dtype": [memory.view(torch.float16).nan_to_num_(0, 0, 0), small],
        "size": [memory[:20], small],
        "layout": [memory[:, :15], small],
        "absent": [memory],
        "float64": [memory.double(), small],
    }
    for grads in ([memory, small], lists[other], [memory, small]):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        assert ops.read(grads).norm.item() == pytest.approx(norm, rel=1e-5)


def test_a_tensor_that_moved_is_seen() -> None:
    grad = torch.randn(40)
    ops.read([grad])
    grad.data = torch.randn(2050).half()
    assert ops.read([grad]).norm.item() == pytest.approx(grad.double().norm().item(), rel=1e-5)


def test_chunks_go_round_where_programs_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PROGRAMS", 4)
    monkeypatch.setattr(read_module, "_PROGRAMS", tl.constexpr(4))
    grads = [torch.randn(n) for n in (5 * 2048 + 3, 1, 3 * 2048)]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    with counting() as log:
        for _ in range(2):  # the ticket is back at zero
            assert ops.read(grads).norm.item() == pytest.approx(norm, rel=1e-5)
    assert log[1].programs == 4
    grads[0][-1] = math.nan
    assert ops.read(grads).found_inf.item() == 1.0


def test_a_coefficient_of_one_writes_nothing(stores: list[str]) -> None:
    grads = [torch.randn(n) for n in (3, 2050)]
    norm = ops.read(grads).norm
    stores.clear()
    ops.clip_norm(grads, norm, 1000.0)
    assert stores == []
    ops.clip_norm(grads, norm, 1.0)
    assert stores != []


def test_collect_without_scale_in_place_writes_nothing(stores: list[str]) -> None:
    ops.collect([torch.randn(2050)], [None], None, first_bad())
    assert stores == []


def test_adopt_writes_edited_chunks_alone(stores: list[str]) -> None:
    masters = [torch.randn(6 * 2048)]
    halves = [m.half() for m in masters]
    ops.adopt(halves, masters)
    assert stores == []
    ops.refresh(halves, masters)
    stores.clear()
    ops.adopt(halves, masters)
    assert stores == []
    halves[0][5000] += 1
    ops.adopt(halves, masters)
    assert stores == ["fp32"]


def test_adopt_reads_masters_only_where_fingerprints_differ() -> None:
    masters = [torch.zeros(3 * 2048)]
    halves = [m.half() for m in masters]
    ops.refresh(halves, masters)
    masters[0].fill_(1.0)  # behind everybody's back, so that reading shows
    halves[0][2048] = 2.0
    ops.adopt(halves, masters)
    assert masters[0][:2048].eq(1.0).all()
    assert masters[0][2048] == 2.0
    assert masters[0][2049:4096].eq(0.0).all()
    assert masters[0][4096:].eq(1.0).all()


def test_autograd_is_told_of_gradients_unscaled_in_place() -> None:
    grads = [torch.randn(3)]
    ops.collect(grads, [None], INV, first_bad())
    assert grads[0]._version > 0
    before = grads[0]._version
    ops.collect(grads, [None], None, first_bad())  # a check alone
    assert grads[0]._version == before


def test_fingerprints_belong_to_one_pair_of_lists() -> None:
    masters = [torch.randn(40)]
    half = masters[0].half()
    ops.refresh([half], masters)
    other = [half.float() + 1]
    ops.adopt([half], other)
    assert torch.equal(other[0], half.float())


def test_counts_are_off_outside_the_block() -> None:
    with counting() as outer:
        with counting() as inner:
            ops.read([torch.randn(4)])
        ops.read([torch.randn(4)])
    ops.read([torch.randn(4)])
    assert names(inner).count("read") == names(outer).count("read") == 1


def test_rows_do_not_keep_gradients_alive() -> None:
    grads = [torch.randn(40)]
    alive = weakref.ref(grads[0])
    ops.read(grads)
    grads.clear()
    assert alive() is None
