"""The WGAN-GP of "Improved Training of Wasserstein GANs" (Gulrajani et al., 2017) as a LightningModule."""

from typing import Any, cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from examples.dcgan.module import DCGAN
from lightning_amp import AmpPrecision


class WGANGP(DCGAN):
    """Trains the DCGAN's networks, the critic without BatchNorm, as a Wasserstein GAN.

    The critic's gradient with respect to images is part of its loss. It comes from `AmpPrecision.grad`, which takes its
    own loss scale out again before the penalty is computed; ``torch.autograd.grad`` alone underflows in float16.

    Args:
        image_size: Side of the images, a power of two from 16 on.
        nc: Channels of the images.
        nz: Length of the noise vector.
        ngf: Channels of the generator's last layer but one.
        ndf: Channels of the critic's first layer.
        lr: Adam's learning rate.
        penalty: Weight of the gradient penalty.
        critic_steps: Batches that train the critic for each that trains the generator too.

    Example:
        >>> WGANGP(image_size=32, nc=1, ngf=8, ndf=8)(torch.randn(2, 100, 1, 1)).shape
        torch.Size([2, 1, 32, 32])
    """

    def __init__(
        self,
        image_size: int = 64,
        nc: int = 1,
        nz: int = 100,
        ngf: int = 64,
        ndf: int = 64,
        lr: float = 1e-4,
        penalty: float = 10.0,
        critic_steps: int = 5,
    ) -> None:
        super().__init__(image_size, nc, nz, ngf, ndf, lr)
        self.penalty, self.critic_steps = penalty, critic_steps
        # The penalty is on each image's own gradient; BatchNorm would make it depend on the others in the batch.
        layers = self.netD.main
        self.netD.main = nn.Sequential(*(m for m in layers if not isinstance(m, nn.BatchNorm2d)))

    def configure_optimizers(self) -> list[Optimizer]:
        """One Adam for each network, the critic's first, without momentum as in the paper."""
        return [Adam(network.parameters(), self.lr, betas=(0.0, 0.9)) for network in (self.netD, self.netG)]

    def training_step(self, batch: tuple[Tensor, Any], batch_idx: int) -> None:
        """Trains the critic on one batch and, every ``critic_steps`` batches, the generator."""
        real = batch[0]
        opt_d, opt_g = cast(list[LightningOptimizer], self.optimizers())

        self.toggle_optimizer(opt_d)
        fake = self.netG(self.noise(len(real)))
        critic = self.netD(fake).mean() - self.netD(real).mean()
        penalty = self.gradient_penalty(real, fake.float())
        self._update(opt_d, critic + self.penalty * penalty, loss_id=0)
        self.log_dict({"critic": critic.detach(), "penalty": penalty.detach()}, prog_bar=True)

        if (batch_idx + 1) % self.critic_steps == 0:
            self.toggle_optimizer(opt_g)
            g = -self.netD(self.netG(self.noise(len(real)))).mean()
            self._update(opt_g, g, loss_id=1)
            self.log("g", g.detach(), prog_bar=True)

    def gradient_penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        """Returns how far, in square mean, the norm of the critic's gradient is from 1 between real and fake images.

        Args:
            real: Images ``(n, nc, image_size, image_size)``.
            fake: As many generated ones.
        """
        between = torch.lerp(real, fake, torch.rand(len(real), 1, 1, 1, device=self.device)).requires_grad_()
        plugin = self.trainer.precision_plugin
        grad = plugin.grad if isinstance(plugin, AmpPrecision) else torch.autograd.grad
        (gradient,) = grad(self.netD(between).sum(), between, create_graph=True)
        assert gradient is not None
        norms: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
        return (norms - 1).square().mean()

    def _update(self, optimizer: LightningOptimizer, loss: Tensor, loss_id: int) -> None:
        optimizer.zero_grad()
        named = {"loss_id": loss_id} if isinstance(self.trainer.precision_plugin, AmpPrecision) else {}
        self.manual_backward(loss, **named)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
