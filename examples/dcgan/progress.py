"""A progress bar with the losses of the module and the loss scales of the plugin."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_amp import AmpPrecision


class LossBar(TQDMProgressBar):
    """Shows, beside what the module logs, each scaler's present loss scale: ``scales=65536/65536/32768``.

    The scales are read where the bar is redrawn, so the host waits for the device no more often than for the losses.

    Args:
        refresh_rate: Batches between two redraws.

    Example:
        >>> LossBar(refresh_rate=10).refresh_rate
        10
    """

    def __init__(self, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Returns what stands at the right of the bar."""
        shown: dict[str, Any] = dict(super().get_metrics(trainer, pl_module))
        shown.pop("v_num", None)
        plugin = trainer.precision_plugin
        if isinstance(plugin, AmpPrecision) and (scales := plugin.loss_scales()):
            shown["scales"] = "/".join(f"{scale:g}" for scale in scales.values())
        return shown
