"""The two networks of "Unsupervised Representation Learning with Deep Convolutional GANs" (Radford et al., 2016).

The layers stand in the order, and under the names, of the DCGAN script that came with PyTorch and Apex (``main.0``,
``main.1``, ...), so weights saved by that script load here.
"""

from torch import Tensor, nn

from examples.dcgan.errors import InputError

SMALLEST = 16


class Generator(nn.Module):
    """Turns noise into images: transposed convolutions, each doubling the side, down to ``nc`` channels in ±1.

    Args:
        image_size: Side of the images, a power of two from 16 on (64 in the paper).
        nz: Length of the noise vector.
        ngf: Channels before the last layer; each layer before has twice as many.
        nc: Channels of the images.

    Raises:
        InputError: If ``image_size`` is not a power of two from 16 on.

    Example:
        >>> import torch
        >>> Generator(image_size=32, nz=100, ngf=8, nc=1)(torch.randn(4, 100, 1, 1)).shape
        torch.Size([4, 1, 32, 32])
    """

    def __init__(self, image_size: int = 64, nz: int = 100, ngf: int = 64, nc: int = 3) -> None:
        super().__init__()
        width = ngf * 2 ** (doublings(image_size) - 1)
        layers = [nn.ConvTranspose2d(nz, width, 4, 1, 0, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        while width > ngf:
            layers += [nn.ConvTranspose2d(width, width // 2, 4, 2, 1, bias=False)]
            layers += [nn.BatchNorm2d(width // 2), nn.ReLU(inplace=True)]
            width //= 2
        self.main = nn.Sequential(*layers, nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False), nn.Tanh())
        self.apply(initialise)

    def forward(self, noise: Tensor) -> Tensor:
        """Maps noise ``(n, nz, 1, 1)`` to images ``(n, nc, image_size, image_size)``."""
        images: Tensor = self.main(noise)
        return images


class Discriminator(nn.Module):
    """Tells real images from generated ones: strided convolutions, each halving the side, down to one logit.

    It returns logits, not probabilities: binary cross-entropy *with logits* is safe in half precision, where the
    logarithm of a probability is not.

    Args:
        image_size: Side of the images, a power of two from 16 on (64 in the paper).
        ndf: Channels after the first layer; each later one has twice as many.
        nc: Channels of the images.

    Raises:
        InputError: If ``image_size`` is not a power of two from 16 on.

    Example:
        >>> import torch
        >>> Discriminator(image_size=32, ndf=8, nc=1)(torch.randn(4, 1, 32, 32)).shape
        torch.Size([4])
    """

    def __init__(self, image_size: int = 64, ndf: int = 64, nc: int = 3) -> None:
        super().__init__()
        width, widest = ndf, ndf * 2 ** (doublings(image_size) - 1)
        layers: list[nn.Module] = [nn.Conv2d(nc, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        while width < widest:
            layers += [nn.Conv2d(width, width * 2, 4, 2, 1, bias=False)]
            layers += [nn.BatchNorm2d(width * 2), nn.LeakyReLU(0.2, inplace=True)]
            width *= 2
        self.main = nn.Sequential(*layers, nn.Conv2d(widest, 1, 4, 1, 0, bias=False))
        self.apply(initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images ``(n, nc, image_size, image_size)`` to logits ``(n,)``: above 0 says real."""
        logits: Tensor = self.main(images)
        return logits.flatten()


def doublings(image_size: int) -> int:
    """Returns how often a side of 4 doubles to become ``image_size``."""
    if image_size < SMALLEST or image_size & (image_size - 1):
        raise InputError(
            f"image_size={image_size} does not fit a DCGAN: each layer doubles the side, from 4 on, so it must be a "
            f"power of two from {SMALLEST} on. Try 32 or 64."
        )
    return image_size.bit_length() - 3


def initialise(module: nn.Module) -> None:
    """Draws one layer's weights as the paper does: convolutions from N(0, 0.02), BatchNorm from N(1, 0.02)."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)
