"""`EMAWeights`: an exponential moving average of the float32 weights that moves only when they did."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from lightning_amp.precision import AmpPrecision


class EMAWeights(Callback):
    """Averages the float32 weights: the masters at O2, the weights themselves elsewhere.

    A half average stands still: at decay 0.9999 each move is below half a unit in the last place. An average moves at
    the end of a batch in which the optimizer that owns the weight really stepped, so a skipped step, a window that is
    still open and an idle optimizer leave it alone. Validation runs on the averages; training goes on, bit for bit,
    with the weights it had. With torch's fused optimizers finding out costs one wait for the device a batch.

    Args:
        decay: How much of the average stays at each move, between 0 and 1.
        evaluate: Whether validation and test run on the averages.

    Raises:
        ValueError: ``decay`` is not between 0 and 1.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> ema = EMAWeights(decay=0.999)
        >>> trainer = Trainer(accelerator="cpu", callbacks=[ema], logger=False, enable_checkpointing=False)
    """

    def __init__(self, decay: float = 0.999, evaluate: bool = True) -> None:
        if not (isinstance(decay, (int, float)) and 0.0 < decay < 1.0):
            raise ValueError(f"decay={decay!r} cannot be used. Use a number between 0 and 1, such as 0.999.")
        self.decay = decay
        self.evaluate = evaluate
        self._averages: dict[str, Tensor] = {}
        self._moves: list[int] = []
        self._lent: dict[str, Tensor] | None = None
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def averages(self) -> Mapping[str, Tensor]:
        """Returns the averages, float32, by the parameter's name in the LightningModule."""
        return self._averages

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        params = {name: p for name, p in pl_module.named_parameters() if p.is_floating_point()}
        values = _fp32(trainer, list(params.values()))
        for (name, param), value in zip(params.items(), values, strict=True):
            # A resumed average was loaded by now; where the module is new, so is its average.
            known = self._averages.get(name)
            self._averages[name] = value.clone() if known is None else known.to(param.device)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._moves = _moves(trainer)  # not before: a resumed training has its counts only now

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        before, self._moves = self._moves, _moves(trainer)
        moved = [o for o, old, new in zip(trainer.optimizers, before, self._moves, strict=True) if new > old]
        owned = {id(p) for o in moved for group in o.param_groups for p in group["params"]}
        params = {n: p for n, p in pl_module.named_parameters() if id(p) in owned and n in self._averages}
        if params:
            self._average([self._averages[n] for n in params], _fp32(trainer, list(params.values())), 0)

    @contextmanager
    def swapped(self, pl_module: "pl.LightningModule") -> Iterator[None]:
        """Has the module hold the averages inside the block, in the dtype of its weights.

        Args:
            pl_module: The module that is being trained.
        """
        self._swap_in(pl_module)
        try:
            yield
        finally:
            self._swap_out(pl_module)

    def _swap_in(self, pl_module: "pl.LightningModule") -> None:
        if self._lent is not None:
            return
        self._lent = {n: p.detach().clone() for n, p in pl_module.named_parameters() if n in self._averages}
        self._write(pl_module, self._averages)

    def _swap_out(self, pl_module: "pl.LightningModule") -> None:
        if self._lent is not None:
            self._write(pl_module, self._lent)
            self._lent = None

    @staticmethod
    def _write(pl_module: "pl.LightningModule", values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, param in pl_module.named_parameters():
                if name in values:
                    param.copy_(values[name])

    @override
    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self.evaluate:
            self._swap_in(pl_module)

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._swap_out(pl_module)

    @override
    def on_test_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.on_validation_start(trainer, pl_module)

    @override
    def on_test_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._swap_out(pl_module)

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._swap_out(pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "averages": {name: value.cpu() for name, value in self._averages.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._averages = dict(state_dict["averages"])


def _plugin(trainer: "pl.Trainer") -> AmpPrecision | None:
    plugin = trainer.precision_plugin
    return plugin if isinstance(plugin, AmpPrecision) and not plugin.config.passive else None


def _moves(trainer: "pl.Trainer") -> list[int]:
    """Returns how often each optimizer really stepped so far; under another plugin, what Lightning counts."""
    plugin = _plugin(trainer)
    if plugin is None:
        return [trainer.global_step] * len(trainer.optimizers)
    return [plugin.real_steps(o) for o in trainer.optimizers]


def _fp32(trainer: "pl.Trainer", params: list[Tensor]) -> list[Tensor]:
    plugin = _plugin(trainer)
    return [p.detach().float() for p in params] if plugin is None else plugin.fp32_values(params)
