"""The functions of `lightning_amp.kernels.reference`, each in one launch over the whole list.

Signatures and results are the reference's. Nothing is read back from the device. A tensor whose layout is not dense, or
whose type the kernels do not know, goes through the reference by itself.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version  # the kernels write behind autograd's back

from lightning_amp.kernels import reference
from lightning_amp.kernels.plans import Listing, Place, listed, planned
from lightning_amp.kernels.programs import ClipPlan, CollectPlan, Move, ReadPlan, UpdatePlan, WeightsPlan
from lightning_amp.kernels.reference import HALF_DTYPES, Reading
from lightning_amp.kernels.scale_rule import ScaleRule

__all__ = ["Reading", "adopt", "clip_norm", "clip_value", "collect"]
__all__ += ["found_inf", "read", "read_and_clip", "refresh", "update"]


def collect(
    new: Sequence[Tensor],
    into: Sequence[Tensor | None],
    inv_scale: Tensor | None,
    first_bad: Tensor,
    *,
    offset: int = 0,
    widen: bool = True,
    in_place: bool = True,
) -> list[Tensor]:
    """See `lightning_amp.kernels.reference.collect`; a ``new`` that is added to an ``into`` is left as it is."""
    return _collect(list(new), into, inv_scale, first_bad, offset, widen, in_place, None)[0] if new else []


def collect_and_update(
    new: Sequence[Tensor],
    into: Sequence[Tensor | None],
    inv_scale: Tensor | None,
    first_bad: Tensor,
    state: Tensor,
    loss: Tensor | None,
    rule: ScaleRule,
    overflowed: Tensor | None = None,
    *,
    widen: bool = True,
    in_place: bool = True,
) -> list[Tensor]:
    """See `lightning_amp.kernels.reference.collect_and_update`; one launch does both."""
    out, moved = list(new), False
    move = Move(state, _one_loss(loss, state), rule, overflowed)
    if out:
        out, moved = _collect(out, into, inv_scale, first_bad, 0, widen, in_place, move)
    if not moved:
        _update(first_bad, move)
    return out


def _collect(
    new: list[Tensor],
    into: Sequence[Tensor | None],
    inv_scale: Tensor | None,
    first_bad: Tensor,
    offset: int,
    widen: bool,
    in_place: bool,
    move: Move | None,
) -> tuple[list[Tensor], bool]:
    """Returns the true gradients, and whether the scaler has been moved on."""
    source = listed(new)
    added = None if list(into) == [None] * len(new) else tuple(old is not None for old in into)
    if added is None and in_place and not (widen and not source.facts.kinds.isdisjoint(HALF_DTYPES)):
        out, target = new, source
    else:
        out = [_home(g, old, widen, in_place) for g, old in zip(new, into, strict=True)]
        target = listed(out)
    scaled = inv_scale is not None
    moves = None if move is None else move.key
    key = ("collect", source.place, source.facts, target.facts, target is source, added, scaled, moves)
    plan = planned(key, source.place, lambda: CollectPlan(source, target, added, scaled, move, new[0]))
    plan.launch(source, target, inv_scale, first_bad, offset, move)
    if target is not source:
        written = [t for t, g, old in zip(out, new, into, strict=True) if t is g or t is old]
        increment_version(written)
    elif scaled:
        increment_version(out)
    for i in plan.rest:
        (out[i],) = reference.collect(
            new[i : i + 1], into[i : i + 1], inv_scale, first_bad, offset=offset + i, widen=widen, in_place=in_place
        )
    return out, plan.moves


def _home(new: Tensor, old: Tensor | None, widen: bool, in_place: bool) -> Tensor:
    """Returns the tensor that a collected gradient goes to."""
    if old is not None:
        return old
    if widen and new.dtype in HALF_DTYPES:
        return torch.empty_like(new, dtype=torch.float32)
    return new if in_place else torch.empty_like(new)


def read(grads: Sequence[Tensor], also: Tensor | None = None) -> Reading:
    """See `lightning_amp.kernels.reference.read`."""
    return _read(grads, listed(grads), also)[0]


def _read(grads: Sequence[Tensor], listing: Listing, also: Tensor | None) -> tuple[Reading, Tensor]:
    """Returns a reading, and found_inf without ``also``."""
    key = ("read", listing.place, listing.facts, also is None)
    plan = planned(key, listing.place, lambda: ReadPlan(listing, also is not None, grads[0]))
    result = grads[0].new_empty(3, dtype=torch.float32)
    plan.launch(listing, result, also)
    norm, found_inf, own = result.unbind()
    if plan.rest:
        other = reference.read([grads[i] for i in plan.rest])
        norm, found_inf = torch.hypot(norm, other.norm), torch.maximum(found_inf, other.found_inf)
        own = torch.maximum(own, other.found_inf)
    return Reading(norm, found_inf), own


def found_inf(grads: Sequence[Tensor], also: Tensor | None = None) -> Tensor:
    """See `lightning_amp.kernels.reference.found_inf`; the norm costs nothing beside."""
    return _read(grads, listed(grads), also)[0].found_inf


def clip_norm(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """See `lightning_amp.kernels.reference.clip_norm`; where there is nothing to clip, no gradient is touched."""
    if grads:
        _clip(grads, listed(grads), "norm", norm, max_norm)


def clip_value(grads: Sequence[Tensor], found_inf: Tensor, max_value: float) -> None:
    """See `lightning_amp.kernels.reference.clip_value`; chunks with nothing to clip are not written."""
    if grads:
        _clip(grads, listed(grads), "value", found_inf, max_value)


def read_and_clip(
    grads: Sequence[Tensor], algorithm: Literal["norm", "value"], bound: float, also: Tensor | None = None
) -> Reading:
    """See `lightning_amp.kernels.reference.read_and_clip`; looks at the list once, for both launches."""
    listing = listed(grads)
    reading, own = _read(grads, listing, also)
    _clip(grads, listing, algorithm, reading.norm if algorithm == "norm" else own, bound)
    return reading


def _clip(grads: Sequence[Tensor], listing: Listing, algorithm: str, of_reading: Tensor, bound: float) -> None:
    key = ("clip", listing.place, listing.facts, algorithm)
    plan = planned(key, listing.place, lambda: ClipPlan(listing, algorithm == "value", grads[0]))
    plan.launch(listing, of_reading.to(torch.float32), float(bound))
    increment_version(grads)
    if plan.rest:
        rest = [grads[i] for i in plan.rest]
        (reference.clip_norm if algorithm == "norm" else reference.clip_value)(rest, of_reading, bound)


def refresh(halves: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """See `lightning_amp.kernels.reference.refresh`; leaves fingerprints, by which `adopt` sees what was edited."""
    if not halves:
        return
    plan = _weights(halves, masters)
    plan.refresh()
    increment_version(halves)
    if plan.rest:
        reference.refresh([halves[i] for i in plan.rest], [masters[i] for i in plan.rest])


def adopt(halves: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """See `lightning_amp.kernels.reference.adopt`; after a `refresh` of the same lists it reads the half weights only.

    A chunk of 2048 weights whose 64-bit fingerprint has not changed counts as not edited.
    """
    if not halves:
        return
    plan = _weights(halves, masters)
    plan.adopt()
    increment_version(masters)
    if plan.rest:
        reference.adopt([halves[i] for i in plan.rest], [masters[i] for i in plan.rest])


def _weights(halves: Sequence[Tensor], masters: Sequence[Tensor]) -> WeightsPlan:
    source, target = listed(halves), listed(masters)
    key = ("weights", source, target)  # these very addresses, for the sake of the fingerprints
    return planned(key, source.place, lambda: WeightsPlan(source, target, halves[0]))


def update(
    state: Tensor, first_bad: Tensor, loss: Tensor | None, rule: ScaleRule, overflowed: Tensor | None = None
) -> None:
    """See `lightning_amp.kernels.reference.update`."""
    _update(first_bad, Move(state, _one_loss(loss, state), rule, overflowed))


def _update(first_bad: Tensor, move: Move) -> None:
    place = Place.of(move.state)
    planned(("update", place, move.key), place, lambda: UpdatePlan(place, move)).launch(move, first_bad)


def _one_loss(loss: Tensor | None, state: Tensor) -> Tensor | None:
    """Returns one value on the device of ``state`` that is finite where all of ``loss`` is."""
    if loss is None:
        return None
    if loss.device != state.device:
        loss = loss.to(state.device)
    return loss if loss.numel() == 1 else torch.where(torch.isfinite(loss).all(), 0.0, float("nan"))
