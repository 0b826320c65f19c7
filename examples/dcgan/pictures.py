"""What a training leaves to look at: grids of real and generated images, as PNG files and in TensorBoard."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torchvision.utils import make_grid, save_image

from examples.dcgan.module import DCGAN


class Pictures(pl.Callback):
    """Writes ``real_samples.png`` once, and ``amp_fake_samples_epoch_XXX.png`` from the same noise again and again.

    Samples are drawn as a generator is used after training, in evaluation mode, so that looking changes nothing.

    Args:
        folder: Where the files go.
        every_n_steps: Batches between two grids; the last of an epoch is drawn at its end.
        count: Images in a grid.
        seed: Of the noise, which is drawn apart from the training's random numbers.

    Example:
        >>> Pictures("out", every_n_steps=50).folder
        PosixPath('out')
    """

    def __init__(self, folder: str = ".", every_n_steps: int = 100, count: int = 64, seed: int = 2809) -> None:
        self.folder, self.every_n_steps, self.count, self.seed = Path(folder), every_n_steps, count, seed

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draws the real images of the first batch, and samples every ``every_n_steps`` batches."""
        if trainer.current_epoch == 0 and batch_idx == 0:
            self._draw(trainer, "real_samples", batch[0][: self.count])
        if batch_idx % self.every_n_steps == 0:
            self._draw_samples(trainer, pl_module)

    @rank_zero_only
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws samples of the epoch's last state."""
        self._draw_samples(trainer, pl_module)

    def _draw_samples(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        assert isinstance(model, DCGAN)
        self._draw(trainer, f"amp_fake_samples_epoch_{trainer.current_epoch:03d}", self._samples(trainer, model))

    @torch.no_grad()
    def _samples(self, trainer: pl.Trainer, model: DCGAN) -> Tensor:
        noise = torch.randn(self.count, model.nz, 1, 1, generator=torch.Generator().manual_seed(self.seed))
        training = model.netG.training
        model.netG.eval()
        try:
            with trainer.precision_plugin.forward_context():
                return model.forward(noise.to(model.device))
        finally:
            model.netG.train(training)

    def _draw(self, trainer: pl.Trainer, name: str, images: Tensor) -> None:
        grid = make_grid(images.detach().float().cpu(), normalize=True, value_range=(-1, 1))
        self.folder.mkdir(parents=True, exist_ok=True)
        save_image(grid, self.folder / f"{name}.png")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(name.partition("_epoch")[0], grid, trainer.fit_loop.total_batch_idx)
