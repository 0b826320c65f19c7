"""What an optimizer remembers of the overflows it is liable for, beyond what its gradients show.

A step is decided by the gradients it would use. Apex's rule asks for more: every optimizer that was named with a loss
skips its next step if that loss overflowed, also where its own gradients are finite, and also where a clip by value
has made a number of the infinity. A plain flag would outlive `zero_grad`, of which nobody is told; so the flag belongs
to the gradients that were there, and is void once they are gone.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class Liability:
    """The overflows one optimizer is liable for. Nothing here synchronises with the host.

    Args:
        norm: Gives the total norm of a list of gradients, 0-dim, on their device.
    """

    def __init__(self, norm: Callable[[list[Tensor]], Tensor]) -> None:
        self._norm = norm
        self.found: Tensor | None = None
        """What it answers for: 0-dim, zero if nothing overflowed, None if nothing was noted."""
        self._held: list[tuple[Tensor, Tensor, int]] = []

    def note(self, found: Tensor, params: list[Tensor]) -> None:
        """Notes what a backward pass found.

        Args:
            found: 0-dim float32, zero if nothing overflowed.
            params: Those whose gradients it is about; the note is void when all of these gradients are gone.
        """
        self.found = found if self.found is None else torch.maximum(self.found, found.to(self.found.device))
        self.hold(params)

    def hold(self, params: list[Tensor] | None = None) -> None:
        """Looks again which tensors are the gradients: a backward pass may have put sums in their place.

        Args:
            params: As in `note`, or None for the same ones.
        """
        if self.found is not None:
            params = [p for p, _, _ in self._held] if params is None else params
            self._held = [(p, p.grad, p.grad._version) for p in params if p.grad is not None]

    def review(self) -> None:
        """Drops the note if its gradients are gone: None, replaced, or zeroed where they are."""
        if self.found is None:
            return
        held = [(p, g, version) for p, g, version in self._held if p.grad is g]
        if not held:
            self.found, self._held = None, []
        elif any(g._version != version for _, g, version in held):  # edited in place: only the device knows how
            norm = self._norm([g for _, g, _ in held])
            self.found = self.found * (norm != 0).to(self.found)
            self._held = [(p, g, g._version) for p, g, _ in held]

    def settle(self) -> Tensor | None:
        """Returns what the coming step has to answer for, None if nothing, and forgets it."""
        self.review()
        found, self.found, self._held = self.found, None, []
        return found
