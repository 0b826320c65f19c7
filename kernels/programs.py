"""Programs: for each kernel, how the plan of a launch is made from the facts about its lists."""

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from lightning_amp.kernels import tables
from lightning_amp.kernels.clip import clip_kernel
from lightning_amp.kernels.collect import ADD, SCALE, WRITE, collect_kernel
from lightning_amp.kernels.launches import Launcher
from lightning_amp.kernels.plans import Listing, Place
from lightning_amp.kernels.read import PROGRAMS, read_kernel
from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.kernels.scale_rule import ScaleRule
from lightning_amp.kernels.tables import Tables
from lightning_amp.kernels.tiles import CHUNK
from lightning_amp.kernels.update_scale import update_kernel
from lightning_amp.kernels.weights import adopt_kernel, refresh_kernel

TYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _size(dtype: Any) -> int:
    return int(dtype.primitive_bitwidth) // 8


def _one_list(listing: Listing, like: Tensor) -> Tables:
    facts = listing.facts

    def kind(i: int) -> Any:
        return TYPES.get(facts.dtypes[i]) if facts.layout(i) else None

    return tables.build(facts, listing.place, like, kind)


def _bytes(listed: Tables) -> int:
    return sum(n * _size(kind) for n, kind in zip(listed.elements, listed.kinds, strict=True))


class Numbers(NamedTuple):
    """A scaler's rule as the kernels take it."""

    values: tuple[float, ...]
    excuse_loss: bool
    dynamic: bool

    @staticmethod
    @lru_cache
    def of(rule: ScaleRule) -> "Numbers":
        """Returns the numbers of ``rule``."""
        values = (
            float(rule.growth_factor),
            float(rule.backoff_factor),
            float(rule.growth_interval),
            float(rule.min_scale),
            float(rule.max_scale),
            float(rule.hysteresis),
        )
        return Numbers(values, rule.excuse_loss, rule.dynamic)


class Move(NamedTuple):
    """A scaler that the last program of a collect moves on.

    Attributes:
        state: Its state.
        loss: The loss, one value, or None where it is not to be looked at.
        rule: How it moves.
        overflowed: Where to tell whether the pass overflowed, or None.
    """

    state: Tensor
    loss: Tensor | None
    rule: ScaleRule
    overflowed: Tensor | None

    @property
    def key(self) -> Hashable:
        """What a plan depends on in it."""
        return self.rule, self.loss is not None and self.loss.dtype, self.overflowed is None


class CollectPlan:
    """``out = [out +] new * inv_scale``, and the move of the scaler.

    Args:
        source: The new gradients.
        target: Where the results go; ``source`` itself where all stay in place.
        added: For each whether it is added to what is there, None for none.
        scaled: Whether it is multiplied.
        move: The scaler to move on, None for none.
        like: Any of the tensors.
    """

    def __init__(
        self,
        source: Listing,
        target: Listing,
        added: tuple[bool, ...] | None,
        scaled: bool,
        move: Move | None,
        like: Tensor,
    ) -> None:
        write = scaled or target is not source

        def kind(i: int) -> Any:
            new, out = TYPES.get(source.facts.dtypes[i]), TYPES.get(target.facts.dtypes[i])
            layout = source.facts.layout(i)
            if new is None or out is None or layout is False or layout != target.facts.layout(i):
                return None
            add = added is not None and added[i]
            return new, out, SCALE * scaled + ADD * add + WRITE * write

        self._tables = tables.build(source.facts, source.place, like, kind)
        self.rest = self._tables.rest
        self.moves = move is not None and not self.rest
        """Whether the scaler is moved on: only where every gradient is among those that the kernel looks at."""
        numbers = Numbers((0.0,) * 6, False, False) if move is None else Numbers.of(move.rule)
        self._numbers = numbers.values
        self._ticket = like.new_zeros(1, dtype=torch.int32)
        self._launch = Launcher(
            collect_kernel,
            source.place.device,
            max(self._tables.programs, 1) if self.moves else self._tables.programs,
            sum(
                n * (_size(new) + _size(out) * (bool(flags & ADD) + bool(flags & WRITE)))
                for n, (new, out, flags) in zip(self._tables.elements, self._tables.kinds, strict=True)
            ),
            MOVE=self.moves,
            LOOK_AT_LOSS=move is not None and move.loss is not None,
            EXCUSE_LOSS=numbers.excuse_loss,
            DYNAMIC=numbers.dynamic,
            TELL=move is not None and move.overflowed is not None,
            KINDS=self._tables.kinds,
            BLOCK=CHUNK,
        )

    def launch(
        self,
        source: Listing,
        target: Listing,
        inv_scale: Tensor | None,
        first_bad: Tensor,
        offset: int,
        move: Move | None,
    ) -> None:
        """Launches the kernel for lists with the plan's facts."""
        factor = first_bad if inv_scale is None else inv_scale
        state, loss, overflowed = (first_bad, None, None) if move is None else (move.state, move.loss, move.overflowed)
        self._launch(
            self._tables.chunks,
            self._tables.sizes,
            source.row,
            target.row,
            factor,
            first_bad,
            offset,
            self._ticket,
            state,
            first_bad if loss is None else loss,
            *self._numbers,
            state if overflowed is None else overflowed,
        )


class ReadPlan:
    """Norm and finiteness of one list, with the scratch that takes."""

    def __init__(self, listing: Listing, also: bool, like: Tensor) -> None:
        self._tables = _one_list(listing, like)
        self.rest = self._tables.rest
        partial = torch.float64 if torch.float64 in listing.facts.kinds else torch.float32
        self._partials = like.new_empty(PROGRAMS, dtype=partial)
        self._ticket = like.new_zeros(1, dtype=torch.int32)
        self._launch = Launcher(
            read_kernel,
            listing.place.device,
            min(max(self._tables.programs, 1), PROGRAMS),
            _bytes(self._tables),
            ALSO=also,
            KINDS=self._tables.kinds,
            BLOCK=CHUNK,
        )

    def launch(self, listing: Listing, result: Tensor, also: Tensor | None) -> None:
        """Launches the kernel for a list with the plan's facts."""
        t = self._tables
        least = result if also is None else also
        self._launch(t.chunks, t.programs, t.sizes, listing.row, self._partials, self._ticket, result, least)


class ClipPlan:
    """One list scaled to a norm, or clamped to a value."""

    def __init__(self, listing: Listing, by_value: bool, like: Tensor) -> None:
        self._tables = _one_list(listing, like)
        self.rest = self._tables.rest
        one_pass = _bytes(self._tables)
        self._launch = Launcher(
            clip_kernel,
            listing.place.device,
            self._tables.programs,
            one_pass if by_value else 0,
            one_pass if by_value else 2 * one_pass,
            BY_VALUE=by_value,
            KINDS=self._tables.kinds,
            BLOCK=CHUNK,
        )

    def launch(self, listing: Listing, reading: Tensor, bound: float) -> None:
        """Launches the kernel for a list with the plan's facts."""
        self._launch(self._tables.chunks, self._tables.sizes, listing.row, reading, bound)


class WeightsPlan:
    """One list of half weights and their masters: these very tensors, since it keeps fingerprints of their values."""

    def __init__(self, halves: Listing, masters: Listing, like: Tensor) -> None:
        def kind(i: int) -> Any:
            half, layout = halves.facts.dtypes[i], halves.facts.layout(i)
            known = half in HALF_DTYPES and masters.facts.dtypes[i] is torch.float32
            return (TYPES[half], tl.float32) if known and layout and layout == masters.facts.layout(i) else None

        self._tables = tables.build(halves.facts, halves.place, like, kind)
        self.rest = self._tables.rest
        marks = like.new_zeros(max(self._tables.programs, 1), dtype=torch.int64)
        self._args = (self._tables.chunks, self._tables.sizes, halves.row, masters.row, marks)
        n = sum(self._tables.elements)
        where = halves.place.device, self._tables.programs
        constants: dict[str, Any] = {"KINDS": self._tables.kinds, "BLOCK": CHUNK}
        self._refresh = Launcher(refresh_kernel, *where, 6 * n, **constants)
        self._adopt = Launcher(adopt_kernel, *where, 2 * n, 10 * n, **constants)

    def refresh(self) -> None:
        """Launches the kernel that rounds the masters into the half weights."""
        self._refresh(*self._args)

    def adopt(self) -> None:
        """Launches the kernel that takes edited half weights over."""
        self._adopt(*self._args)


class UpdatePlan:
    """The move of a scaler's state by one rule."""

    def __init__(self, place: Place, move: Move) -> None:
        numbers = Numbers.of(move.rule)
        self._numbers = numbers.values
        self._launch = Launcher(
            update_kernel,
            place.device,
            1,
            warps=1,
            LOOK_AT_LOSS=move.loss is not None,
            EXCUSE_LOSS=numbers.excuse_loss,
            DYNAMIC=numbers.dynamic,
            TELL=move.overflowed is not None,
        )

    def launch(self, move: Move, first_bad: Tensor) -> None:
        """Launches the kernel for one scaler."""
        loss = first_bad if move.loss is None else move.loss
        overflowed = move.state if move.overflowed is None else move.overflowed
        self._launch(move.state, first_bad, loss, *self._numbers, overflowed)
