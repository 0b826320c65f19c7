"""The judge of generated digits: sure of real ones, unsure of patchworks, and blind to nothing in between."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.neural_network import MLPClassifier

from examples.dcgan.networks import Generator
from examples.dcgan.quality import Pixels, draw, judge, latest, load_generator, patchwork, real_digits, train_classifier


@pytest.fixture(scope="module")
def digits() -> tuple[Pixels, MLPClassifier]:
    """Digits that the classifier has not seen, and the classifier."""
    pixels, labels = real_digits()
    return pixels[1::2], train_classifier(pixels[::2], labels[::2])


def test_real_digits_and_patchworks_are_far_apart(digits: tuple[Pixels, MLPClassifier]) -> None:
    pixels, classifier = digits
    real, broken = judge(classifier, pixels), judge(classifier, patchwork(pixels))
    assert real.confidence > 0.85
    assert real.digits > 9.9
    assert broken.confidence < 0.15
    assert np.allclose(np.sort(pixels, axis=0), np.sort(patchwork(pixels), axis=0))


def test_blurred_digits_lie_between(digits: tuple[Pixels, MLPClassifier]) -> None:
    pixels, classifier = digits
    mixed = 0.6 * pixels + 0.4 * np.roll(pixels, 1, axis=0)
    assert 0.15 < judge(classifier, mixed).confidence < 0.85


def test_one_digit_again_and_again_is_told(digits: tuple[Pixels, MLPClassifier]) -> None:
    pixels, classifier = digits
    assert judge(classifier, np.repeat(pixels[:1], 50, axis=0)).digits == 1.0


def test_generator_is_rebuilt_from_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = Generator(image_size=32, nz=7, ngf=3, nc=1).eval()
    for epoch in (2, 10):
        torch.save(saved.state_dict(), tmp_path / f"netG_epoch_{epoch}.pth")
    assert latest(tmp_path).name == "netG_epoch_10.pth"
    assert torch.equal(draw(load_generator(latest(tmp_path)), 5), draw(saved, 5))
    assert draw(saved, 5).shape == (5, 1, 32, 32)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no netG_epoch_N.pth in .* Name the --outf"):
        latest(tmp_path)
