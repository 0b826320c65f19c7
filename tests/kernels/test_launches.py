"""The host side of a launch, with a driver that launches nothing: arguments, kept handles, and what it all costs."""

import pytest
import torch

from benchmarks.host_cost import count_calls
from benchmarks.no_gpu import NoGpu, no_gpu
from lightning_amp.kernels import facts, plans
from lightning_amp.kernels import triton_backend as ops
from lightning_amp.kernels.scale_rule import FIRST_BAD_NONE, ScaleRule, initial_state

N = 5


@pytest.fixture(autouse=True)
def _forget() -> None:
    plans._plans.clear()
    plans._recent.clear()
    plans._facts.clear()


def one_step(state: torch.Tensor, halves: list[torch.Tensor], masters: list[torch.Tensor], offset: int) -> None:
    first_bad = torch.tensor(FIRST_BAD_NONE, dtype=torch.int32)
    grads = [torch.randn(4097, dtype=torch.float16) for _ in range(N)]
    out = ops.collect(grads, [None] * N, state[1], first_bad, offset=offset)
    ops.update(state, first_bad, torch.ones(()), ScaleRule())
    ops.collect_and_update(out, [None] * N, state[1], first_bad, state, torch.ones(()), ScaleRule())
    ops.read_and_clip(out, "norm", 1.0 + offset)
    ops.adopt(halves, masters)
    ops.refresh(halves, masters)


def run(steps: int) -> list[list[tuple[str, tuple[object, ...]]]]:
    state = torch.tensor(initial_state(1.0, ScaleRule()))
    halves = [torch.randn(4097).half() for _ in range(N)]
    masters = [h.float() for h in halves]
    launched = []
    with no_gpu() as driver:
        driver.keep = True
        for offset in range(steps):
            one_step(state, halves, masters, offset)
            launched.append(driver.launched)
            driver.launched = []
    return launched


def test_a_kept_handle_is_called_as_the_first_launch_was() -> None:
    first, second, third = run(3)
    names = [f"{name}_kernel" for name in ("collect", "update", "collect", "read", "clip", "adopt", "refresh")]
    assert [name for name, _ in first] == [name for name, _ in second] == names
    for (name, args), (_, later) in zip(second, third, strict=True):
        assert len(args) == len(later)
        for i, (a, b) in enumerate(zip(args, later, strict=True)):
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
            moves = {"collect_kernel": (2, 3, 5, 6, 9), "read_kernel": (3, 4, 6, 7), "clip_kernel": (2, 3, 4)}
            assert same or i in moves.get(name, ()), f"argument {i} of {name}"


def test_rows_hold_the_addresses() -> None:
    ((_, (_, sizes, news, outs, *_)), *_) = run(1)[0]
    assert isinstance(sizes, torch.Tensor)
    assert isinstance(news, torch.Tensor)
    assert isinstance(outs, torch.Tensor)
    assert sizes.tolist() == [4097] * N
    assert len({*news.tolist(), *outs.tolist()}) == 2 * N


def test_kernels_are_compiled_at_the_first_launch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run(1)
    loaded = []
    monkeypatch.setattr(
        NoGpu, "launcher_cls", lambda self, source, metadata: loaded.append(source) or (lambda *args: None)
    )
    run(2)
    assert loaded == []


def test_facts_are_told_without_torchs_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_guard", lambda tensors: None)
    a, b = torch.randn(4, 6), torch.randn(3)
    known = facts.Facts([a, b])
    assert known.hold_for([torch.randn(4, 6), torch.randn(3)])
    assert not known.hold_for([a])
    assert not known.hold_for([a.half(), b])
    assert not known.hold_for([torch.randn(6, 4).t(), b])
    assert not known.hold_for([torch.randn(4, 5), b])
    assert not known.hold_for([a.to("meta"), b])


def test_torchs_guards_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(4, 6), torch.randn(3)
    known = facts.Facts([a, b])
    assert known._check is not None
    with monkeypatch.context() as patch:
        patch.setattr(facts, "_guard", lambda tensors: None)
        plain = facts.Facts([a, b])
    for other in ([torch.randn(4, 6), b], [a], [a.half(), b], [torch.randn(6, 4).t(), b], [a[:, :5], b], [b, a]):
        assert known.hold_for(other) == plain.hold_for(other)


def test_the_host_makes_a_fifth_of_torchs_calls_and_no_more_for_more_tensors() -> None:
    (few, ours_for_few), (many, ours_for_many) = count_calls(500), count_calls(2000)
    assert 5 * ours_for_few <= few
    assert 20 * ours_for_many <= many
    assert abs(ours_for_many - ours_for_few) <= 10
