"""Images of every data set that the DCGAN script knows, as one LightningDataModule."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import datasets
from torchvision.transforms import v2 as transforms

from examples.dcgan.errors import InputError, reason

Name = Literal["digits", "cifar10", "lsun", "mnist", "imagenet", "folder", "lfw", "fake"]
Images = Dataset[Any]

NEEDS_NO_FILES = "The data sets 'digits' and 'fake' need no files."
LSUN_CLASSES = (
    "bedroom",
    "bridge",
    "church_outdoor",
    "classroom",
    "conference_room",
    "dining_room",
    "kitchen",
    "living_room",
    "restaurant",
    "tower",
)


class ImageData(pl.LightningDataModule):
    """Training images, resized, cropped to a square and normalised to ±1; batches are ``(images, labels)``.

    Args:
        dataset: Which images. ``digits`` (handwritten ones, 8x8) comes with scikit-learn and ``fake`` is noise;
            ``cifar10`` and ``mnist`` are downloaded; ``imagenet``, ``folder`` and ``lfw`` are read from a folder with
            one sub-folder for each class; ``lsun`` is read from its LMDB folders.
        dataroot: The folder that holds the data, or that it is downloaded to.
        image_size: Side of the images.
        batch_size: Images in a batch.
        workers: Processes that load images; 0 loads them in the training process.
        classes: Scenes of ``lsun``, separated by commas.

    Raises:
        InputError: If ``dataset`` is unknown or, from `setup` on, if its files are missing.

    Example:
        >>> data = ImageData("digits", image_size=32, batch_size=8, workers=0)
        >>> data.setup("fit")
        >>> next(iter(data.train_dataloader()))[0].shape
        torch.Size([8, 1, 32, 32])
    """

    def __init__(
        self,
        dataset: Name = "digits",
        dataroot: str = "./",
        image_size: int = 64,
        batch_size: int = 64,
        workers: int = 2,
        classes: str = "bedroom",
    ) -> None:
        super().__init__()
        channels(dataset)
        self.dataset, self.root, self.image_size = dataset, Path(dataroot).expanduser(), image_size
        self.batch_size, self.workers, self.classes = batch_size, workers, classes

    def prepare_data(self) -> None:
        """Downloads what can be downloaded, once, in one process."""
        if self.dataset in ("cifar10", "mnist"):
            _downloaded(self.dataset, self.root, download=True)

    def setup(self, stage: str) -> None:
        """Opens the data set in every process."""
        self.images = open_images(self.dataset, self.root, self.image_size, self.classes)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of ``(images, labels)``; images are ``(n, channels, image_size, image_size)`` in ±1."""
        return DataLoader(
            self.images,
            batch_size=self.batch_size,
            shuffle=True,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def channels(dataset: str) -> int:
    """Returns how many channels the images of ``dataset`` have."""
    if dataset not in get_args(Name):
        raise InputError(f"There is no data set {dataset!r}. Choose one of {', '.join(get_args(Name))}.")
    return 1 if dataset in ("digits", "mnist") else 3


def open_images(dataset: Name, root: Path, image_size: int, classes: str = "bedroom") -> Images:
    """Opens a data set whose files are there.

    Args:
        dataset: Its name.
        root: The folder that holds it.
        image_size: Side that images are resized and cropped to.
        classes: Scenes of ``lsun``, separated by commas.

    Raises:
        InputError: If files are missing or a class is unknown.
    """
    transform = _transform(image_size, channels(dataset))
    openers: dict[str, Callable[[], Images]] = {
        "digits": partial(_digits, image_size),
        "fake": lambda: datasets.FakeData(image_size=(3, image_size, image_size), transform=transform),
        "lsun": lambda: _lsun(root, classes, transform),
        "cifar10": lambda: _downloaded(dataset, root, transform=transform),
        "mnist": lambda: _downloaded(dataset, root, transform=transform),
    }
    return openers.get(dataset, lambda: _folder(dataset, root, transform))()


def _transform(image_size: int, nc: int) -> Callable[[Any], Tensor]:
    composed: Callable[[Any], Tensor] = transforms.Compose(
        [
            transforms.Resize(image_size),
            transforms.CenterCrop(image_size),
            transforms.ToImage(),
            transforms.ToDtype(torch.float32, scale=True),
            transforms.Normalize([0.5] * nc, [0.5] * nc),
        ]
    )
    return composed


def _digits(image_size: int) -> Images:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    resized: Tensor = transforms.functional.resize(images, [image_size, image_size], antialias=True)
    return TensorDataset(resized.clamp(0, 1) * 2 - 1, torch.tensor(digits.target))


def _folder(dataset: str, root: Path, transform: Callable[[Any], Tensor]) -> Images:
    wanted = f"The data set {dataset!r} is a folder with one sub-folder of images for each class"
    if not root.is_dir():
        raise InputError(f"{wanted}, and there is no folder {str(root)!r}. Name one with --dataroot. {NEEDS_NO_FILES}")
    try:
        images: Images = datasets.ImageFolder(root, transform=transform)
    except FileNotFoundError as error:
        raise InputError(
            f"{wanted}, and {str(root)!r} is not one: {reason(error)} Put images into sub-folders "
            "of it, one for all will do."
        ) from None
    return images


def _lsun(root: Path, classes: str, transform: Callable[[Any], Tensor]) -> Images:
    names = [name.strip() for name in classes.split(",")]
    for name in names:
        if name not in LSUN_CLASSES:
            raise InputError(
                f"LSUN has no class {name!r}. Name some of {', '.join(LSUN_CLASSES)}, separated by commas."
            )
        if not (folder := root / f"{name}_train_lmdb").is_dir():
            raise InputError(
                f"There is no folder {str(folder)!r}. LSUN is not downloaded: fetch and unpack it, "
                f"and name the folder that holds its *_train_lmdb folders with --dataroot. {NEEDS_NO_FILES}"
            )
    try:
        import lmdb
    except ModuleNotFoundError:
        raise InputError(
            "LSUN is read with the package 'lmdb', which is not installed. Try pip install lmdb."
        ) from None
    try:
        images: Images = datasets.LSUN(str(root), classes=[f"{name}_train" for name in names], transform=transform)
    except lmdb.Error as error:
        raise InputError(
            f"What is in {str(root)!r} cannot be read as LSUN: {reason(error)} Unpack it again: each *_train_lmdb "
            "folder holds a data.mdb."
        ) from None
    return images


def _downloaded(dataset: str, root: Path, **options: Any) -> Images:
    kind = {"cifar10": datasets.CIFAR10, "mnist": datasets.MNIST}[dataset]
    try:
        images: Images = kind(root, train=True, **options)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"The data set {dataset!r} is not in {str(root)!r} and could not be downloaded: {reason(error)} "
            f"Try again with a network, or name a folder that has it with --dataroot. {NEEDS_NO_FILES}"
        ) from None
    return images
