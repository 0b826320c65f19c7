"""Plain PyTorch over lists of tensors: the definition of every kernel, and the path for the CPU and other devices.

Each function takes lists whose tensors live on one device, and makes a number of torch calls that does not grow with
the number of tensors (``_foreach_*`` takes the whole list; there is no public spelling of it). On the CPU a tensor's
value is read with ``tolist()``, which costs neither a copy nor a synchronisation; on any other device nothing is read.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_amp.kernels.getters import dtype_of, is_there, version_of
from lightning_amp.kernels.scale_rule import FIRST_BAD_NONE, ScaleRule, ScaleState, next_state

HALF_DTYPES = (torch.float16, torch.bfloat16)
_HALVES = set(HALF_DTYPES)


class Reading(NamedTuple):
    """What one read of a list of gradients tells.

    Attributes:
        norm: Their total 2-norm, 0-dim float32 (inf where only the norm overflows, non-finite where a value is).
        found_inf: 1.0 if any value is non-finite, else 0.0: 0-dim float32, as torch's fused optimizers take it.
    """

    norm: Tensor
    found_inf: Tensor


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
    """Unscales fresh gradients, checks them, and adds them to those already there: ``into + new * inv_scale``.

    The check sees ``new`` before the multiply: with a scale below one a finite value may overflow in it.

    Args:
        new: Gradients of one backward pass: dense, floating, any shapes; their dtypes may differ.
        into: For each of them the true gradient to add to, in place, or None.
        inv_scale: ``1 / scale``, 0-dim float32, or None where no scale was in use.
        first_bad: 0-dim int32; becomes ``min(first_bad, offset + i)`` for each ``new[i]`` with a non-finite value.
        offset: Index of ``new[0]`` in the numbering of ``first_bad``.
        widen: Whether a half ``new`` without an ``into`` becomes float32 (else it keeps its dtype).
        in_place: Whether a ``new`` that keeps its dtype may be overwritten.

    Returns:
        The true gradients, one for each ``new``: ``into[i]`` where there was one, else ``new[i]`` itself where it could
        be overwritten, else a fresh tensor.
    """
    fresh = list(new)
    if in_place and not (widen and _HALVES & set(map(dtype_of, new))):
        _check(fresh, inv_scale, first_bad, offset)
    else:
        _check(fresh, None, first_bad, offset)
        fresh = _products(fresh, _one(first_bad.device) if inv_scale is None else inv_scale, widen)
    olds: list[Any] = list(filter(is_there, into))
    if not olds:
        return fresh
    torch._foreach_add_(olds, list(compress(fresh, map(is_there, into))))
    return [g if old is None else old for old, g in zip(into, fresh, strict=True)]


def _products(new: list[Tensor], factor: Tensor, widen: bool) -> list[Tensor]:
    if not widen:  # two 0-dim tensors are promoted, and a half one would become float32
        return [out.to(g.dtype) for out, g in zip(torch._foreach_mul(new, factor), new, strict=True)]
    # A factor with one dimension takes part in type promotion, a 0-dim one does not: half * float32 [1] is float32.
    wide = factor.view(1)
    return list(torch._foreach_mul(new, [wide if g.ndim else factor for g in new]))


@lru_cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


@lru_cache
def _cpu_found() -> Tensor:
    """Scratch of `_check`; zero between calls."""
    return torch.zeros((), dtype=torch.float32)


def _check(grads: list[Tensor], factor: Tensor | None, first_bad: Tensor, offset: int) -> None:
    """Lowers ``first_bad`` to the first non-finite of ``grads``, then multiplies them by ``factor`` in place.

    Without a factor they are multiplied by one, which leaves every value as it is: still the cheapest check over a list
    that torch has.
    """
    factor = _one(first_bad.device) if factor is None else factor
    if first_bad.is_cpu:
        found = _cpu_found()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)
        if found.tolist():
            found.zero_()
            first_bad.clamp_(max=offset + next(i for i, g in enumerate(grads) if not torch.isfinite(g).all()))
        return
    found = torch.zeros((), dtype=torch.float32, device=first_bad.device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)
    index = _norms(grads).isfinite().logical_not().to(torch.int32).argmax().to(torch.int32) + offset
    first_bad.copy_(torch.where(found > 0, torch.minimum(first_bad, index), first_bad))


def _norms(grads: list[Tensor], order: float = 2.0) -> Tensor:
    """Returns the norm of each of ``grads``: ``[len(grads)]``, float32 (float64 where all are)."""
    dtypes = {g.dtype for g in grads}
    if torch.float64 in dtypes and len(dtypes) > 1:  # torch.stack wants one dtype, and norms are never narrowed
        grads = [g.double() for g in grads]
    elif not dtypes.isdisjoint(HALF_DTYPES):
        return torch.stack(torch._foreach_norm(grads, order, dtype=torch.float32))
    return torch.stack(torch._foreach_norm(grads, order))


def read(grads: Sequence[Tensor], also: Tensor | None = None) -> Reading:
    """Reads the gradients a step will use, once, and changes nothing.

    Args:
        grads: At least one dense floating tensor; dtypes may differ.
        also: 0-dim float32, the least that ``found_inf`` becomes: what else speaks against the step.

    Returns:
        Their total 2-norm and whether any value is non-finite. A norm that overflows is no non-finite value.
    """
    grads = list(grads)
    norm = torch.linalg.vector_norm(_norms(grads))
    finite = norm.is_cpu and math.isfinite(norm.tolist())  # then all of them are, and no second look is needed
    found = torch.zeros((), dtype=torch.float32, device=norm.device) if finite else found_inf(grads)
    if norm.is_cpu and norm.tolist() == math.inf and not found.tolist():  # squares overflowed: float64 takes them
        norm = torch.linalg.vector_norm(_norms([g.double() for g in grads]))
    return Reading(norm.to(torch.float32), found if also is None else torch.maximum(found, also))


def found_inf(grads: Sequence[Tensor], also: Tensor | None = None) -> Tensor:
    """Tells whether any value is non-finite, for less than `read` where nobody asks for the norm.

    Args:
        grads: At least one dense floating tensor; dtypes may differ.
        also: See `read`.

    Returns:
        As `Reading.found_inf`.
    """
    found = torch.zeros((), dtype=torch.float32, device=grads[0].device)
    grads, versions = tuple(grads), tuple(map(version_of, grads))
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, _one(found.device))
    torch._C._autograd._unsafe_set_version_counter(grads, versions)  # it has written each value, times one
    return found if also is None else torch.maximum(found, also)


def clip_norm(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales ``grads`` in place so that their total norm is at most ``max_norm``, as `torch.nn.utils.clip_grad_norm_`.

    Args:
        grads: The gradients, in place.
        norm: Their total norm, from `read`. Where it is non-finite the gradients are left as they are.
        max_norm: The bound, positive.
    """
    if not grads:
        return
    coefficient = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
    # An infinite norm gives 0 and a NaN gives NaN: neither may be multiplied into a gradient.
    coefficient = torch.where(coefficient > 0, coefficient, 1.0)
    torch._foreach_mul_(list(grads), coefficient)


def clip_value(grads: Sequence[Tensor], found_inf: Tensor, max_value: float) -> None:
    """Clamps ``grads`` in place to ``[-max_value, max_value]``, unless one of them is non-finite.

    A clamp would turn an infinity into a value that looks harmless, and the step would take it.

    Args:
        grads: The gradients, in place.
        found_inf: From `read`. Where it is not zero the gradients are left as they are.
        max_value: The bound, positive.
    """
    if not grads:
        return
    bound = torch.where(found_inf > 0, math.inf, max_value)
    torch._foreach_minimum_(list(grads), [bound] * len(grads))
    torch._foreach_maximum_(list(grads), [-bound] * len(grads))


def read_and_clip(
    grads: Sequence[Tensor], algorithm: Literal["norm", "value"], bound: float, also: Tensor | None = None
) -> Reading:
    """Reads gradients, then clips them in place: `read`, then `clip_norm` or `clip_value` with what it gave.

    Args:
        grads: At least one dense floating tensor, in place.
        algorithm: Which of the two.
        bound: The largest norm, or the largest value; positive.
        also: See `read`; the clip does not go by it: gradients that are finite are clipped, stepped or not.

    Returns:
        The reading from before the clip.
    """
    reading = read(grads)
    if algorithm == "norm":
        clip_norm(grads, reading.norm, bound)
    else:
        clip_value(grads, reading.found_inf, bound)
    return reading if also is None else Reading(reading.norm, torch.maximum(reading.found_inf, also))


def refresh(halves: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Rounds each float32 master into its half weight, in place.

    Args:
        halves: The half weights.
        masters: Their masters, of the same shapes.
    """
    if halves:
        torch._foreach_copy_(list(halves), list(masters))


def adopt(halves: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Takes over edits of half weights: ``master = where(half == round(master), master, float(half))``, in place.

    Args:
        halves: The half weights, unchanged.
        masters: Their float32 masters, of the same shapes; a value moves only where the half value was edited.
    """
    if not halves:
        return
    if halves[0].is_cpu and not _edited(list(halves), list(masters)):
        return
    for half, master in zip(halves, masters, strict=True):
        master.copy_(torch.where(half == master.to(half.dtype), master, half.to(master.dtype)))


def _edited(halves: list[Tensor], masters: list[Tensor]) -> bool:
    """Tells whether any half weight is not what its master is rounded to; a NaN, unequal to itself, counts as such."""
    off = list(torch._foreach_neg(halves))  # the cheapest call that makes a list like another
    torch._foreach_copy_(off, masters)
    torch._foreach_sub_(off, halves)
    torch._foreach_abs_(off)
    off = list(filter(Tensor.numel, off))  # an empty tensor has no maximum
    if not off:
        return False
    _, *mixed = set(map(dtype_of, off))
    if mixed:
        off = [x.float() for x in off]
    return bool(torch.stack(torch._foreach_max(off)).max().tolist())


def update(
    state: Tensor, first_bad: Tensor, loss: Tensor | None, rule: ScaleRule, overflowed: Tensor | None = None
) -> None:
    """Moves a scaler's state on by one backward pass (or one delayed window), and clears ``first_bad``.

    Args:
        state: float32 vector of `ScaleState`, in place.
        first_bad: 0-dim int32, from `collect`; `FIRST_BAD_NONE` afterwards.
        loss: The loss before scaling, any shape, or None where it is not to be looked at.
        rule: The scaler's settings.
        overflowed: 0-dim float32, becomes 1 if ``first_bad`` named a gradient, else 0; None if nobody asks.
    """
    if overflowed is not None:
        overflowed.copy_(first_bad < FIRST_BAD_NONE)
    if state.is_cpu:
        bad: Any = first_bad.tolist()
        finite = bad == FIRST_BAD_NONE or loss is None or bool(torch.isfinite(loss).all())
        state.numpy()[:] = next_state(ScaleState(*state.tolist()), bad, finite, rule)  # a quarter of a `copy_`'s time
        if bad != FIRST_BAD_NONE:
            first_bad.fill_(FIRST_BAD_NONE)
        return
    loss_finite = torch.ones_like(first_bad, dtype=torch.bool) if loss is None else torch.isfinite(loss).all()
    moved = next_state(ScaleState(*state.unbind()), first_bad, loss_finite, rule, where=torch.where)
    state.copy_(torch.stack(moved))
    first_bad.fill_(FIRST_BAD_NONE)


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
    """Collects all gradients of a backward pass, then moves its scaler on: `collect`, then `update`.

    Args:
        new: See `collect`; may be empty.
        into: See `collect`.
        inv_scale: See `collect`; it may be part of ``state``.
        first_bad: See `collect`; `FIRST_BAD_NONE` afterwards.
        state: See `update`.
        loss: See `update`.
        rule: See `update`.
        overflowed: See `update`.
        widen: See `collect`.
        in_place: See `collect`.

    Returns:
        See `collect`.
    """
    out = collect(new, into, inv_scale, first_bad, widen=widen, in_place=in_place) if new else []
    update(state, first_bad, loss, rule, overflowed)
    return out
