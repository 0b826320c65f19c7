"""Masters in an optimizer's hands, for the time of a step."""

from collections.abc import Iterable
from itertools import compress
from typing import Any

from torch import Tensor

from lightning_amp.gradients import Gradients
from lightning_amp.kernels.devices import Backends
from lightning_amp.kernels.getters import grad_of, is_there
from lightning_amp.master_weights import MasterWeights


class Loan:
    """Puts masters into an optimizer's ``param_groups`` and ``state`` in place of the model's parameters, and back.

    Entries change in place, the lists and dicts stay the same objects. A master that another optimizer holds already is
    lent to both: it is taken over once, and its gradient is given back once, by the first.

    Args:
        masters: Whose masters.
        optimizer: Anything with ``param_groups`` and ``state``.
        wrapped: The optimizers that it holds, which may have a state of their own.
    """

    def __init__(self, masters: MasterWeights, optimizer: Any, wrapped: Iterable[Any] = ()) -> None:
        self._masters = masters
        self._optimizer = optimizer
        self._holders = [optimizer, *(each for each in wrapped if each is not optimizer)]
        self._backends = Backends()
        # Columns: the half weights, their masters, and for those that nobody else holds their gradients.
        self._halves: list[Tensor] = []
        self._lent: list[Any] = []
        self._first: tuple[list[Tensor], list[Any], list[Tensor | None]] = ([], [], [])
        self._before: list[tuple[list[int], dict[Any, Any]]] = [([], {})] * len(self._holders)
        self.held = False
        """Whether the optimizer holds the masters now."""

    def take(self) -> None:
        """Lends: edits of half weights are taken over, and gradients go with the masters."""
        masters = self._masters
        params = Gradients.of(self._optimizer)
        owned: list[Any] = masters.ensure(params) if masters.lend_to_optimizers else [None] * len(params)
        halves, lent = list(compress(params, map(is_there, owned))), list(filter(is_there, owned))
        self._halves, self._lent = halves, lent
        if masters.lent:
            free = [id(m) not in masters.lent for m in lent]
            halves, lent = list(compress(halves, free)), list(compress(lent, free))
        self._backends.weights("adopt", halves, lent)
        for param, master in zip(halves, lent, strict=True):
            if param.grad is not None and param.grad.dtype is not master.dtype:
                param.grad = param.grad.to(master.dtype)
            master.grad = param.grad
            if master.requires_grad is not param.requires_grad:
                master.requires_grad_(param.requires_grad)
        self._first = halves, lent, list(map(grad_of, halves))
        masters.lent |= set(map(id, lent))
        self._exchange(self._halves, self._lent)
        self.held = True

    def refresh(self) -> None:
        """Refreshes the half weights; copies in place, so that a stale graph raises as in float32."""
        self._backends.weights("refresh", self._halves, self._lent)

    def give_back(self) -> None:
        """Refreshes the half weights and puts the model's own parameters back. A second call does nothing."""
        if not self.held:
            return
        self.held = False
        halves, lent, first = self._halves, self._lent, self._first
        self._halves, self._lent, self._first = [], [], ([], [], [])
        self._exchange(lent, halves)
        for param, master, grad in zip(*first, strict=True):
            if param.grad is grad:  # else it was cleared or replaced through the model
                param.grad = master.grad
            master.grad = None
        self._masters.lent -= set(map(id, first[1]))
        self._backends.weights("refresh", halves, lent)

    def _exchange(self, out: list[Any], into: list[Any]) -> None:
        """Puts tensors in place of others.

        A tensor's hash is a call of Python code: tensors are looked up by id, and the entries of the time before are
        used again, which know their hashes, unless one has come, gone or changed.
        """
        to = dict(zip(map(id, out), into, strict=True))
        for i, holder in enumerate(self._holders):
            for group in holder.param_groups:  # a second time, in what holders share, it changes nothing
                group["params"][:] = map(to.get, map(id, group["params"]), group["params"])
            state = holder.state
            now = dict(state)
            keys, values = list(map(to.get, map(id, now), now)), list(now.values())
            ids, entries = self._before[i]
            if ids != [*map(id, keys), *map(id, values)]:
                entries = dict(zip(keys, values, strict=True))
            self._before[i] = [*map(id, now), *map(id, values)], now
            state.clear()
            state.update(entries)
