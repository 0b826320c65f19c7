"""What a checkpoint holds of accumulation windows that were open: checked as a whole, and made to fit a training."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_amp.entry_reader import CheckpointError, Reader, short
from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.windows import Grads, Windows

ENTRY = "amp_open_window"
"""Its name in a checkpoint."""

VERSION = 1


@dataclass(frozen=True)
class Share:
    """What one process held.

    Attributes:
        gradients: From `Windows.gradients`.
        pending: From `Windows.pending`.
    """

    gradients: list[Grads]
    pending: list[dict[str, Any]]

    def true(self) -> list[Grads]:
        """Returns the gradients without any scale, float32 at least."""
        inverse = {place: pending["inv_scale"] for pending in self.pending for place in pending["places"]}
        return [
            [None if g is None else _wide(g) * inverse.get((i, j), 1.0) for j, g in enumerate(mine)]
            for i, mine in enumerate(self.gradients)
        ]

    def restricted(self, lists: list[int | None], sizes: list[int]) -> "Share":
        """Returns the part for some of the lists.

        Args:
            lists: Which list of these is to be there, for each; None for none.
            sizes: How many parameters there are in each.
        """
        to = {old: new for new, old in enumerate(lists)}
        gradients: list[Grads] = [
            [None] * size if old is None else self.gradients[old] for old, size in zip(lists, sizes, strict=True)
        ]
        places = [[(to[i], j) for i, j in pending["places"] if i in to] for pending in self.pending]
        return Share(gradients, [{**p, "places": mine} for p, mine in zip(self.pending, places, strict=True)])


@dataclass(frozen=True)
class SavedWindow:
    """A window from a checkpoint.

    Attributes:
        entry: As it is in the file.
        kind: What the gradients are like, `"plain"`, `"scaled"` or `"masters"`.
        length: How many batches Lightning was to make it of.
        optimizers: For which of them it was open.
        waiting: For which of them there were gradients that waited to be reduced.
        shares: That of each process, or one where all held the same.
    """

    entry: Mapping[str, Any]
    kind: str
    length: int
    optimizers: list[bool]
    waiting: list[bool]
    shares: list[Share]

    def fitted(self, windows: Windows, length: int) -> tuple["SavedWindow | None", list[str]]:
        """Returns what of it a training can go on with, and what was dropped, in words.

        Args:
            windows: The training's.
            length: Of how many batches Lightning makes its windows.
        """
        what = "the gradients of the accumulation window that was open"
        if length != self.length:
            return None, [f"{what}: dropped, it was to be {self.length} batches long, and windows are {length} now"]
        shapes = [[p.shape for p in params] for params in windows.lists()]
        was, now = len(self.optimizers), len(shapes) - 1
        holds = [any(g is not None for share in self.shares for g in share.gradients[i]) for i in range(was + 1)]
        lists = [i if i < was and holds[i] else None for i in range(now)] + [was if holds[was] else None]
        left_out = [f"{what}, those of optimizer {i}: dropped, there are {now}" for i in range(now, was) if holds[i]]
        for new, old in enumerate(lists):
            if old is not None and not all(_fits(share.gradients[old], shapes[new]) for share in self.shares):
                lists[new] = None
                whose = "parameters without an optimizer" if old == was else f"optimizer {old}"
                left_out.append(f"{what}, those of {whose}: dropped, the parameters are others")
        shares = [share.restricted(lists, list(map(len, shapes))) for share in self.shares]
        optimizers, waiting = (
            [i is not None and flags[i] for i in lists[:now]] for flags in (self.optimizers, self.waiting)
        )
        return replace(self, optimizers=optimizers, waiting=waiting, shares=shares), left_out


def _fits(grads: Grads, shapes: list[torch.Size]) -> bool:
    return len(grads) == len(shapes) and all(
        g is None or g.shape == shape for g, shape in zip(grads, shapes, strict=True)
    )


def _wide(grad: Tensor) -> Tensor:
    return grad.float() if grad.dtype in HALF_DTYPES else grad


def read(entry: Any) -> SavedWindow:
    """Reads the entry of a checkpoint.

    Raises:
        CheckpointError: It is damaged, or of a newer version.
    """
    reader = Reader(entry, ENTRY, without="the accumulation window that was open then lacks its first batches")
    version = reader.count("version")
    if version > VERSION:
        raise CheckpointError(
            f"{ENTRY}['version'] is {version}, and this version of lightning_amp reads 1. Install a newer one, or "
            f"delete the entry {ENTRY!r}: {reader.without}."
        )
    optimizers, waiting = (list(map(bool, reader.values(key))) for key in ("optimizers", "waiting"))
    if len(optimizers) != len(waiting):
        raise reader.damaged("waiting", f"is {short(waiting)}, and {len(optimizers)} values are expected")
    shares = [_read_share(share, len(optimizers) + 1) for share in reader.list("processes")]
    if not shares:
        raise reader.damaged("processes", "is empty, and the gradients of one process at least are expected")
    return SavedWindow(reader.entry, str(reader.get("kind")), reader.count("length"), optimizers, waiting, shares)


def _read_share(reader: Reader, count: int) -> Share:
    gradients = reader.values("gradients")
    if len(gradients) != count or not all(isinstance(mine, (list, tuple)) for mine in gradients):
        raise reader.damaged("gradients", f"is {short(gradients)}, and a list of {count} lists is expected")
    for g in (g for mine in gradients for g in mine):
        if not (g is None or isinstance(g, Tensor)):
            raise reader.damaged("gradients", f"holds {short(g)}, and tensors and None are expected")
    return Share([list(mine) for mine in gradients], [_read_pending(p, gradients) for p in reader.list("pending")])


def _read_pending(reader: Reader, gradients: list[Grads]) -> dict[str, Any]:
    places, losses = reader.values("places"), reader.values("losses")
    known = {(i, j) for i, mine in enumerate(gradients) for j, g in enumerate(mine) if g is not None}
    if not all(isinstance(place, (list, tuple)) and tuple(place) in known for place in places):
        raise reader.damaged("places", f"is {short(places)}, and places of tensors in 'gradients' are expected")
    if not all(isinstance(loss, Tensor) for loss in losses):
        raise reader.damaged("losses", f"is {short(losses)}, and a list of tensors is expected")
    return {
        "scaler": str(reader.get("scaler")),
        "scale": reader.positive("scale"),
        "inv_scale": reader.positive("inv_scale"),
        "current": bool(reader.get("current")),
        "held": bool(reader.get("held")),
        "losses": losses,
        "places": [tuple(place) for place in places],
    }
