"""Who can go on from whose checkpoint: every opt level and Lightning's own precisions, each from each.

    python -m benchmarks.resume_matrix     # about twenty seconds on one core

Two networks train with two Adam optimizers, are saved, and go on under every other precision. Each cell is measured:
weights and Adam's moments are compared bit for bit with what is in the file, and where both sides are the same the
training is also compared with one that was not interrupted. A second table tells what becomes of an accumulation window
of which two batches in three were done.
"""

import logging
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.resume_trainings import PRECISIONS, equal, run
from benchmarks.resume_windows import expected_of_window, measure_window, prepare_windows


@dataclass(frozen=True)
class Cell:
    """What one precision made of another's checkpoint.

    Attributes:
        weights: Whether they are those of the file, bit for bit.
        moments: Whether Adam's are; ``"half"`` where they are those of the file rounded to half.
        scale: ``"goes on"``, ``"anew"``, or ``"-"`` where there is none.
        finite: Whether the weights are finite one epoch later.
        exact: Whether that epoch ended as without the interruption, bit for bit; None between different precisions.
        warnings: What AmpPrecision said of what it left out.
    """

    weights: bool
    moments: bool | str
    scale: str
    finite: bool
    exact: bool | None
    warnings: list[str]

    @property
    def ok(self) -> bool:
        """Whether all is as it can be."""
        return self.weights and bool(self.moments) and self.finite and self.exact is not False

    def __str__(self) -> str:
        if not self.ok:
            return "WRONG"
        what = "exact" if self.exact else "all" if self.moments is True else "rounded"
        return what + {"anew": ", scale anew", "goes on": ", scale", "-": ""}[self.scale]


def measure(saved: str, resumed: str, folder: Path) -> Cell:
    """Goes on with one precision from the checkpoint of another.

    Args:
        saved: The precision that saved; its checkpoint is ``{folder}/{saved}.ckpt``.
        resumed: The precision that goes on.
        folder: Where checkpoints are.
    """
    path = folder / f"{saved}.ckpt"
    file = torch.load(path, weights_only=True)
    moments = [
        {(i, n): v for i, state in o["state"].items() for n, v in state.items()} for o in file["optimizer_states"]
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        look = run(resumed, 2, resume=path)
    same = all(equal(a, b) for a, b in zip(look.start["moments"], moments, strict=True))
    halved = [{k: v.half() if k[1] != "step" else v for k, v in mine.items()} for mine in moments]
    rounded = all(equal(a, b) for a, b in zip(look.start["moments"], halved, strict=True))
    was = torch.load(folder / f"{saved}.scales", weights_only=True)
    now = look.start["scales"]
    exact = None
    if saved == resumed:
        whole = run(saved, 2).end
        exact = equal(whole["weights"], look.end["weights"]) and whole["scales"] == look.end["scales"]
    return Cell(
        weights=equal(look.start["weights"], file["state_dict"]),
        moments=same or ("half" if resumed == "O3" and rounded else False),
        scale="-" if not _scaled(resumed) else "goes on" if now and min(was, default=0) == min(now) else "anew",
        finite=all(bool(t.isfinite().all()) for t in look.end["weights"].values()),
        exact=exact,
        warnings=[str(w.message) for w in caught if "AmpPrecision went on" in str(w.message)],
    )


def _scaled(precision: str) -> bool:
    return precision in ("O1", "O2", "16-mixed")


def prepare(folder: Path) -> None:
    """Trains one epoch under each precision and saves.

    Args:
        folder: Where the checkpoints go.
    """
    for name in PRECISIONS:
        look = run(name, 1, save=folder / f"{name}.ckpt")
        torch.save(look.end["scales"] if _scaled(name) else [], folder / f"{name}.scales")
    prepare_windows(folder, list(PRECISIONS))


def main() -> int:
    """Prints the matrix; the exit status tells whether every cell is as it should be."""
    names = list(PRECISIONS)
    width = 18
    print("saved by".ljust(12) + "resumed by\n" + " " * 12 + "".join(name.ljust(width) for name in names))
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        for saved in names:
            cells = [measure(saved, resumed, folder) for resumed in names]
            wrong += sum(not cell.ok for cell in cells)
            print(saved.ljust(12) + "".join(str(cell).ljust(width) for cell in cells), flush=True)
        print("\nopen window")
        for saved in names:
            made = [measure_window(saved, resumed, folder) for resumed in names]
            wrong += sum(word != expected_of_window(saved, name) for word, name in zip(made, names, strict=True))
            print(saved.ljust(12) + "".join(word.ljust(width) for word in made), flush=True)
    print(
        "\nexact    goes on as if never interrupted, bit for bit\n"
        "all      weights and Adam's moments are those of the file, bit for bit\n"
        "rounded  weights likewise; O3 keeps Adam's moments in half, so they are those of the file rounded to half\n"
        "scale    the loss scale goes on from the file, or anew from its start\n"
        "finished the first step used the gradients of the whole accumulation window, to rounding"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    sys.exit(main())
