"""The DCGAN example's images: what comes out, and what is said when they cannot be had."""

import hashlib
import io
import pickle
import struct
import sys
from pathlib import Path

import lmdb
import numpy as np
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


def test_cifar10_is_read_as_torchvision_lays_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five files of pickled rows, told to be whole by their checksums, which these tiny ones have of their own."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    red = np.zeros((1, 3, 32, 32), np.uint8)
    red[:, 0] = 255
    files = []
    for i in range(1, 6):
        data = pickle.dumps({"data": np.repeat(red.reshape(1, -1), 4, 0), "labels": [i] * 4})
        files.append((f"data_batch_{i}", data))
    files += [("test_batch", files[0][1]), ("batches.meta", pickle.dumps({"label_names": [str(i) for i in range(10)]}))]
    for name, content in files:
        (folder / name).write_bytes(content)
    sums = {name: hashlib.md5(content).hexdigest() for name, content in files}
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [[n, s] for n, s in sums.items() if n.startswith("data")])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(datasets.CIFAR10, "meta", {**datasets.CIFAR10.meta, "md5": sums["batches.meta"]})
    data = ImageData("cifar10", str(tmp_path), image_size=16, batch_size=20, workers=0)
    data.prepare_data()
    images = images_of(data)
    assert images.shape == (20, 3, 16, 16)
    assert torch.equal(images, torch.tensor([1.0, -1.0, -1.0]).view(1, 3, 1, 1).expand_as(images))


def test_mnist_is_read_as_torchvision_lays_it_out(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    pixels = np.full((6, 28, 28), 51, np.uint8)
    for kind in ("train", "t10k"):
        (folder / f"{kind}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, 6, 28, 28) + pixels.tobytes())
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, 6) + bytes(range(6)))
    data = ImageData("mnist", str(tmp_path), image_size=32, workers=0)
    data.prepare_data()
    images = images_of(data)
    assert images.shape == (6, 1, 32, 32)
    torch.testing.assert_close(images, torch.full_like(images, 51 / 127.5 - 1))


@pytest.fixture
def lsun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two LSUN classes of three pictures each, bluer by class."""
    monkeypatch.chdir(tmp_path)  # torchvision leaves its list of keys where it is started
    (tmp_path / "lsun").mkdir()
    for name, blue in (("bedroom", 0), ("tower", 255)):
        picture, content = Image.new("RGB", (30, 20), (255, 0, blue)), io.BytesIO()
        picture.save(content, "PNG")
        with lmdb.open(str(tmp_path / "lsun" / f"{name}_train_lmdb")) as store, store.begin(write=True) as writing:
            for i in range(3):
                writing.put(f"{name}{i}".encode(), content.getvalue())
    return tmp_path / "lsun"


@pytest.mark.parametrize("workers", [0, 2])
def test_lsun_is_read_from_its_lmdb_folders(lsun: Path, workers: int) -> None:
    data = ImageData("lsun", str(lsun), image_size=16, classes="bedroom, tower", workers=workers)
    data.setup("fit")
    ((images, labels),) = data.train_dataloader()
    assert images.shape == (6, 3, 16, 16)
    assert sorted(labels.tolist()) == [0, 0, 0, 1, 1, 1]
    for image, label in zip(images, labels, strict=True):
        expected = torch.tensor([1.0, -1.0, 1.0 if label else -1.0])
        torch.testing.assert_close(image, expected.view(3, 1, 1).expand_as(image))


def test_lsun_folder_that_holds_no_lmdb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bedroom_train_lmdb").mkdir()
    with pytest.raises(InputError, match=r"cannot be read as LSUN: .*bedroom_train_lmdb.*Unpack it again"):
        ImageData("lsun", str(tmp_path)).setup("fit")


def test_lsun_without_lmdb_says_what_to_install(lsun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(InputError, match=r"package 'lmdb', which is not installed. Try pip install lmdb"):
        ImageData("lsun", str(lsun)).setup("fit")


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
