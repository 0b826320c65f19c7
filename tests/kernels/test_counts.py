"""One step on fake CUDA tensors: no look at a value, and the launches and bytes that the documentation states."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from benchmarks.launch_counts import count_step
from benchmarks.shapes import LISTS
from lightning_amp import kernels

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
pytestmark = pytest.mark.usefixtures("device_chooses")

Clip = Literal["norm", "value"] | None
CASES: list[tuple[str, Clip]] = [
    *itertools.product(["dcgan", "tiny2000"], [None, "norm", "value"]),
    ("resnet50", "norm"),
]


def stated() -> Iterator[tuple[str, Clip, list[str], float, float]]:
    """Yields level, clip, kernels in order, bytes an element, and bytes where clipping bites, from the docs' table."""
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"O[12]", cells[0]) and len(cells) == 5:
            names = cells[2].split(", ")
            plain, bites = float(cells[3]), float(cells[4]) if cells[4] != "-" else 0.0
            clips: dict[str, Clip] = {"no": None, "norm": "norm", "value": "value"}
            yield cells[0], clips[cells[1]], names, plain, bites


@pytest.mark.parametrize(("name", "clip"), CASES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_launches_and_bytes_are_the_stated_ones(level: Literal["O1", "O2"], name: str, clip: Clip) -> None:
    ((names, plain, bites),) = [(n, p, b) for lv, c, n, p, b in stated() if (lv, c) == (level, clip)]
    step = count_step(level, LISTS[name](), clip)
    assert list(step.kernels) == names
    others = {name: n for name, n in step.others.items() if name != "aten.copy_.default"}  # the outcome's: no kernel
    assert len(step.kernels) + sum(others.values()) <= 8, "of ours and the optimizer's"
    assert step.nbytes == plain
    assert step.nbytes + step.extra == (bites or plain)
    assert step.rows == (2 if level == "O2" else 1)
    # torch's own: two that count the steps, the step, and the outcome's copy to pinned memory
    assert sorted(step.others.values()) == [1, 1, 1, 1]


def test_the_lists_are_of_the_stated_lengths() -> None:
    assert [len(LISTS[name]()) for name in ("dcgan", "resnet50", "tiny2000")] == [24, 161, 2000]


def test_the_stated_bytes_are_the_promised_ones() -> None:
    promised = {("O1", None): (40, 0), ("O1", "norm"): (40, 48), ("O2", None): (46, 0), ("O2", "norm"): (46, 54)}
    said = {(level, clip): (plain, bites) for level, clip, _, plain, bites in stated()}
    assert {key: said[key] for key in promised} == promised
    assert said["O1", "value"][1] <= 48
    assert said["O2", "value"][1] <= 54


def test_a_look_at_a_value_would_be_seen() -> None:
    with pytest.raises(DataDependentOutputException):
        count_step("O1", [(4,)], clip=None, foreach=True)


def test_clipping_by_value_looks_at_nothing() -> None:
    ops = kernels.backend(torch.device("cuda"))
    with FakeTensorMode():
        grads = [torch.empty(5, device="cuda"), torch.empty(6, 4, device="cuda")]
        reading = ops.read_and_clip(grads, "value", 1.0)
        assert reading.norm.device.type == "cuda"
