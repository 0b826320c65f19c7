"""Accumulation windows that a checkpoint finds open: their gradients are saved, so that the window can be finished."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp.engine import Engine
from lightning_amp.gradients import Gradients, Pending
from lightning_amp.saved_state import CheckpointError

ENTRY = "amp_open_window"
"""Its name in a checkpoint."""


def save(optimizers: Sequence[Any], engine: Engine | None) -> dict[str, Any]:
    """Returns the gradients of an open window as they are, and the scale that they carry.

    Args:
        optimizers: Anything with ``param_groups``.
        engine: The training's, or None where nothing is scaled.

    Returns:
        Lists, tensors and numbers; empty where a gradient is not of the window.
    """
    grads = [[None if p.grad is None else p.grad.detach() for p in Gradients.of(o)] for o in optimizers]
    pending = None if engine is None else engine.gradients.open_window
    if pending is None:
        return {"gradients": grads}
    carried = {id(p) for p, _ in pending.present()}
    if any(p.grad is not None and id(p) not in carried for o in optimizers for p in Gradients.of(o)):
        return {}
    scale = pending.scale
    value = 1.0 if scale.scale is None else scale.scale.item()
    return {"gradients": grads, "scaler": scale.scaler.name, "scale": value, "losses": pending.losses}


def misfits(window: Mapping[str, Any], optimizers: Sequence[Any]) -> list[str]:
    """Returns why a window cannot be gone on with, in words.

    Args:
        window: From `save`.
        optimizers: Those of this training.

    Raises:
        CheckpointError: It is damaged.
    """
    grads = window.get("gradients")
    if not isinstance(grads, (list, tuple)) or not all(isinstance(mine, (list, tuple)) for mine in grads):
        raise CheckpointError(
            f"The open accumulation window of this checkpoint is damaged: {ENTRY}['gradients'] is no list of lists. "
            f"Use another copy of the checkpoint, or delete its entry {ENTRY!r}: the window is then shorter."
        )
    shapes = [[p.shape for p in Gradients.of(o)] for o in optimizers]
    if [len(mine) for mine in grads] == [len(mine) for mine in shapes] and all(
        g is None or g.shape == shape
        for mine, theirs in zip(grads, shapes, strict=True)
        for g, shape in zip(mine, theirs, strict=True)
    ):
        return []
    return ["the gradients of the accumulation window that was open: dropped, the parameters are others"]


def load(window: Mapping[str, Any], optimizers: Sequence[Any], engine: Engine | None) -> None:
    """Puts the gradients of a window back, bit for bit where the level and the scale are the same, true everywhere.

    Args:
        window: From `save`, without `misfits`.
        optimizers: Those of this training.
        engine: Its engine, or None where nothing is scaled.
    """
    params = [p for o in optimizers for p in Gradients.of(o)]
    values = [g for mine in window["gradients"] for g in mine]
    found = [(p, g.to(p.device)) for p, g in zip(params, values, strict=True) if g is not None]
    if not _reopened(window, found, engine):
        scale = float(window.get("scale", 1.0))
        widens = engine is not None and engine.config.master_weights
        for p, g in found:
            p.grad = (g.float() / scale).to(torch.float32 if widens else p.dtype)


def _reopened(window: Mapping[str, Any], found: list[tuple[Tensor, Tensor]], engine: Engine | None) -> bool:
    """Leaves the gradients under their scale, if that is where this training would have them."""
    if engine is None or engine.config.master_weights or any(p.dtype is not g.dtype for p, g in found):
        return False
    scaler = next((s for s in engine.scalers if s.name == window.get("scaler")), None)
    if scaler is None or scaler.read().scale != window["scale"]:
        return False
    for p, g in found:
        p.grad = g.clone()
    losses = [loss.to(scaler.state.device) for loss in window["losses"]]
    params = [p for p, _ in found]
    grads = [p.grad for p in params if p.grad is not None]
    engine.gradients.reopen(Pending(scaler.now().kept(), params, grads, losses))
    return True
