"""A backward pass under way, and gradients that still carry its scale when it is over."""

from dataclasses import dataclass, field

from torch import Tensor

from lightning_amp.loss_scaler import Scale


@dataclass
class Pending:
    """Gradients that still carry the scale of a delayed backward pass.

    Attributes:
        scale: The scale they carry.
        params: Whose they are.
        grads: The tensors themselves: where ``.grad`` is another tensor by now, it was replaced and is true.
        losses: The losses they came from.
        held: Whether a distributed wrapper has yet to reduce them, so that nobody may touch them.
        liable: The optimizers, by index, that answer for an overflow in them.
    """

    scale: Scale
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    held: bool = False
    liable: set[int] = field(default_factory=set)

    def present(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the parameters and gradients that are still there."""
        return [(p, g) for p, g in zip(self.params, self.grads, strict=True) if p.grad is g]

    def drop_replaced(self) -> None:
        """Forgets the gradients that are not there any more."""
        kept = self.present()
        self.params, self.grads = [p for p, _ in kept], [g for _, g in kept]


@dataclass
class Window:
    """One backward pass under way.

    Attributes:
        scale: The scale it runs under.
        live: The parameters that may get a gradient.
        olds: Their true gradients, set aside.
        delay: Whether its gradients stay pending.
        hold: Whether they are not reduced yet.
        versions: Versions of the gradients held so far, by which those that are reduced now are told.
    """

    scale: Scale
    live: list[Tensor]
    olds: list[Tensor | None]
    delay: bool
    hold: bool
    versions: list[int]
