"""One backward pass of a loss: under which scale it runs, when it begins, and what becomes of it."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor

from lightning_amp.gradients import Gradients
from lightning_amp.loss_scaler import Scale
from lightning_amp.pending import Window
from lightning_amp.scaled_grad import wide


class BackwardPass:
    """A backward pass that may not have begun yet.

    Args:
        gradients: Of the training.
        params: Those that are to have true gradients after it.
        loss: Any shape, any floating dtype; a half loss is multiplied in float32.
        scale: What it runs under.
        delay: See `Gradients.begin`.
        hold: See there.
    """

    def __init__(
        self, gradients: Gradients, params: list[Tensor], loss: Tensor, scale: Scale, delay: bool, hold: bool
    ) -> None:
        self._gradients = gradients
        self._params = params
        self._loss = loss
        self._scale = scale
        self._delay = delay
        self._hold = hold
        self._window: Window | None = None
        self.scaled = wide(loss) if scale.scale is None else wide(loss) * scale.scale
        """The loss to differentiate: ``loss * scale`` in float32."""

    def begin(self, _: object = None) -> None:
        """Makes room for fresh gradients; a second call does nothing, as a graph may be gone through twice."""
        if self._window is None:
            gradients = self._gradients
            if gradients.liabilities.noted:
                gradients.liabilities.review()  # not sooner: the user may zero inside the block
            self._window = gradients.begin(self._params, self._scale, delay=self._delay, hold=self._hold)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Has the pass begin when autograd reaches the scaled loss inside the block, and refuses that after the block.

        Until then gradients are the user's, to be zeroed, say, or added to by a loss that carries no scale.
        """
        if not self.scaled.requires_grad:  # torch tells what is wrong as soon as it is differentiated
            yield
            return
        handle = self.scaled.register_hook(self.begin)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            handle.remove()
            if self._scale.scale is not None:
                self.scaled.register_hook(_refuse)  # type: ignore[no-untyped-call]

    def fail(self) -> None:
        """Ends it after an error: the gradients are what they were before."""
        if self._window is not None:
            self._gradients.put_back(self._window)
        self._gradients.liabilities.hold()

    def finish(self, create_graph: bool | None, liable: Collection[int]) -> None:
        """Ends it: the gradients are true, or pending where that is asked for.

        Args:
            create_graph: See `Gradients.finish`.
            liable: See there.
        """
        if self._window is not None:
            self._gradients.finish(self._window, self._loss, create_graph, liable)
            if self._window.delay and self._gradients.liabilities.noted:
                self._gradients.liabilities.hold()


def _refuse(_: Tensor) -> None:
    raise RuntimeError(
        "A scaled loss was differentiated after its scale_loss block, where nobody would take the scale out of its "
        "gradients. Call its backward() inside the block."
    )
