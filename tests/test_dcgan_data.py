"""The DCGAN example's images: what comes out, and what is said when they cannot be had."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision import datasets

from examples.dcgan.data import ImageData, channels
from examples.dcgan.errors import InputError


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every download fails as it does without a network: the connection is refused."""
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar.tar.gz")
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])


def images_of(data: ImageData) -> Tensor:
    data.setup("fit")
    return next(iter(data.train_dataloader()))[0]


@pytest.mark.parametrize("size", [16, 32])
def test_digits_are_scikit_learns(size: int) -> None:
    """Taking the mean over blocks undoes the resizing nearly enough to tell each digit from all others."""
    data = ImageData("digits", image_size=size, workers=0)
    data.setup("fit")
    images = torch.stack([data.images[i][0] for i in range(200)])
    assert images.shape == (200, 1, size, size)
    assert images.min() == -1
    assert images.max() <= 1
    small = nn.functional.adaptive_avg_pool2d(images, 8).flatten(1)
    real = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 8 - 1
    assert torch.equal(torch.cdist(small, real).argmin(1), torch.arange(200))


def test_batches_are_shuffled_and_sized() -> None:
    data = ImageData("digits", image_size=16, batch_size=10, workers=0)
    data.setup("fit")
    first, second = (next(iter(data.train_dataloader())) for _ in range(2))
    assert first[0].shape == (10, 1, 16, 16)
    assert not torch.equal(first[0], second[0])
    assert len(data.train_dataloader()) == 180


def test_fake_images_are_in_range() -> None:
    images = images_of(ImageData("fake", image_size=32, batch_size=4, workers=0))
    assert images.shape == (4, 3, 32, 32)
    assert -1 <= images.min() < -0.9
    assert 0.9 < images.max() <= 1


@pytest.mark.parametrize("dataset", ["folder", "lfw", "imagenet"])
def test_folder_is_resized_cropped_and_normalised(dataset: str, tmp_path: Path) -> None:
    """A picture twice as wide as high, red in its middle square and blue beside it: only the square is kept."""
    (tmp_path / "red").mkdir()
    picture = Image.new("RGB", (80, 40), (0, 0, 255))
    picture.paste((255, 0, 51), (20, 0, 60, 40))
    picture.save(tmp_path / "red" / "a.png")
    images = images_of(ImageData(dataset, str(tmp_path), image_size=16, workers=0))  # type: ignore[arg-type]
    assert images.shape == (1, 3, 16, 16)
    middle = images[0, :, 4:12, 4:12].mean((1, 2))
    torch.testing.assert_close(middle, torch.tensor([1.0, -1.0, 51 / 127.5 - 1]), rtol=0, atol=0.02)


@pytest.mark.parametrize("dataset", ["folder", "lfw", "imagenet"])
def test_a_missing_folder_is_named(dataset: str, tmp_path: Path) -> None:
    data = ImageData(dataset, str(tmp_path / "gone"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"'{dataset}' is a folder .*no folder '.*gone'.* --dataroot.* 'digits'"):
        data.setup("fit")


@pytest.mark.parametrize("inside", [None, "a.png", "class/readme.txt"])
def test_an_empty_folder_is_named(inside: str | None, tmp_path: Path) -> None:
    """Empty, with images that lie loose in it, or with a class without images."""
    if inside:
        (tmp_path / inside).parent.mkdir(exist_ok=True)
        (tmp_path / inside).touch()
    data = ImageData("folder", str(tmp_path))
    with pytest.raises(InputError, match=r"'folder' is a folder .*Put images into sub-folders of it"):
        data.setup("fit")


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("dataset", ["cifar10", "mnist"])
def test_a_failed_download_is_explained(dataset: str, tmp_path: Path) -> None:
    data = ImageData(dataset, str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"'{dataset}' is not in .* could not be downloaded: .*name a folder"):
        data.prepare_data()


def test_lsun_refuses_a_class_it_does_not_have(tmp_path: Path) -> None:
    data = ImageData("lsun", str(tmp_path), classes="kitchen,garage")
    with pytest.raises(InputError, match=r"no folder '.*kitchen_train_lmdb'"):
        data.setup("fit")
    (tmp_path / "kitchen_train_lmdb").mkdir()
    with pytest.raises(InputError, match=r"no class 'garage'. Name some of bedroom, .*, separated by commas"):
        data.setup("fit")


def test_an_unknown_data_set_is_refused() -> None:
    with pytest.raises(InputError, match=r"no data set 'svhn'. Choose one of digits, cifar10, lsun"):
        ImageData("svhn")  # type: ignore[arg-type]


def test_only_digits_and_mnist_are_grey() -> None:
    names = ("digits", "mnist", "cifar10", "lsun", "imagenet", "folder", "lfw", "fake")
    assert [channels(name) for name in names] == [1, 1, 3, 3, 3, 3, 3, 3]
