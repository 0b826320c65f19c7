"""When a backward pass begins that the user runs: not with the block it is run in, but when autograd sets out."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from lightning_amp.pending import Window


class AwaitedBackward:
    """A backward pass of a scaled loss.

    Args:
        begin: Begins the pass.
    """

    def __init__(self, begin: Callable[[], Window]) -> None:
        self.window: Window | None = None
        """The pass, None as long as it has not begun."""
        self._begin = begin

    def at_once(self) -> AbstractContextManager[None]:
        """Begins the pass, and returns a block to run it in."""
        self._start()
        return nullcontext()

    @contextmanager
    def watch(self, scaled: Tensor, carries_scale: bool) -> Iterator[None]:
        """Has the pass begin when autograd reaches the scaled loss inside the block, and refuses that after the block.

        Until then gradients are the user's, to be zeroed, say, or added to by a loss that carries no scale.

        Args:
            scaled: The scaled loss.
            carries_scale: Whether it differs from the loss.
        """
        if not scaled.requires_grad:  # torch tells what is wrong as soon as it is differentiated
            yield
            return
        handle = scaled.register_hook(self._start)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            handle.remove()
            if carries_scale:
                scaled.register_hook(_refuse)  # type: ignore[no-untyped-call]

    def _start(self, _: object = None) -> None:
        if self.window is None:  # a graph may be gone through twice in a block
            self.window = self._begin()


def _refuse(_: Tensor) -> None:
    raise RuntimeError(
        "A scaled loss was differentiated after its scale_loss block, where nobody would take the scale out of its "
        "gradients. Call its backward() inside the block."
    )
