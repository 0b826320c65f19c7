"""Masters in the user's hands, outside of a step: what is edited there is taken over."""

from typing import Any

from torch import Tensor, nn

from lightning_amp.kernels.devices import Backends
from lightning_amp.master_weights import MasterWeights


class ShownMasters:
    """What `amp.master_params` has handed out since it was last taken back.

    Args:
        masters: Where the masters are.
    """

    def __init__(self, masters: MasterWeights) -> None:
        self._masters = masters
        self._backends = Backends()
        self._shown: list[tuple[Tensor, nn.Parameter, Tensor | None]] = []

    def show(self, params: list[Tensor]) -> list[Tensor]:
        """Returns the parameters, with its master in the place of each that has one, and the same gradients.

        Args:
            params: An optimizer's parameters; edits of half ones are taken over first.
        """
        self.take_back()
        if not self._masters.lend_to_optimizers:
            return params
        self._masters.ensure(params)
        pairs = [(p, m) for p in params if (m := self._masters.of(p)) is not None]
        self._backends.weights("adopt", [p for p, _ in pairs], [m for _, m in pairs])
        for param, master in pairs:
            if param.grad is not None and param.grad.dtype is not master.dtype:
                param.grad = param.grad.to(master.dtype)
            master.grad = param.grad
            self._shown.append((param, master, param.grad))
        masters: dict[Any, Tensor] = dict(pairs)
        return [masters.get(p, p) for p in params]

    def take_back(self) -> None:
        """Takes over what was edited: values, gradients in place, and gradients put in the place of others."""
        if not self._shown:
            return
        shown, self._shown = self._shown, []
        for param, master, grad in shown:
            if master.grad is not grad:
                param.grad = master.grad
            master.grad = None
        # Without a new version: where nothing was edited the values stay, and a graph that saved the weights is good.
        self._backends.weights("refresh", [param.data for param, _, _ in shown], [master for _, master, _ in shown])
