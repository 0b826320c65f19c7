"""Plain weights of each network, one file an epoch, to go on from or to use without this package."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only


class NetworkWeights(pl.Callback):
    """Writes the state dict of each network as ``NAME_epoch_N.pth`` at the end of each epoch: FP32 at every opt level.

    Args:
        folder: Where the files go.
        networks: The networks' names in the LightningModule.

    Example:
        >>> NetworkWeights("out").networks
        ('netG', 'netD')
    """

    def __init__(self, folder: str = ".", networks: tuple[str, ...] = ("netG", "netD")) -> None:
        self.folder, self.networks = Path(folder), networks

    @rank_zero_only
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the files of this epoch."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self.networks:
            weights = pl_module.get_submodule(name).state_dict()
            torch.save(weights, self.folder / f"{name}_epoch_{trainer.current_epoch}.pth")
