"""Manual accumulation windows that a checkpoint finds open are finished as if nothing had happened."""

from typing import Any

import pytest
import torch

from tests.helpers.resuming import OVERFLOW, differences, path_of
from tests.helpers.window_training import run

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
