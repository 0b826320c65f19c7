"""What the callbacks ask of a Trainer."""

import importlib.util
from pathlib import Path

import lightning.pytorch as pl

from lightning_amp.precision import AmpPrecision


def active_plugin(trainer: "pl.Trainer") -> AmpPrecision | None:
    """Returns the trainer's plugin, None where it is another or, at plain O0, leaves all to Lightning."""
    plugin = trainer.precision_plugin
    return plugin if isinstance(plugin, AmpPrecision) and not plugin.config.passive else None


def batches_begun(trainer: "pl.Trainer") -> int:
    """Returns how many training batches began, over all epochs and what was resumed from."""
    return trainer.fit_loop.total_batch_idx + 1


def under_root(trainer: "pl.Trainer", path: Path) -> Path:
    """Returns where a path of a user's leads: a relative one from the trainer's ``default_root_dir``."""
    return Path(trainer.default_root_dir) / path


def logger_step(trainer: "pl.Trainer") -> int:
    """Returns the step that Lightning's own monitors log under: batches that stepped. It has no public name."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def require(package: str, callback: object) -> None:
    """Raises, at the start of a training and not at its end, where a package is missing.

    Args:
        package: The package's import name.
        callback: What needs it.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{type(callback).__name__} draws with {package}, which is not installed. Try pip install "
            "'lightning-amp[examples]', or leave the callback out."
        )
