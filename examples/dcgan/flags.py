"""The command in the form of the DCGAN script of PyTorch and Apex: ``python -m examples.dcgan --dataset digits``."""

from datetime import timedelta
from typing import Literal

import lightning.pytorch as pl
from jsonargparse import ArgumentParser

from examples.dcgan import outputs
from examples.dcgan.data import ImageData, Name, channels
from examples.dcgan.module import DCGAN
from lightning_amp import AmpPrecision


def train(
    dataset: Name = "digits",
    dataroot: str = "./",
    workers: int = 2,
    batchSize: int = 64,
    imageSize: int = 64,
    nz: int = 100,
    ngf: int = 64,
    ndf: int = 64,
    niter: int = 25,
    lr: float = 0.0002,
    beta1: float = 0.5,
    ngpu: int = 1,
    netG: str | None = None,
    netD: str | None = None,
    outf: str = ".",
    manualSeed: int = 2809,
    classes: str = "bedroom",
    opt_level: Literal["O0", "O1", "O2", "O3"] = "O1",
    loss_scale: float | Literal["dynamic"] | None = None,
    ckpt_path: str | None = None,
    minutes: float | None = None,
) -> pl.Trainer:
    """Trains a DCGAN in mixed precision.

    Args:
        dataset: The images; digits and fake need no download.
        dataroot: Folder that holds the data, or that it is downloaded to.
        workers: Processes that load images.
        batchSize: Images in a batch.
        imageSize: Side of the images, a power of two from 16 on.
        nz: Length of the noise vector.
        ngf: Channels of the generator's last layer but one.
        ndf: Channels of the discriminator's first layer.
        niter: Epochs.
        lr: Learning rate.
        beta1: Adam's first decay rate.
        ngpu: Devices; more than one train in parallel (DDP).
        netG: File with the generator's weights to go on from.
        netD: File with the discriminator's weights to go on from.
        outf: Folder for pictures, weights, checkpoints and logs.
        manualSeed: Seed of all random numbers.
        classes: Scenes of lsun, separated by commas.
        opt_level: O0 float32, O1 autocast, O2 half weights with float32 masters, O3 half throughout.
        loss_scale: A number, or dynamic; what the level sets if left out.
        ckpt_path: Checkpoint of a stopped training to go on from.
        minutes: Stop after so many minutes, whatever niter says.

    Returns:
        The trainer, after the training.
    """
    pl.seed_everything(manualSeed, workers=True)
    data = ImageData(dataset, dataroot, imageSize, batchSize, workers, classes)
    model = DCGAN(imageSize, channels(dataset), nz, ngf, ndf, lr, beta1, weights_g=netG, weights_d=netD)
    trainer = pl.Trainer(
        plugins=[AmpPrecision(opt_level, loss_scale=loss_scale, num_losses=3)],
        devices=max(ngpu, 1),
        # One wrapper holds both networks, and each loss leaves one of them unused.
        strategy="ddp_find_unused_parameters_true" if ngpu > 1 else "auto",
        max_epochs=niter,
        max_time=None if minutes is None else timedelta(minutes=minutes),
        callbacks=[*outputs.views(), *outputs.callbacks(outf)],
        default_root_dir=outf,
        logger=outputs.loggers(outf),
        log_every_n_steps=10,
    )
    trainer.fit(model, data, ckpt_path=ckpt_path)
    if trainer.is_global_zero:
        print(outputs.summary(trainer, outf))
    return trainer


def run() -> None:
    """Parses the command line and trains."""
    parser = ArgumentParser(prog="python -m examples.dcgan", description="Trains a DCGAN in mixed precision.")
    parser.add_function_arguments(train, skip={"loss_scale"})
    parser.add_argument(
        "--loss-scale", "--loss_scale", type=float | Literal["dynamic"] | None, help="A number, or dynamic."
    )
    train(**vars(parser.parse_args()))
