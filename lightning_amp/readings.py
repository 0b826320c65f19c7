"""What is known of gradients that have been read, for as long as nobody touches them."""

from operator import is_
from weakref import ref

from torch import Tensor

from lightning_amp.kernels.reference import Reading


class Known:
    """A reading of one optimizer's gradients, kept from a clip to the step that follows it.

    Clipping makes no finite value non-finite, and leaves a list that holds a non-finite one alone: so the step need not
    read a second time what the clip has read. The gradients are not kept alive.

    Args:
        grads: As they are now, after the clip.
        reading: From before it.
        also: What the reading took into account besides the gradients.
    """

    def __init__(self, grads: list[Tensor], reading: Reading, also: Tensor | None) -> None:
        self._grads = list(map(ref, grads))
        self._versions = [g._version for g in grads]
        self._reading = reading
        self.also = also

    def of(self, grads: list[Tensor]) -> Reading | None:
        """Returns the reading if ``grads`` are the same tensors, unchanged, else None.

        A change is seen by the tensor's version; one made through ``.data`` is not.
        """
        same = len(grads) == len(self._grads) and all(map(is_, [g() for g in self._grads], grads))
        return self._reading if same and self._versions == [g._version for g in grads] else None
