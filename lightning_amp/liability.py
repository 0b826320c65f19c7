"""What an optimizer remembers of the overflows it is liable for, beyond what its gradients show.

A step is decided by the gradients it would use. Twice that is not enough. A clip by value, or any other edit in place,
can make a number of an infinity: the gradients look fine, and are worth nothing. And Apex's rule asks every optimizer
that was named with a loss to skip its next step if that loss overflowed, also where its own gradients are finite. A
plain flag would outlive `zero_grad`, of which nobody is told; so the flag belongs to the gradients that were there, and
is void once they are gone.
"""

from collections.abc import Callable, Collection, Sequence
from operator import is_
from weakref import ref

import torch
from torch import Tensor

from lightning_amp.loss_scaler import LossScaler


class Liability:
    """What one optimizer is liable for of some backward passes. Nothing here synchronises with the host, or keeps
    gradients alive.

    Args:
        params: Those whose gradients it is about; it is void when all of these gradients are gone.
        norm: Gives the total norm of a list of gradients, 0-dim, on their device.
    """

    def __init__(self, params: list[Tensor], norm: Callable[[list[Tensor]], Tensor]) -> None:
        self._norm = norm
        self.found: Tensor | None = None
        """What a step has to answer for: 0-dim, zero if nothing overflowed, None if nothing was noted."""
        self._if_edited: Tensor | None = None
        self._params = params
        self._grads: list[ref[Tensor]] = []
        self._versions: list[int] = []
        self.void = False

    def is_about(self, params: list[Tensor]) -> bool:
        """Tells whether it is about the gradients of these parameters, and of no others."""
        return len(params) == len(self._params) and all(map(is_, params, self._params))

    def note(self, found: Tensor, *, if_edited: bool = False) -> None:
        """Notes what a backward pass found; `hold` is to follow.

        Args:
            found: 0-dim float32, zero if nothing overflowed.
            if_edited: Whether it counts only once one of these gradients has been edited in place: where the pass gave
                others theirs too, so that only these gradients tell whether it was they that overflowed.
        """
        if if_edited:
            self._if_edited = _either(self._if_edited, found)
        else:
            self.found = _either(self.found, found)

    def hold(self) -> None:
        """Looks which tensors are the gradients: a backward pass may have put sums in their place."""
        held = [(p, p.grad) for p in self._params]
        self._take([(p, g) for p, g in held if g is not None])

    def _take(self, held: list[tuple[Tensor, Tensor]]) -> None:
        grads = [g for _, g in held]
        self._params = [p for p, _ in held]
        self._grads, self._versions = list(map(ref, grads)), [g._version for g in grads]

    def look(self, closely: bool) -> None:
        """Sees whether its gradients are gone, and whether one was edited where that matters.

        Args:
            closely: Whether gradients are about to change, so that what happened until now must be seen now.
        """
        if closely or self._if_edited is not None:
            self.review()
        else:
            self.void = not any(
                p.grad is not None and p.grad is g() for p, g in zip(self._params, self._grads, strict=True)
            )

    def review(self, zeroed_is_gone: bool = False) -> None:
        """Looks at every gradient: forgets those that are gone, and sees which were edited.

        Args:
            zeroed_is_gone: Whether gradients that are all zero are gone, too: before a pass that adds to them.
        """
        columns = zip(self._params, self._grads, self._versions, strict=True)
        held = [(p, p.grad, version) for p, g, version in columns if p.grad is not None and p.grad is g()]
        self.void = not held
        if self.void:
            return
        edited = any(g._version != version for _, g, version in held)
        if edited and self._if_edited is not None:
            self.found, self._if_edited = _either(self.found, self._if_edited), None
        # Only the device knows how they were edited; zeros written through .data are looked for where that is cheap.
        if zeroed_is_gone and self.found is not None and (edited or self.found.is_cpu):
            self.found = self.found * (self._norm([g for _, g, _ in held]) != 0).to(self.found)
        self._take([(p, g) for p, g, _ in held])


def _either(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else torch.maximum(one, other.to(one.device))


class Liabilities:
    """Those of all optimizers of a training.

    Args:
        count: How many optimizers there are.
        norm: As in `Liability`.
    """

    def __init__(self, count: int, norm: Callable[[list[Tensor]], Tensor]) -> None:
        self._norm = norm
        self._all: list[list[Liability]] = [[] for _ in range(count)]
        self.noted: list[Liability] = []
        """Those that there are: mostly none, which costs no call to see."""

    def note(self, scaler: LossScaler, lists: Sequence[Sequence[Tensor]], together: Collection[int]) -> None:
        """Notes what a backward pass found that has just been collected.

        Args:
            scaler: The pass's, which has been moved on.
            lists: Each optimizer's parameters.
            together: The optimizers that answer for it whatever their own gradients are.
        """
        if not scaler.known_clean:
            found, reached = scaler.overflowed, set(map(id, scaler.sources))
            for i, params in enumerate(lists):
                mine = [p for p in params if id(p) in reached]
                if mine:
                    self._about(i, mine).note(found, if_edited=len(mine) < len(reached))
            for i in together:
                mine = [p for p in lists[i] if p.grad is not None]
                self._about(i, mine or [p for j in together for p in lists[j]]).note(found)
        self.hold()

    def _about(self, index: int, params: list[Tensor]) -> Liability:
        """Returns an optimizer's liability for the gradients of some parameters, a new one if there is none."""
        mine = self._all[index]
        for liability in mine:
            if liability.is_about(params):
                return liability
        mine.append(Liability(params, self._norm))
        return mine[-1]

    def hold(self) -> None:
        """See `Liability.hold`."""
        self._tidy()
        for liability in self.noted:
            liability.hold()

    def look(self, closely: bool) -> None:
        """See `Liability.look`."""
        for liability in self.noted:
            liability.look(closely)
        self._tidy()

    def review(self) -> None:
        """See `Liability.review`: before a backward pass."""
        for liability in self.noted:
            liability.review(zeroed_is_gone=True)
        self._tidy()

    def of(self, index: int, forget: bool = False) -> Tensor | None:
        """Returns what an optimizer's step has to answer for: 0-dim, zero if nothing overflowed, None if nothing.

        Args:
            index: The optimizer's place.
            forget: Whether that is settled then.
        """
        found: Tensor | None = None
        for liability in self._all[index]:
            if liability.found is not None:
                found = _either(found, liability.found)
        if forget:
            self._all[index].clear()
            self._tidy()
        return found

    def _tidy(self) -> None:
        for mine in self._all:
            mine[:] = [liability for liability in mine if not liability.void]
        self.noted = [liability for mine in self._all for liability in mine]
