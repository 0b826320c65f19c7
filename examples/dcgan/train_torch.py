"""The DCGAN as a plain PyTorch loop with Apex's calls: ``python -m examples.dcgan.train_torch --opt_level O2``."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam
from torchvision.utils import save_image

from examples.dcgan.data import ImageData, Name, channels
from examples.dcgan.networks import Discriminator, Generator
from lightning_amp import amp

Losses = dict[str, float]


def train_steps(
    netG: Generator,
    netD: Discriminator,
    batches: Iterable[tuple[Tensor, Any]],
    noise: Callable[[int], Tensor],
    opt_level: str = "O1",
    loss_scale: float | str | None = None,
    lr: float = 2e-4,
    beta1: float = 0.5,
) -> Iterator[Losses]:
    """Trains both networks, a step of each for each batch, and yields the losses.

    Args:
        netG: The generator, on its device and in float32; it is again when the batches are used up.
        netD: The discriminator.
        batches: ``(images, labels)``; labels are not used.
        noise: Draws what the generator makes so many images of: ``(n, nz, 1, 1)``.
        opt_level: ``"O0"`` to ``"O3"``.
        loss_scale: A number or ``"dynamic"``; what the level sets if None.
        lr: Adam's learning rate.
        beta1: Adam's first decay rate.
    """
    eps = 1e-4 if opt_level == "O3" else 1e-8  # without masters Adam runs in half, where 1e-8 is zero
    opt_d = Adam(netD.parameters(), lr, betas=(beta1, 0.999), eps=eps)
    opt_g = Adam(netG.parameters(), lr, betas=(beta1, 0.999), eps=eps)
    amp.initialize([netD, netG], [opt_d, opt_g], opt_level=opt_level, loss_scale=loss_scale, num_losses=3)
    try:
        for real, _ in batches:
            fake = netG(noise(len(real)))

            opt_d.zero_grad()
            d_real = binary_loss(netD(real), 1.0)
            with amp.scale_loss(d_real, opt_d, loss_id=0) as scaled:
                scaled.backward()
            d_fake = binary_loss(netD(fake.detach()), 0.0)
            with amp.scale_loss(d_fake, opt_d, loss_id=1) as scaled:
                scaled.backward()
            opt_d.step()

            opt_g.zero_grad()
            g = binary_loss(netD(fake), 1.0)
            with amp.scale_loss(g, opt_g, loss_id=2) as scaled:
                scaled.backward()
            opt_g.step()
            yield {"d_real": d_real.item(), "d_fake": d_fake.item(), "g": g.item()}
    finally:
        amp.deinitialize(opt_d, opt_g)


def binary_loss(logits: Tensor, target: float) -> Tensor:
    """Returns the binary cross-entropy of logits against one target for all."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def main(
    dataset: Name = "digits",
    dataroot: str = "./",
    imageSize: int = 32,
    batchSize: int = 64,
    nz: int = 100,
    ngf: int = 8,
    ndf: int = 8,
    niter: int = 5,
    lr: float = 5e-4,
    opt_level: Literal["O0", "O1", "O2", "O3"] = "O1",
    loss_scale: float | Literal["dynamic"] | None = None,
    manualSeed: int = 2809,
    outf: str = "out/train_torch",
) -> None:
    """Trains a DCGAN without Lightning and writes a grid of samples.

    Args:
        dataset: The images.
        dataroot: Folder that holds the data.
        imageSize: Side of the images.
        batchSize: Images in a batch.
        nz: Length of the noise vector.
        ngf: Channels of the generator's last layer but one.
        ndf: Channels of the discriminator's first layer.
        niter: Epochs.
        lr: Learning rate.
        opt_level: O0, O1, O2 or O3.
        loss_scale: A number, or dynamic.
        manualSeed: Seed of all random numbers.
        outf: Folder for the grid.
    """
    torch.manual_seed(manualSeed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = ImageData(dataset, dataroot, imageSize, batchSize, workers=0)
    data.prepare_data()
    data.setup("fit")
    netG = Generator(imageSize, nz, ngf, channels(dataset)).to(device)
    netD = Discriminator(imageSize, ndf, channels(dataset)).to(device)
    batches = ((images.to(device), labels) for _ in range(niter) for images, labels in data.train_dataloader())
    steps = train_steps(
        netG, netD, batches, lambda n: torch.randn(n, nz, 1, 1, device=device), opt_level, loss_scale, lr
    )
    for i, losses in enumerate(steps):
        if i % 10 == 0:
            print(i, "  ".join(f"{name}={loss:.3f}" for name, loss in losses.items()))
    Path(outf).mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        images = netG.eval()(torch.randn(64, nz, 1, 1, device=device))
    save_image(images, Path(outf) / "fake_samples.png", normalize=True, value_range=(-1, 1))
    print(f"Open {Path(outf) / 'fake_samples.png'}")


if __name__ == "__main__":
    auto_cli(main)
