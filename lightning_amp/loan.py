"""Masters in an optimizer's hands, for the time of a step."""

from collections.abc import Collection
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_amp.kernels.devices import Backends
from lightning_amp.master_weights import MasterWeights


class Loan:
    """Puts masters into an optimizer's ``param_groups`` and ``state`` in place of the model's parameters, and back.

    Entries change in place, the lists and dicts stay the same objects. A master that another optimizer holds already is
    lent to both: it is taken over once, and its gradient is given back once, by the first.

    Args:
        masters: Whose masters.
        optimizer: Anything with ``param_groups`` and ``state``.
    """

    def __init__(self, masters: MasterWeights, optimizer: Any) -> None:
        self._masters = masters
        self._optimizer = optimizer
        self._backends = Backends()
        self._pairs: list[tuple[Tensor, nn.Parameter]] = []
        self._first: list[tuple[Tensor, nn.Parameter, Tensor | None]] = []
        self._other_state: dict[Any, Any] = {}
        self.held = False
        """Whether the optimizer holds the masters now."""

    def take(self) -> None:
        """Lends: edits of half weights are taken over, and gradients go with the masters."""
        masters = self._masters
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        masters.ensure(params)
        owned = zip(params, masters.of_all(params), strict=True) if masters.lend_to_optimizers else ()
        self._pairs = [(p, m) for p, m in owned if m is not None]
        first = [(p, m) for p, m in self._pairs if id(m) not in masters.lent] if masters.lent else self._pairs
        self._backends.weights("adopt", first)
        for param, master in first:
            if param.grad is not None and param.grad.dtype is not master.dtype:
                param.grad = param.grad.to(master.dtype)
            master.grad = param.grad
            if master.requires_grad is not param.requires_grad:
                master.requires_grad_(param.requires_grad)
        self._first = [(p, m, p.grad) for p, m in first]
        masters.lent.update(map(id, [m for _, m in first]))
        self._exchange([p for p, _ in self._pairs], [m for _, m in self._pairs])
        self.held = True

    def refresh(self) -> None:
        """Refreshes the half weights; copies in place, so that a stale graph raises as in float32."""
        self._backends.weights("refresh", self._pairs)

    def give_back(self) -> None:
        """Refreshes the half weights and puts the model's own parameters back. A second call does nothing."""
        if not self.held:
            return
        self.held = False
        pairs, self._pairs = self._pairs, []
        first, self._first = self._first, []
        self._exchange([m for _, m in pairs], [p for p, _ in pairs])
        for param, master, grad in first:
            if param.grad is grad:  # else it was cleared or replaced through the model
                param.grad = master.grad
            master.grad = None
        self._masters.lent.difference_update(map(id, [m for _, m, _ in first]))
        self._backends.weights("refresh", pairs)

    def _exchange(self, out: list[Any], into: list[Any]) -> None:
        """Puts tensors in place of others.

        A tensor's hash is a call of Python code: tensors are looked up by id, and the dict of the time before is used
        again, which knows their hashes, unless an entry has come, gone or changed.
        """
        to = dict(zip(map(id, out), into, strict=True))
        for group in self._optimizer.param_groups:
            group["params"][:] = map(to.get, map(id, group["params"]), group["params"])
        state = self._optimizer.state
        now, entries = dict(state), self._other_state
        keys = list(map(to.get, map(id, now), now))
        if not _same(keys, entries) or not _same(now.values(), entries.values()):
            entries = dict(zip(keys, now.values(), strict=True))
        state.clear()
        state.update(entries)
        self._other_state = now


def _same(one: Collection[Any], other: Collection[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
