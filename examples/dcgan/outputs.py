"""What a training writes, and where: pictures, weights, checkpoints, logs."""

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from examples.dcgan.weights import NetworkWeights
from lightning_amp.callbacks import AmpReport, ImageGrid, LossScaleMonitor, NonFiniteReport


class InterruptCheckpoint(pl.Callback):
    """Leaves a checkpoint when a training is stopped by Ctrl-C or by an error, and says how to go on.

    Unlike Lightning's `OnExceptionCheckpoint` it never takes up an old one unasked.

    Args:
        file: Where it goes.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Saves, unless no step was made yet."""
        if trainer.global_step > 0:
            trainer.save_checkpoint(self.file)
            rank_zero_info(f"Stopped. To go on, give the same command with --ckpt_path {self.file}")


def callbacks(outf: str | Path) -> list[pl.Callback]:
    """Returns what every training has: weights and checkpoints under ``outf``, and a progress bar.

    Args:
        outf: The folder for everything.
    """
    checkpoints = Path(outf) / "checkpoints"
    return [
        NetworkWeights(str(outf)),
        ModelCheckpoint(checkpoints, filename="last", enable_version_counter=False),
        InterruptCheckpoint(checkpoints / "interrupted.ckpt"),
        TQDMProgressBar(refresh_rate=10),
    ]


def views() -> list[pl.Callback]:
    """Returns what shows how a training goes, as ``configs/dcgan/base.yaml`` names it: a report, scales, pictures."""
    return [
        AmpReport(),
        LossScaleMonitor(),
        NonFiniteReport(limit=3),
        ImageGrid(name="amp_fake_samples", file="{name}_epoch_{epoch:03d}.png", real="real_samples", seed=2809),
    ]


def loggers(outf: str | Path) -> list[Logger]:
    """Returns a CSV and a TensorBoard logger that write under ``outf``."""
    return [CSVLogger(outf, name="csv"), TensorBoardLogger(outf, name="tensorboard")]


def summary(trainer: pl.Trainer, outf: str | Path) -> str:
    """Returns the closing lines: what there is to open.

    Args:
        trainer: One whose `fit` has returned.
        outf: The folder that `callbacks` and `loggers` were given.
    """
    folder, epoch = Path(outf), max(trainer.current_epoch - 1, 0)
    # Not `trainer.log_dir`, which all processes must ask for together.
    metrics = [Path(logger.log_dir) / "metrics.csv" for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    reports = [callback.path(trainer) for callback in trainer.callbacks if isinstance(callback, AmpReport)]  # type: ignore[attr-defined]
    report = f"  {reports[0]}  how the loss scales went, and what was skipped\n" if reports else ""
    return (
        f"\nDone: {trainer.current_epoch} epochs. Open\n"
        f"  {folder / f'amp_fake_samples_epoch_{epoch:03d}.png'}  what the generator draws now (one file an epoch)\n"
        f"  {folder / 'real_samples.png'}  what it learned from\n"
        f"{report}"
        f"  {metrics[0] if metrics else folder}  the losses; or run: tensorboard --logdir {folder / 'tensorboard'}\n"
        f"Weights: {folder / f'netG_epoch_{epoch}.pth'} and netD_epoch_{epoch}.pth\n"
        f"To go on: --ckpt_path {folder / 'checkpoints' / 'last.ckpt'}"
    )
