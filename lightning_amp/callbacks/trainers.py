"""What the callbacks ask of a Trainer."""

import lightning.pytorch as pl

from lightning_amp.precision import AmpPrecision


def active_plugin(trainer: "pl.Trainer") -> AmpPrecision | None:
    """Returns the trainer's plugin, None where it is another or, at plain O0, leaves all to Lightning."""
    plugin = trainer.precision_plugin
    return plugin if isinstance(plugin, AmpPrecision) and not plugin.config.passive else None


def logger_step(trainer: "pl.Trainer") -> int:
    """Returns the step that Lightning's own monitors log under: batches that stepped. It has no public name."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
