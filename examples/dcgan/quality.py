"""How good generated digits are: ``python -m examples.dcgan.quality out/o0 out/o1 out/o2``.

A small classifier that was trained on real digits, and on patchworks of them as "no digit", looks at generated ones.
Sure answers mean digits that look like digits; answers spread over all ten mean that the generator draws them all.
It is not an FID, which needs a network trained on photographs.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.neural_network import MLPClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.dcgan.data import open_images
from examples.dcgan.networks import Generator

NO_DIGIT = 10
Pixels = NDArray[np.float64]


class Quality(NamedTuple):
    """What the classifier says of a set of images.

    Attributes:
        confidence: Mean probability of the digit it holds most likely.
        digits: How many digits it names, by the exponential of the entropy of their shares: 10 if all alike.
    """

    confidence: float
    digits: float


def real_digits() -> tuple[Pixels, NDArray[np.int64]]:
    """Returns the real digits as a generator at 32x32 should draw them, brought back to 8x8, and their labels."""
    digits = open_images("digits", Path(), 32)
    images, labels = next(iter(DataLoader(digits, batch_size=10**6)))
    return shrink(images), labels.numpy()


def shrink(images: Tensor) -> Pixels:
    """Turns images ``(n, channels, side, side)`` in ±1 into grey ones ``(n, 64)`` from 0 to 1."""
    grey = (images.mean(1, keepdim=True) + 1) / 2
    pixels: Pixels = nn.functional.adaptive_avg_pool2d(grey, 8).flatten(1).double().numpy()
    return pixels


def patchwork(pixels: Pixels, seed: int = 0) -> Pixels:
    """Takes each pixel from another image: what single pixels tell is as in the real ones, and no digit is left."""
    return np.random.default_rng(seed).permuted(pixels, axis=0)


def train_classifier(pixels: Pixels, labels: NDArray[np.int64], seed: int = 0) -> MLPClassifier:
    """Trains on digits ``(n, 64)`` and on as many patchworks of them."""
    both = np.concatenate([pixels, patchwork(pixels, seed)])
    classes = np.concatenate([labels, np.full(len(labels), NO_DIGIT)])
    return MLPClassifier((64,), alpha=0.1, max_iter=1000, random_state=seed).fit(both, classes)


def judge(classifier: MLPClassifier, pixels: Pixels) -> Quality:
    """Returns what the classifier says of images ``(n, 64)``."""
    probabilities = classifier.predict_proba(pixels)[:, :NO_DIGIT]
    shares = np.bincount(probabilities.argmax(1), minlength=NO_DIGIT) / len(pixels)
    entropy = -sum(share * np.log(share) for share in shares if share > 0)
    return Quality(float(probabilities.max(1).mean()), float(np.exp(entropy)))


def load_generator(file: Path) -> Generator:
    """Builds the generator that a ``netG_epoch_N.pth`` was saved from, its sizes read off the weights."""
    weights = torch.load(file, map_location="cpu", weights_only=True)
    convolutions = [value for value in weights.values() if value.ndim == 4]
    generator = Generator(
        image_size=2 ** (len(convolutions) + 1),
        nz=convolutions[0].shape[0],
        ngf=convolutions[-1].shape[0],
        nc=convolutions[-1].shape[1],
    )
    generator.load_state_dict(weights)
    return generator.eval()


@torch.no_grad()
def draw(generator: Generator, count: int = 1000, seed: int = 0) -> Tensor:
    """Draws images ``(count, channels, side, side)`` in ±1."""
    nz = next(generator.parameters()).shape[0]
    images: Tensor = generator(torch.randn(count, nz, 1, 1, generator=torch.Generator().manual_seed(seed)))
    return images


def latest(folder: Path) -> Path:
    """Returns the generator's file of the last epoch in ``folder``."""
    files = sorted(folder.glob("netG_epoch_*.pth"), key=lambda file: int(file.stem.rpartition("_")[2]))
    if not files:
        raise SystemExit(f"There is no netG_epoch_N.pth in {str(folder)!r}. Name the --outf of a training on digits.")
    return files[-1]


def main() -> None:
    """Prints a table with a row for each folder, between real digits and patchworks of them."""
    parser = argparse.ArgumentParser(description="Judges the digits that trained generators draw.")
    parser.add_argument("folders", nargs="+", type=Path, help="--outf of trainings on digits")
    folders = parser.parse_args().folders
    pixels, labels = real_digits()
    classifier = train_classifier(pixels[::2], labels[::2])
    rows = {"real digits": pixels[1::2]}
    rows |= {str(folder): shrink(draw(load_generator(latest(folder)))) for folder in folders}
    rows["patchwork of real digits"] = patchwork(pixels[1::2], seed=1)
    print("| images | confidence | digits |\n| --- | --- | --- |")
    for name, images in rows.items():
        quality = judge(classifier, images)
        print(f"| {name} | {quality.confidence:.3f} | {quality.digits:.1f} |")


if __name__ == "__main__":
    main()
