"""The DCGAN example's networks: shapes, initial weights, refusals."""

import pytest
import torch
from torch import nn

from examples.dcgan.errors import InputError
from examples.dcgan.networks import Discriminator, Generator


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_networks_fit_each_other_at_every_size(size: int) -> None:
    images = Generator(size, nz=7, ngf=2, nc=3)(torch.randn(2, 7, 1, 1))
    assert images.shape == (2, 3, size, size)
    assert images.abs().max() <= 1
    assert Discriminator(size, ndf=2, nc=3)(images).shape == (2,)


def test_widths_at_64_are_the_papers() -> None:
    widths = [m.out_channels for m in Generator(64, 100, 64, 3).modules() if isinstance(m, nn.ConvTranspose2d)]
    assert widths == [512, 256, 128, 64, 3]
    widths = [m.out_channels for m in Discriminator(64, 64, 3).modules() if isinstance(m, nn.Conv2d)]
    assert widths == [64, 128, 256, 512, 1]


def test_discriminator_returns_logits() -> None:
    """No sigmoid: the logit grows with the last layer's weights without bound."""
    network, images = Discriminator(16, 4, 1), torch.randn(8, 1, 16, 16)
    last = network.main[-1]
    assert isinstance(last, nn.Conv2d)
    before = network(images)
    with torch.no_grad():
        last.weight.mul_(1e4)
    torch.testing.assert_close(network(images), before * 1e4, rtol=1e-3, atol=1e-2)
    assert before.min() < 0 < before.max()


@pytest.mark.parametrize("network", [Generator(64, 100, 32, 3), Discriminator(64, 32, 3)])
def test_weights_are_drawn_as_in_the_paper(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            spread = 5 * 0.02 / module.weight.numel() ** 0.5
            assert module.weight.mean().abs() < spread
            assert abs(module.weight.std() - 0.02) < spread
            assert module.bias is None
        elif isinstance(module, nn.BatchNorm2d):
            spread = 5 * 0.02 / module.weight.numel() ** 0.5
            assert abs(module.weight.mean() - 1) < spread
            assert abs(module.weight.std() - 0.02) < spread
            assert not module.bias.any()


@pytest.mark.parametrize("size", [0, 8, 48, 65])
@pytest.mark.parametrize("network", [Generator, Discriminator])
def test_a_size_that_does_not_fit_is_refused(network: type[Generator] | type[Discriminator], size: int) -> None:
    with pytest.raises(InputError, match=rf"image_size={size} .*power of two from 16 on. Try 32 or 64"):
        network(image_size=size)
