"""What may be asked of an engine: outcomes, accounts, scales, masters, its state."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from lightning_amp import checkpoint
from lightning_amp.alarm import Alarm
from lightning_amp.loss_scaler import LossScalers
from lightning_amp.opt_levels import AmpConfig
from lightning_amp.outcomes import LossAccount, Outcome, OutcomeRecord
from lightning_amp.saved_state import read
from lightning_amp.stepper import Stepper


class EngineAnswers:
    """The part of `Engine` that is asked; what it is asked about, the other part sets.

    Attributes:
        config: The level and its settings.
        optimizers: All optimizers of the training.
        scalers: Its scalers.
    """

    config: AmpConfig
    optimizers: list[Any]
    scalers: LossScalers
    _alarm: Alarm
    _modules: Sequence[nn.Module]
    _num_losses: int
    _steppers: list[Stepper]

    def index(self, optimizer: Any) -> int:
        """Returns the place of ``optimizer`` among this engine's.

        Args:
            optimizer: One of them, or a wrapper: one that keeps it as ``_optimizer`` (as Lightning's does), or one that
                has the very list of its ``param_groups``.

        Raises:
            ValueError: It is none of them.
        """
        for i, mine in enumerate(self.optimizers):
            if mine is optimizer:
                return i
        raw = getattr(optimizer, "__dict__", {}).get("_optimizer", optimizer)
        for i, mine in enumerate(self.optimizers):
            if mine is raw or mine.param_groups is getattr(raw, "param_groups", None):
                return i
        raise ValueError(
            f"{type(raw).__name__} is not one of the {len(self.optimizers)} optimizers of this training. Use those "
            "that it was started with (self.optimizers() in a LightningModule)."
        )

    def name_of(self, param: Tensor) -> str:
        """Returns a parameter's name in its model, or its shape where it is in none."""
        for module in self._modules:
            for name, candidate in module.named_parameters():
                if candidate is param:
                    return name
        return f"a parameter of shape {list(param.shape)}"

    def stepping(self, optimizer: Any) -> bool:
        """Tells whether it is this engine that runs the ``step`` of ``optimizer`` now."""
        return self._steppers[self.index(optimizer)].stepping

    def lent_masters(self, optimizer: Any) -> AbstractContextManager[None]:
        """Has ``optimizer`` hold its float32 masters inside the block: to read, edit or step them.

        Edits of half weights are taken over on entering; the half weights are refreshed on leaving.

        Args:
            optimizer: One of this engine's.
        """
        return self._steppers[self.index(optimizer)].lent()

    def outcome(self, optimizer: Any) -> Outcome | None:
        """Returns what the latest ``step()`` of ``optimizer`` did, None before the first.

        Waits for the device where only it knows.

        Args:
            optimizer: One of this engine's.
        """
        return self._steppers[self.index(optimizer)].record.latest

    def record(self, optimizer: Any) -> OutcomeRecord:
        """Returns all that is known of the steps of ``optimizer``; asking it waits for nothing unless it says so."""
        return self._steppers[self.index(optimizer)].record

    def causes(self) -> list[str]:
        """Returns a sentence for each loss whose latest backward pass overflowed; one host synchronisation a scaler."""
        return self._alarm.causes()

    def accounts(self) -> dict[str, LossAccount]:
        """Returns what each loss scale has been through, by name: one host synchronisation each."""
        return {scaler.name: scaler.account() for scaler in self.scalers}

    def counts(self, optimizer: Any) -> dict[Outcome, int]:
        """Returns how often each outcome occurred for ``optimizer``; waits as `outcome` does."""
        return self._steppers[self.index(optimizer)].record.counts

    def loss_scales(self) -> dict[str, float]:
        """Returns every scaler's present scale by name: one host synchronisation each."""
        return {scaler.name: scaler.read().scale for scaler in self.scalers}

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers, strings, lists and dicts: the scalers and what became of the optimizers' steps.

        One host synchronisation a scaler.
        """
        records = [stepper.record.state_dict() for stepper in self._steppers]
        return checkpoint.write(self.config, self._num_losses, self.scalers, records)

    def load_state_dict(self, state: Any, name: str = "state") -> list[str]:
        """Takes over what of a saved state fits; the scalers there were are forgotten.

        Args:
            state: From `state_dict`, also of an older version or another training, from Apex's ``amp.state_dict()`` or
                from a `torch.amp.GradScaler`.
            name: How messages call it.

        Returns:
            What was dropped or starts anew, in words.

        Raises:
            CheckpointError: It is damaged or of no known format; nothing is taken over.
        """
        fitted = checkpoint.fit(read(state, name), self.config, self._num_losses, len(self.optimizers))
        self.scalers.replace(fitted.scalers)
        for stepper, record in zip(self._steppers, fitted.optimizers, strict=False):
            stepper.record.load_state_dict(record)
        return fitted.left_out
