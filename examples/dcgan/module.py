"""The DCGAN as a LightningModule: manual optimization, two optimizers, three losses."""

from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam, Optimizer

from examples.dcgan.errors import InputError, reason
from examples.dcgan.networks import Discriminator, Generator
from lightning_amp import AmpPrecision

LOSSES = ("d_real", "d_fake", "g")


class DCGAN(pl.LightningModule):
    """Trains a generator against a discriminator.

    Each batch, the discriminator learns from ``d_real`` (real images are real) and ``d_fake`` (generated ones are not),
    then the generator from ``g`` (generated ones should pass for real). It runs under any precision; `AmpPrecision`
    is also told which loss is which. Lightning's ``global_step`` counts optimizer steps, two for each batch: bound a
    training by epochs or batches, not by ``max_steps``.

    Args:
        image_size: Side of the images, a power of two from 16 on.
        nc: Channels of the images.
        nz: Length of the noise vector.
        ngf: Channels of the generator's last layer but one.
        ndf: Channels of the discriminator's first layer.
        lr: Adam's learning rate.
        beta1: Adam's first decay rate.
        loss_ids: Which of the plugin's scalers serves ``d_real``, ``d_fake`` and ``g``: ``[0, 1, 2]`` is one for each
            loss, ``[0, 0, 0]`` one for all; None leaves the choice to the plugin, which has one for each optimizer.
        toggle: Whether the network that is not being trained is frozen meanwhile, which spares its gradients.
        accumulate: Batches whose gradients add up before an optimizer steps.
        fused: Whether Adam runs as one fused kernel.
        weights_g: A file with the generator's weights to start from.
        weights_d: A file with the discriminator's.

    Raises:
        InputError: If ``accumulate`` is below 1, or above 1 without ``toggle``.

    Example:
        >>> DCGAN(image_size=32, nc=1, ngf=8, ndf=8)(torch.randn(2, 100, 1, 1)).shape
        torch.Size([2, 1, 32, 32])
    """

    def __init__(
        self,
        image_size: int = 64,
        nc: int = 1,
        nz: int = 100,
        ngf: int = 64,
        ndf: int = 64,
        lr: float = 2e-4,
        beta1: float = 0.5,
        loss_ids: tuple[int, int, int] | None = (0, 1, 2),
        toggle: bool = True,
        accumulate: int = 1,
        fused: bool = False,
        weights_g: str | None = None,
        weights_d: str | None = None,
    ) -> None:
        super().__init__()
        if accumulate < 1:
            raise InputError(f"accumulate={accumulate} cannot be used: it is a number of batches. Use 1 or more.")
        if accumulate > 1 and not toggle:
            raise InputError(
                f"accumulate={accumulate} needs toggle=True: with both networks trainable, the generator's loss would "
                "add its gradients to those the discriminator accumulates."
            )
        self.save_hyperparameters(ignore=["weights_g", "weights_d"])
        self.automatic_optimization = False
        self.weights = {"netG": weights_g, "netD": weights_d}
        self.loss_ids, self.toggle, self.accumulate = loss_ids, toggle, accumulate
        self.lr, self.beta1, self.fused, self.nz = lr, beta1, fused, nz
        self.example_input_array = torch.zeros(2, nz, 1, 1)
        self.netG = Generator(image_size, nz, ngf, nc)
        self.netD = Discriminator(image_size, ndf, nc)

    def setup(self, stage: str) -> None:
        """Reads the weights to start from, before anything is converted to another precision."""
        for name, file in self.weights.items():
            if stage == "fit" and file is not None:
                load_weights(self.get_submodule(name), Path(file))

    def configure_optimizers(self) -> list[Optimizer]:
        """One Adam for each network: the discriminator's first."""
        plugin = self.trainer.precision_plugin
        # Without masters Adam itself runs in half, where its usual 1e-8 is zero and its first quotient 0/0.
        eps = 1e-4 if isinstance(plugin, AmpPrecision) and plugin.config.opt_level == "O3" else 1e-8
        return [
            Adam(network.parameters(), self.lr, betas=(self.beta1, 0.999), eps=eps, fused=self.fused)
            for network in (self.netD, self.netG)
        ]

    def forward(self, noise: Tensor) -> Tensor:
        """Maps noise ``(n, nz, 1, 1)`` to images ``(n, nc, image_size, image_size)`` in ±1."""
        images: Tensor = self.netG(noise)
        return images

    def noise(self, count: int) -> Tensor:
        """Draws what the generator makes ``count`` images of: ``(count, nz, 1, 1)`` from N(0, 1)."""
        return torch.randn(count, self.nz, 1, 1, device=self.device)

    def training_step(self, batch: tuple[Tensor, Any], batch_idx: int) -> None:
        """Trains both networks on one batch of ``(images, labels)``; labels are not used."""
        real = batch[0]
        opt_d, opt_g = cast(list[LightningOptimizer], self.optimizers())
        last = (batch_idx + 1) % self.accumulate == 0 or self.trainer.is_last_batch
        # Made before anything is frozen, so that the generator's own pass can be used again for its loss.
        fake = self.netG(self.noise(len(real)))

        self._begin(opt_d, batch_idx)
        d_real = self._backward(self.netD(real), real=True, loss=0)
        d_fake = self._backward(self.netD(fake.detach()), real=False, loss=1)
        self._finish(opt_d, last)

        self._begin(opt_g, batch_idx)
        g = self._backward(self.netD(fake), real=True, loss=2)
        self._finish(opt_g, last)
        self.log_dict(dict(zip(LOSSES, (d_real, d_fake, g), strict=True)), prog_bar=True)

    def _begin(self, optimizer: LightningOptimizer, batch_idx: int) -> None:
        if self.toggle:
            self.toggle_optimizer(optimizer)
        if batch_idx % self.accumulate == 0:
            optimizer.zero_grad()

    def _backward(self, logits: Tensor, *, real: bool, loss: int) -> Tensor:
        value = binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))
        self.manual_backward(value / self.accumulate, **self._scaler(loss))
        return value.detach()

    def _scaler(self, loss: int) -> dict[str, int]:
        """Names a loss to `AmpPrecision`; Lightning's own precisions know no ``loss_id``."""
        if self.loss_ids is None or not isinstance(self.trainer.precision_plugin, AmpPrecision):
            return {}
        return {"loss_id": self.loss_ids[loss]}

    def _finish(self, optimizer: LightningOptimizer, last: bool) -> None:
        if last:
            optimizer.step()
        if self.toggle:
            self.untoggle_optimizer(optimizer)


def load_weights(network: nn.Module, file: Path) -> None:
    """Reads a network's weights from a file of `torch.save`, as ``netG_epoch_N.pth`` is.

    Args:
        network: What takes the weights.
        file: A state dict of tensors.

    Raises:
        InputError: If the file is missing, or holds weights of another shape.
    """
    kind = type(network).__name__
    if not file.is_file():
        raise InputError(
            f"There is no file {str(file)!r} to read the {kind}'s weights from. A training writes them each epoch, as "
            "netG_epoch_N.pth and netD_epoch_N.pth."
        )
    try:
        network.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except RuntimeError as error:
        raise InputError(
            f"The weights in {str(file)!r} do not fit this {kind}: {reason(error)} Use the sizes they were trained "
            "with (imageSize, nz, ngf, ndf, and the data set's channels)."
        ) from None
