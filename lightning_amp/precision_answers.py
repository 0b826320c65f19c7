"""What the user may ask the Lightning plugin while it trains: scales, outcomes, masters, true gradients."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_amp.engine import Engine
from lightning_amp.loss_scaler import LossScalers, read_accounts
from lightning_amp.master_weights import MasterWeights, merged
from lightning_amp.opt_levels import AmpConfig
from lightning_amp.outcomes import LossAccount, Outcome


class Answers:
    """The part of `AmpPrecision` that is asked; what it is asked about, the other part sets.

    Attributes:
        config: The level and its settings.
    """

    config: AmpConfig
    _masters: MasterWeights
    _scalers: LossScalers | None
    _engine: Engine | None

    @property
    def engine(self) -> Engine:
        """The engine of the training under way.

        Raises:
            RuntimeError: There is none: before `fit`, or at plain O0.
        """
        if self._engine is None:
            raise RuntimeError(
                "There is no engine: it exists from fit on, at O1, O2 and O3 (O0 leaves all to Lightning)."
            )
        return self._engine

    def masters(self, optimizer: Any) -> AbstractContextManager[None]:
        """Has ``optimizer`` hold its float32 masters inside the block, to read or to edit them.

        At plain O0 it holds them anyway: they are the model's weights.

        Args:
            optimizer: One of the trainer's, wrapped by Lightning or not.
        """
        return nullcontext() if self.config.passive else self.engine.lent_masters(optimizer)

    def outcome(self, optimizer: Any) -> Outcome | None:
        """Returns what the latest ``step()`` of ``optimizer`` did; waits for the device where it alone knows.

        Args:
            optimizer: One of the trainer's, wrapped by Lightning or not.
        """
        return self.engine.outcome(optimizer)

    def real_steps(self, optimizer: Any) -> int:
        """Returns how often ``optimizer`` really stepped; waits for the device where it alone knows of the latest step.

        Args:
            optimizer: One of the trainer's, wrapped by Lightning or not.
        """
        return self.engine.counts(optimizer)[Outcome.STEPPED]

    def fp32_values(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Returns the float32 value that each parameter stands for: that of its master at O2.

        Args:
            params: Parameters of the module that is being trained.

        Returns:
            Tensors that must not be written to: fresh ones for half parameters, the parameters' own values for others.
        """
        masters = [(p, self._masters.of(p)) for p in params]
        return [p.detach().float() if master is None else merged(p, master) for p, master in masters]

    def grad(
        self, outputs: Any, inputs: Any, grad_outputs: Any = None, *, create_graph: bool = False, **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad` under a loss scale of its own; see `Engine.grad`. At plain O0 it is torch's.

        Args:
            outputs: What to differentiate.
            inputs: With respect to what.
            grad_outputs: As in `torch.autograd.grad`.
            create_graph: Whether the result can be differentiated again.
            **kwargs: ``retain_graph``, ``allow_unused``.

        Returns:
            The true gradients.
        """
        grad = torch.autograd.grad if self.config.passive else self.engine.grad
        return tuple(grad(outputs, inputs, grad_outputs, create_graph=create_graph, **kwargs))

    def accounts(self) -> dict[str, LossAccount]:
        """Returns what each loss scale has been through, by name: one host synchronisation each. Empty at O0."""
        return {} if self._scalers is None else {s.name: s.account() for s in self._scalers}

    def read_accounts(self, norms: list[Tensor]) -> tuple[dict[str, LossAccount], list[float]]:
        """Returns what `accounts` does, and numbers of the caller's beside, with one host synchronisation in all.

        Args:
            norms: 0-dim tensors, from `grad_norm` say.
        """
        scalers = [] if self._scalers is None else list(self._scalers)
        return read_accounts(scalers, norms)

    def grad_norm(self, optimizer: Any) -> Tensor:
        """Returns the total 2-norm of the true gradients of ``optimizer``: 0-dim float32, no host synchronisation.

        Args:
            optimizer: One of the trainer's, wrapped by Lightning or not.
        """
        return self.engine.norm(optimizer)

    def loss_scales(self) -> dict[str, float]:
        """Returns each scaler's present scale by name; one host synchronisation each. Empty at O0."""
        return {} if self._scalers is None else {s.name: s.read().scale for s in self._scalers}
