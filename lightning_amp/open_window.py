"""Accumulation windows that a checkpoint finds open: what it holds of them, and how a training goes on with them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_amp.engine import Engine
from lightning_amp.entry_reader import CheckpointError, Reader, short
from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.loss_scaler import LossScaler, Scale
from lightning_amp.pending import Pending
from lightning_amp.windows import Grads, Windows, of_all_processes

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
            [_wide(g) * inverse.get((i, j), 1.0) if isinstance(g, Tensor) else g for j, g in enumerate(mine)]
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
class OpenWindow:
    """A window from a checkpoint.

    Attributes:
        entry: As it is in the file.
        kind: What the gradients are like, from `kind_of`.
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

    def fitted(self, windows: Windows, length: int) -> tuple["OpenWindow | None", list[str]]:
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
        lists: list[int | None] = [*(i if i < was else None for i in range(now)), was]
        left_out = [f"{what}, those of optimizer {i}: dropped, there are {now}" for i in range(now, was)]
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
        not isinstance(g, Tensor) or g.shape == shape for g, shape in zip(grads, shapes, strict=True)
    )


def _wide(grad: Tensor) -> Tensor:
    return grad.float() if grad.dtype in HALF_DTYPES else grad


def kind_of(engine: Engine | None) -> str:
    """Tells what gradients are like between the passes of a window.

    Args:
        engine: The training's, or None where nothing is scaled.
    """
    return "plain" if engine is None else "masters" if engine.config.master_weights else "scaled"


def write(windows: Windows, engine: Engine | None, length: int) -> dict[str, Any]:
    """Returns what a checkpoint is to hold. Every process has to call it where gradients are unreduced.

    Args:
        windows: The training's.
        engine: Its engine, or None where nothing is scaled.
        length: Of how many batches Lightning makes its windows.
    """
    share = {"gradients": windows.gradients(), "pending": windows.pending(engine)}
    return {
        "version": VERSION,
        "kind": kind_of(engine),
        "length": length,
        "optimizers": list(windows.open),
        "waiting": list(windows.waiting),
        "processes": of_all_processes(share) if any(windows.unreduced) else [share],
    }


def read(entry: Any) -> OpenWindow:
    """Reads what `write` gave.

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
    return OpenWindow(reader.entry, str(reader.get("kind")), reader.count("length"), optimizers, waiting, shares)


def _read_share(reader: Reader, count: int) -> Share:
    gradients = reader.values("gradients")
    if len(gradients) != count or not all(isinstance(mine, (list, tuple)) for mine in gradients):
        raise reader.damaged("gradients", f"is {short(gradients)}, and a list of {count} lists is expected")
    for g in (g for mine in gradients for g in mine):
        if not (g is None or isinstance(g, Tensor) or (isinstance(g, int) and g == 0)):
            raise reader.damaged("gradients", f"holds {short(g)}, and tensors, 0 and None are expected")
    return Share([list(mine) for mine in gradients], [_read_pending(p, gradients) for p in reader.list("pending")])


def _read_pending(reader: Reader, gradients: list[Grads]) -> dict[str, Any]:
    places, losses = reader.values("places"), reader.values("losses")
    known = {(i, j) for i, mine in enumerate(gradients) for j, g in enumerate(mine) if isinstance(g, Tensor)}
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


def load(saved: OpenWindow, windows: Windows, engine: Engine | None) -> None:
    """Puts the gradients of a window back: as they were if the training is what it was, else their true mean.

    Args:
        saved: From `OpenWindow.fitted`.
        windows: Those of this training.
        engine: Its engine, or None where nothing is scaled.
    """
    rank, world_size = (distributed.get_rank(), distributed.get_world_size()) if windows.wrapper else (0, 1)
    scalers = {} if engine is None else {scaler.name: scaler for scaler in engine.scalers}
    each = len(saved.shares) > 1
    same = saved.kind == kind_of(engine) and (not each or len(saved.shares) == world_size)
    same = same and all(pending["scaler"] in scalers for share in saved.shares for pending in share.pending)
    share = saved.shares[rank if each and same else 0] if same else _mean(saved.shares)
    windows.open = list(saved.optimizers)
    windows.unreduced = [is_open and each and same for is_open in saved.optimizers]
    windows.waiting = [waits and same for waits in saved.waiting]
    lists = windows.lists()
    windows.remind(share.gradients)
    for p, g in _by_param(share.gradients, lists):
        widened = kind_of(engine) == "masters" and p.dtype in HALF_DTYPES
        if isinstance(g, Tensor):
            p.grad = g.to(p.device, g.dtype if widened else p.dtype, copy=True)
        else:
            p.grad = torch.zeros_like(p, dtype=torch.float32 if widened else p.dtype)
    if engine is not None:
        engine.gradients.reopen(_reopened(pending, lists, scalers[pending["scaler"]]) for pending in share.pending)


def _mean(shares: list[Share]) -> Share:
    """Returns the true gradients as they would be, had the processes reduced them."""

    def mean(values: tuple[Tensor | int | None, ...]) -> Tensor | int | None:
        there = [v for v in values if isinstance(v, Tensor)]
        used = 0 if any(v is not None for v in values) else None
        return reduce(torch.add, there) / len(values) if there else used

    each = [share.true() for share in shares]
    return Share([[mean(values) for values in zip(*mine, strict=True)] for mine in zip(*each, strict=True)], [])


def _by_param(grads: list[Grads], lists: list[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor | int]]:
    """Yields each parameter that is to have a gradient; one of two optimizers' may be true for one of them alone."""
    pairs = [(p, g) for mine, params in zip(grads, lists, strict=True) for p, g in zip(params, mine, strict=True)]
    found = {id(p): (p, g) for p, g in pairs if g is not None}
    found |= {id(p): (p, g) for p, g in pairs if isinstance(g, Tensor)}
    yield from found.values()


def _reopened(pending: dict[str, Any], lists: list[list[Tensor]], scaler: LossScaler) -> Pending:
    device = scaler.state.device
    params = [lists[i][j] for i, j in pending["places"]]
    scale = [torch.tensor(pending[name], dtype=torch.float32, device=device) for name in ("scale", "inv_scale")]
    joins = pending["current"] and scaler.read().scale == pending["scale"]
    return Pending(
        scaler.now().kept() if joins else Scale(scaler, -1, *scale),
        params,
        [p.grad for p in params if p.grad is not None],
        [loss.to(device) for loss in pending["losses"]],
        held=pending["held"],
    )
