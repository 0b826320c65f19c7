"""What a training writes, and where: pictures, weights, checkpoints, logs."""

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from examples.dcgan.pictures import Pictures
from examples.dcgan.progress import LossBar
from examples.dcgan.weights import NetworkWeights


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


def callbacks(outf: str | Path, every_n_steps: int = 100) -> list[pl.Callback]:
    """Returns the callbacks that write under ``outf``, and the progress bar.

    Args:
        outf: The folder for everything.
        every_n_steps: Batches between two grids of samples.
    """
    checkpoints = Path(outf) / "checkpoints"
    return [
        Pictures(str(outf), every_n_steps),
        NetworkWeights(str(outf)),
        ModelCheckpoint(checkpoints, filename="last", enable_version_counter=False),
        InterruptCheckpoint(checkpoints / "interrupted.ckpt"),
        LossBar(),
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
    return (
        f"\nDone: {trainer.current_epoch} epochs. Open\n"
        f"  {folder / f'amp_fake_samples_epoch_{epoch:03d}.png'}  what the generator draws now (one file an epoch)\n"
        f"  {folder / 'real_samples.png'}  what it learned from\n"
        f"  {metrics[0] if metrics else folder}  the losses; or run: tensorboard --logdir {folder / 'tensorboard'}\n"
        f"Weights: {folder / f'netG_epoch_{epoch}.pth'} and netD_epoch_{epoch}.pth\n"
        f"To go on: --ckpt_path {folder / 'checkpoints' / 'last.ckpt'}"
    )
