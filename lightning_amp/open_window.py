"""Accumulation windows that a checkpoint finds open: what it is to hold, and how a training goes on with them."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_amp.engine import Engine
from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.loss_scaler import LossScaler, Scale
from lightning_amp.pending import Pending
from lightning_amp.saved_window import VERSION, SavedWindow, Share
from lightning_amp.windows import Grads, Windows, of_all_processes


def kind_of(engine: Engine | None) -> str:
    """Tells what gradients are like between the passes of a window.

    Args:
        engine: The training's, or None where nothing is scaled.
    """
    return "plain" if engine is None else "masters" if engine.config.master_weights else "scaled"


def write(windows: Windows, engine: Engine | None, length: int) -> dict[str, Any]:
    """Returns what a checkpoint is to hold, empty if that is no gradient at all.

    Every process has to call it where gradients are unreduced.

    Args:
        windows: The training's.
        engine: Its engine, or None where nothing is scaled.
        length: Of how many batches Lightning makes its windows.
    """
    share: dict[str, Any] = {"gradients": windows.gradients(), "pending": windows.pending(engine)}
    shares = of_all_processes(share) if any(windows.unreduced) else [share]
    if all(g is None for each in shares for mine in each["gradients"] for g in mine):
        return {}
    return {
        "version": VERSION,
        "kind": kind_of(engine),
        "length": length,
        "optimizers": list(windows.open),
        "waiting": list(windows.waiting),
        "processes": shares,
    }


def load(saved: SavedWindow, windows: Windows, engine: Engine | None) -> None:
    """Puts the gradients of a window back: as they were if the training is what it was, else their true mean.

    Args:
        saved: From `SavedWindow.fitted`.
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
        p.grad = g.to(p.device, g.dtype if widened else p.dtype, copy=True)
    if engine is not None:
        engine.gradients.pending = [_reopened(window, lists, scalers[window["scaler"]]) for window in share.pending]


def _mean(shares: list[Share]) -> Share:
    """Returns the true gradients as they would be, had the processes reduced them."""

    def mean(values: tuple[Tensor | None, ...]) -> Tensor | None:
        there = [v for v in values if v is not None]
        return reduce(torch.add, there) / len(values) if there else None

    each = [share.true() for share in shares]
    return Share([[mean(values) for values in zip(*mine, strict=True)] for mine in zip(*each, strict=True)], [])


def _by_param(grads: list[Grads], lists: list[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Returns each parameter that is to have a gradient, once, and the gradient."""
    pairs = [(p, g) for mine, params in zip(grads, lists, strict=True) for p, g in zip(params, mine, strict=True)]
    return list({id(p): (p, g) for p, g in pairs if g is not None}.values())


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
