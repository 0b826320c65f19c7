"""Manual accumulation windows that a checkpoint finds open are finished as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.clean_process import in_clean_process
from tests.helpers.resuming import OVERFLOW, differences, path_of
from tests.helpers.window_training import run, stop_and_go_on

LEVELS = ("O0", "O1", "O2", "O3")
POINTS = [1, 4, OVERFLOW + 1, 11]
"""In the first windows; between two of the second optimizer; after an overflow; in the second epoch."""

KINDS: dict[str, dict[str, Any]] = {
    "zeroed after the step": {},
    "zeroed before the first pass": {"zero": "before"},
    "zeroed in place": {"zero": "anew", "toggled": False},
    "untoggled": {"toggled": False},
    "delayed": {"delay": True},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[tuple[str, str], Any] = {}

    def get(level: str, kind: str) -> Any:
        if (level, kind) not in done:
            folder = tmp_path_factory.mktemp(level)
            done[level, kind] = run(level, folder=folder, save_after=[*POINTS, 12], settings=KINDS[kind]), folder
        return done[level, kind]

    return get


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", POINTS)
def test_c67_manual_windows_are_finished_bit_for_bit(level: str, kind: str, batches: int, runs: Any) -> None:
    whole, folder = runs(level, kind)
    resumed = run(level, path_of(folder, batches), settings=KINDS[kind])
    assert differences(whole.end, resumed.end) == []


def test_a_checkpoint_holds_the_gradients_of_open_windows_alone(runs: Any) -> None:
    _, folder = runs("O2", "zeroed after the step")
    files = {n: torch.load(path_of(folder, n), weights_only=True).get("amp_open_window") for n in (*POINTS, 12)}
    assert {n: file and file["optimizers"] for n, file in files.items()} == {
        1: [True, True],
        4: [True, False],
        7: [True, True],
        11: [True, True],
        12: None,
    }
    (process,) = files[4]["processes"]
    assert {g.dtype for g in process["gradients"][0]} == {torch.float32}
    assert process["gradients"][1] == [None] * len(process["gradients"][1])


# Several processes

TWO: dict[str, dict[str, Any]] = {
    "each pass reduced": {},
    "reduced at the end": {"settings": {"unreduced": True}},
    "reduced at the end, untoggled": {"settings": {"unreduced": True, "toggled": False}, "bucket_view": True},
    "automatic": {"automatic": True},
}


def without_running_means(end: dict[str, Any]) -> dict[str, Any]:
    """Each process has its own, and a checkpoint those of the first."""
    weights = {name: w for name, w in end["weights"].items() if not name.startswith("g.1.")}
    return {**end, "weights": weights, "as they are": None}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", TWO)
def test_c67_c86_windows_of_two_processes_are_finished_bit_for_bit(level: str, kind: str, tmp_path: Path) -> None:
    points = [2, OVERFLOW + 1]
    in_clean_process(stop_and_go_on, level, tmp_path, points, **TWO[kind])
    held = torch.load(path_of(tmp_path, 2), weights_only=True)["amp_open_window"]["processes"]
    assert len(held) == (1 if kind == "each pass reduced" else 2)
    for rank in range(2):
        whole = torch.load(tmp_path / f"end of rank {rank}.pt", weights_only=True)
        for n in points:
            again = torch.load(tmp_path / str(n) / f"end of rank {rank}.pt", weights_only=True)
            assert differences(without_running_means(whole), without_running_means(again)) == [], (rank, n)
