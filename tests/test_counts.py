"""What the plugin costs the host in a training step, exactly: ops, calls and host reads, against Lightning's own."""

import functools
import itertools
import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import counts
from benchmarks.counts import Counts, graph_of, is_cast, measure
from benchmarks.small_gan import LOSSES, OPTIMIZERS, PRECISIONS, Setup, Style
from lightning_amp.graph import reached_leaves

OURS = ("O1", "O1 step", "O2")
KINDS: list[tuple[Style, bool]] = [("named", False), ("named", True), ("toggled", True), ("plain", True)]
PHASES = ("forward", "backward", "step")

pytestmark = pytest.mark.filterwarnings("ignore:The .*dataloader.* does not have many workers")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "lightning.pytorch")


@functools.cache
def counted(precision: str, tensors: int, style: Style, fused: bool) -> Counts:
    return measure(Setup(precision, tensors, style, fused)).counts


def added(precision: str, tensors: int, style: Style, fused: bool) -> dict[str, int]:
    """Ops beside casts that a precision adds to float32, by phase."""
    mine, plain = (counted(p, tensors, style, fused).ops for p in (precision, "32-true"))
    return {phase: mine[phase] - plain[phase] for phase in PHASES}


@pytest.mark.parametrize("tensors", [8, 160])
@pytest.mark.parametrize(("style", "fused"), KINDS)
def test_o0_adds_nothing(style: Style, fused: bool, tensors: int) -> None:
    mine, plain = counted("O0", tensors, style, fused), counted("32-true", tensors, style, fused)
    assert (mine.ops, mine.casts, mine.reads) == (plain.ops, 0, plain.reads)
    assert mine.calls <= 1.01 * plain.calls


@pytest.mark.parametrize("precision", OURS)
@pytest.mark.parametrize(("style", "fused"), KINDS)
def test_ops_added_are_few_and_do_not_grow_with_the_number_of_tensors(
    style: Style, fused: bool, precision: str
) -> None:
    few = added(precision, 8, style, fused)
    assert few["forward"] == 0
    assert 0 < few["backward"] <= 12 * LOSSES
    assert 0 < few["step"] <= 10 * OPTIMIZERS
    assert added(precision, 160, style, fused) == few


@pytest.mark.parametrize(("style", "fused"), KINDS)
def test_ops_with_many_tensors_are_those_of_lightnings_mixed_precision_and_fewer_with_kept_casts(
    style: Style, fused: bool
) -> None:
    theirs = counted("16-mixed", 160, style, fused).all_ops
    assert counted("O1", 160, style, fused).all_ops <= 1.02 * theirs
    assert counted("O1 step", 160, style, fused).all_ops < theirs
    assert counted("O2", 160, style, fused).all_ops < theirs


@pytest.mark.parametrize("tensors", [8, 160])
@pytest.mark.parametrize(("style", "fused"), list(itertools.product(["named", "toggled"], [False, True])))
def test_calls_are_at_most_a_tenth_above_lightnings_mixed_precision(style: Style, fused: bool, tensors: int) -> None:
    theirs = counted("16-mixed", tensors, style, fused).calls
    for precision in ("O1", "O1 step", "O2"):
        assert counted(precision, tensors, style, fused).calls <= 1.10 * theirs


@pytest.mark.parametrize("precision", ["16-mixed", *OURS])
@pytest.mark.parametrize(("style", "fused"), KINDS)
def test_host_reads_added_are_one_a_step_and_none_with_fused_optimizers(
    style: Style, fused: bool, precision: str
) -> None:
    reads = counted(precision, 8, style, fused).reads - counted("32-true", 8, style, fused).reads
    assert reads == (0 if fused else OPTIMIZERS)


@pytest.mark.parametrize("precision", OURS)
def test_a_fused_optimizer_costs_a_host_read_in_its_first_step_alone(precision: str) -> None:
    setup = Setup(precision, fused=True)
    assert [measure(setup, warm_up=n).counts.reads for n in (0, 1)] == [OPTIMIZERS, 0]


def test_counts_repeat() -> None:
    setup = Setup("O2", fused=True)
    assert measure(setup).counts == measure(setup).counts


def test_what_counts_as_a_cast() -> None:
    aten, half, full = torch.ops.aten, torch.ones(1, dtype=torch.float16), torch.ones(1)
    assert is_cast(aten._to_copy.default, [full])
    assert is_cast(aten.copy_.default, [half, full])
    assert is_cast(aten._foreach_copy_.default, [[full, half], [full, full]])
    assert not is_cast(aten.copy_.default, [full, full])
    assert not is_cast(aten._foreach_copy_.default, [[full], [full]])
    assert not is_cast(aten.mul.Tensor, [full, half])


@pytest.mark.parametrize("nodes", [100, 1000])
def test_the_graph_walk_touches_each_node_once(nodes: int) -> None:
    loss = graph_of(nodes)
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, arg: Any) -> None:
        if event == "c_call" and frame.f_code is reached_leaves.__code__:
            calls[arg.__qualname__] += 1

    sys.setprofile(count)
    try:
        leaves = reached_leaves(loss)
    finally:
        sys.setprofile(None)
    assert leaves is not None
    assert len(leaves) == nodes // 2
    assert calls["list.pop"] == nodes
    assert calls.total() <= 5 * nodes


def test_the_command_prints_a_table_and_writes_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "PRECISIONS", ("16-mixed", "O1"))
    monkeypatch.setattr(
        sys, "argv", ["counts", "--tensors", "4", "--styles", "named", "--json", str(tmp_path / "counts.json")]
    )
    counts.main()
    assert "4 tensors, fused Adam, losses named" in capsys.readouterr().out
    written = json.loads((tmp_path / "counts.json").read_text())
    assert len(written["steps"]) == 4
    assert all(row["calls"] > 0 and row["all_ops"] > row["casts"] for row in written["steps"])
    assert written["graph_walk_ms"] > 0


def test_every_precision_is_covered() -> None:
    assert set(PRECISIONS) == {"32-true", "16-mixed", "O0", *OURS}
