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
from lightning_amp.callbacks.trainers import batches_begun, logger_step, require, under_root


class ImageGrid(Callback):
    """Draws a grid of what a generator makes of fixed noise, with the averaged weights where `EMAWeights` is in use.

    A grid is drawn every so many batches and at the end of each epoch. Looking changes nothing: the noise has random
    numbers of its own, the generator is in evaluation mode meanwhile, and its mode and weights are afterwards as they
    were. Needs torchvision (``pip install 'lightning-amp[examples]'``).

    Args:
        noise_shape: Of one sample's noise, ``[100, 1, 1]`` for a DCGAN; None for that of the module's
            ``example_input_array``.
        generator: The child of the LightningModule that makes images in [-1, 1], by dotted name; ``""`` for the module.
        folder: Where the files go, from the trainer's ``default_root_dir``.
        every_n_batches: How often.
        count: Images in a grid.
        name: What the log entries are called.
        file: What the files are called, of ``{name}``, ``{batch}`` and ``{epoch}``. One without ``{batch}`` is drawn
            over until the next epoch.
        real: What a picture of the first batch's own images is called, without ``.png``; None for no such picture.
            They are the batch itself, or the first thing in it.
        seed: Of the noise.

    Raises:
        ValueError: A number is below one, or ``file`` has another name in braces; at fit, the module has no such child,
            or nothing tells the noise's shape.

    Example:
        >>> ImageGrid([100, 1, 1], generator="netG", every_n_batches=200).folder
        PosixPath('.')
    """

    def __init__(
        self,
        noise_shape: list[int] | None = None,
        generator: str = "netG",
        folder: str = ".",
        every_n_batches: int = 100,
        count: int = 64,
        name: str = "samples",
        file: str = "{name}_{batch:06d}.png",
        real: str | None = None,
        seed: int = 0,
    ) -> None:
        if min(every_n_batches, count, *(noise_shape or [1])) < 1:
            raise ValueError(
                f"ImageGrid has noise_shape={noise_shape}, every_n_batches={every_n_batches} and count={count}. Each "
                "number must be at least 1."
            )
        try:
            file.format(name=name, batch=1, epoch=0)
        except (LookupError, ValueError, AttributeError):
            raise ValueError(
                f"file={file!r} cannot be used. In braces may stand name, batch and epoch, such as "
                "'{name}_epoch_{epoch:03d}.png'."
            ) from None
        self.noise_shape, self.generator, self.folder = noise_shape, generator, Path(folder)
        self.every_n_batches, self.count, self.name, self.seed = every_n_batches, count, name, seed
        self.file, self.real = file, real
        self._drawn = 0

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        names = [name for name, _ in pl_module.named_children()]
        if self.generator.partition(".")[0] not in ["", *names]:
            raise ValueError(
                f"ImageGrid looks for generator={self.generator!r}; the module's children are {', '.join(names)}. Name "
                "one of these."
            )
        if self.noise_shape is None and not isinstance(pl_module.example_input_array, Tensor):
            raise ValueError(
                "ImageGrid was given no noise_shape, and the module's example_input_array is no tensor to take it "
                "from. Give one, such as noise_shape=[100, 1, 1]."
            )
        require("torchvision", self)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        begun = batches_begun(trainer)
        if self.real is not None and begun == 1:
            images = batch if isinstance(batch, Tensor) else batch[0]
            self._show(trainer, images[: self.count].detach().float().cpu(), self.real, f"{self.real}.png")
        if begun % self.every_n_batches == 0:
            self.draw(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self._drawn != batches_begun(trainer):
            self.draw(trainer, pl_module)

    @rank_zero_only
    def draw(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> Path | None:
        """Draws a grid now.

        Args:
            trainer: The trainer.
            pl_module: The module that is being trained.

        Returns:
            The PNG file, in the first process; None in others.
        """
        self._drawn = batches_begun(trainer)
        file = self.file.format(name=self.name, batch=self._drawn, epoch=trainer.current_epoch)
        return self._show(trainer, self._samples(trainer, pl_module), self.name, file)

    @rank_zero_only
    def _show(self, trainer: "pl.Trainer", images: Tensor, name: str, file: str) -> Path:
        from torchvision.utils import make_grid, save_image

        grid = make_grid(images, nrow=max(1, round(self.count**0.5)), normalize=True, value_range=(-1, 1))
        path = under_root(trainer, self.folder) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        save_image(grid, path)
        for logger in trainer.loggers:
            experiment: Any = getattr(logger, "experiment", None)
            if hasattr(logger, "log_image"):
                logger.log_image(name, [grid], step=logger_step(trainer))
            elif hasattr(experiment, "add_image"):
                experiment.add_image(name, grid, logger_step(trainer))
        return path

    def _samples(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> Tensor:
        example: Any = pl_module.example_input_array
        shape = example.shape[1:] if self.noise_shape is None else self.noise_shape
        noise = torch.randn(self.count, *shape, generator=torch.Generator().manual_seed(self.seed))
        generator = pl_module.get_submodule(self.generator)
        averages = next((c for c in trainer.callbacks if isinstance(c, EMAWeights)), None)  # type: ignore[attr-defined]
        if averages is None:
            return _draw_from(generator, noise.to(pl_module.device), trainer)
        with averages.swapped(pl_module):
            return _draw_from(generator, noise.to(pl_module.device), trainer)


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
