"""`ImageGrid`: samples of a generator from the same noise again and again, as PNG files and in the loggers."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from typing_extensions import override

from lightning_amp.callbacks.ema_weights import EMAWeights
from lightning_amp.callbacks.trainers import logger_step


class ImageGrid(Callback):
    """Draws a grid of what a generator makes of fixed noise, with the averaged weights where `EMAWeights` is in use.

    Looking changes nothing: the noise has random numbers of its own, the generator is in evaluation mode meanwhile, and
    its mode and weights are afterwards as they were. Needs torchvision (``pip install 'lightning-amp[examples]'``).

    Args:
        noise_shape: Of one sample's noise: ``[100, 1, 1]`` for a DCGAN.
        generator: The child of the LightningModule that makes images in [-1, 1], by dotted name; ``""`` for the module.
        folder: Where the files go, ``<name>_<batch>.png``.
        every_n_batches: How often.
        count: Images in a grid.
        name: What files and log entries are called.
        seed: Of the noise.

    Raises:
        ValueError: A number is below one; at fit, the module has no such child.

    Example:
        >>> ImageGrid([100, 1, 1], generator="netG", every_n_batches=200).folder
        PosixPath('.')
    """

    def __init__(
        self,
        noise_shape: list[int],
        generator: str = "netG",
        folder: str = ".",
        every_n_batches: int = 100,
        count: int = 64,
        name: str = "samples",
        seed: int = 0,
    ) -> None:
        if min(every_n_batches, count, *noise_shape) < 1:
            raise ValueError(
                f"ImageGrid has noise_shape={noise_shape}, every_n_batches={every_n_batches} and count={count}. Each "
                "number must be at least 1."
            )
        self.noise_shape, self.generator, self.folder = noise_shape, generator, Path(folder)
        self.every_n_batches, self.count, self.name, self.seed = every_n_batches, count, name, seed
        self._batches = 0

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        names = [name for name, _ in pl_module.named_children()]
        if self.generator.partition(".")[0] not in ["", *names]:
            raise ValueError(
                f"ImageGrid looks for generator={self.generator!r}; the module's children are {', '.join(names)}. Name "
                "one of these."
            )

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        self._batches += 1
        if self._batches % self.every_n_batches == 0:
            self.draw(trainer, pl_module)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self._batches % self.every_n_batches:
            self.draw(trainer, pl_module)

    @rank_zero_only
    def draw(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> Path:
        """Draws a grid now.

        Args:
            trainer: The trainer.
            pl_module: The module that is being trained.

        Returns:
            The PNG file.
        """
        from torchvision.utils import make_grid, save_image

        images = self._samples(trainer, pl_module)
        grid = make_grid(images, nrow=max(1, round(self.count**0.5)), normalize=True, value_range=(-1, 1))
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{self.name}_{self._batches:06d}.png"
        save_image(grid, file)
        for logger in trainer.loggers:
            experiment: Any = getattr(logger, "experiment", None)
            if hasattr(logger, "log_image"):
                logger.log_image(self.name, [grid], step=logger_step(trainer))
            elif hasattr(experiment, "add_image"):
                experiment.add_image(self.name, grid, logger_step(trainer))
        return file

    def _samples(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> Tensor:
        noise = torch.randn(self.count, *self.noise_shape, generator=torch.Generator().manual_seed(self.seed))
        generator = pl_module.get_submodule(self.generator)
        averages = next((c for c in trainer.callbacks if isinstance(c, EMAWeights)), None)  # type: ignore[attr-defined]
        if averages is None:
            return _draw_from(generator, noise.to(pl_module.device), trainer)
        with averages.swapped(pl_module):
            return _draw_from(generator, noise.to(pl_module.device), trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._batches}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches = int(state_dict["batches"])


@torch.no_grad()
def _draw_from(generator: nn.Module, noise: Tensor, trainer: "pl.Trainer") -> Tensor:
    modes = [(module, module.training) for module in generator.modules()]
    generator.eval()
    try:
        with trainer.precision_plugin.forward_context():
            images: Tensor = generator(noise)
    finally:
        for module, training in modes:
            module.training = training
    return images.detach().float().cpu()
