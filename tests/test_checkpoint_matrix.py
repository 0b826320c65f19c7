"""Every level goes on from every level's checkpoint, and from Lightning's own precisions', both ways."""

from pathlib import Path

import pytest

from benchmarks.resume_matrix import Cell, measure, prepare
from benchmarks.resume_trainings import PRECISIONS
from benchmarks.resume_windows import expected_of_window, measure_window

DYNAMIC = ("O1", "O2", "16-mixed")


DOCS = Path(__file__).resolve().parents[1] / "docs" / "checkpoints.md"


def documented() -> dict[tuple[str, str], str]:
    """The cells of the table in the documentation."""
    lines = [line.strip("| \n").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("|")]
    start = next(i for i, cells in enumerate(lines) if cells[0].startswith("saved by"))
    columns = [name.strip("`") for name in lines[start][1:]]
    rows = lines[start + 2 : start + 2 + len(columns)]
    return {(r[0].strip("`"), c): cell for r in rows for c, cell in zip(columns, r[1:], strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("matrix")
    prepare(place)
    return place


@pytest.mark.parametrize("resumed", PRECISIONS)
@pytest.mark.parametrize("saved", PRECISIONS)
def test_c73_any_precision_goes_on_from_any(saved: str, resumed: str, folder: Path) -> None:
    cell = measure(saved, resumed, folder)
    assert cell.ok, cell
    assert documented()[saved, resumed] == str(cell)
    assert cell.moments == ("half" if resumed == "O3" and saved != "O3" else True)
    if resumed in DYNAMIC:
        assert cell.scale == ("goes on" if saved in DYNAMIC else "anew")
    if saved == resumed:
        assert cell.exact
    anew = resumed in ("O1", "O2") and saved not in DYNAMIC
    dropped = resumed in ("O0", "O3") and saved in DYNAMIC
    assert len(cell.warnings) == int(anew or dropped)


OURS = ("O0", "O1", "O2", "O3")
WINDOWS = [(a, b) for a in OURS for b in OURS] + [("O2", "32-true"), ("16-mixed", "O1")]


@pytest.mark.parametrize(("saved", "resumed"), WINDOWS)
def test_c73_an_open_window_is_finished_by_any_level(saved: str, resumed: str, folder: Path) -> None:
    assert measure_window(saved, resumed, folder) == expected_of_window(saved, resumed)


def test_a_cell_that_lost_something_is_wrong() -> None:
    fine = Cell(True, True, "-", True, None, [])
    assert str(fine) == "all"
    broken = [
        Cell(False, True, "-", True, None, []),
        Cell(True, False, "-", True, None, []),
        Cell(True, True, "-", False, None, []),
        Cell(True, True, "-", True, False, []),
    ]
    assert [str(cell) for cell in broken] == ["WRONG"] * 4
