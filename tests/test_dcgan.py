"""The DCGAN example's LightningModule and what it leaves: which loss trains what, pictures, weights."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from examples.dcgan.errors import InputError
from examples.dcgan.module import DCGAN
from examples.dcgan.networks import Discriminator, Generator
from examples.dcgan.weights import NetworkWeights
from lightning_amp import AmpPrecision
from lightning_amp.callbacks import GradientClipping, ImageGrid

LEVELS = ("O0", "O1", "O2", "O3")


class Watch(pl.Callback):
    """Keeps the weights and the gradient norm that each optimizer is about to step with."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float]] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        name = "d" if params[0] is next(pl_module.netD.parameters()) else "g"  # type: ignore[union-attr, operator]
        norm = torch.stack([p.grad.float().norm() for p in params if p.grad is not None]).norm()
        self.steps.append((name, norm.item()))


class RecordingAmp(AmpPrecision):
    """Notes the keywords of each backward pass."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__.setdefault("seen", []).append(kwargs.get("loss_id"))
        super().backward(tensor, model, optimizer, *args, **kwargs)


def small(**settings: Any) -> DCGAN:
    torch.manual_seed(1)
    return DCGAN(**{"image_size": 16, "nc": 1, "nz": 8, "ngf": 4, "ndf": 4, **settings})


def fit(model: DCGAN, *callbacks: pl.Callback, batches: int = 2, epochs: int = 1, **trainer: Any) -> pl.Trainer:
    """Trains on the same random images each time, with the same noise."""
    torch.manual_seed(2)
    images = torch.rand(8 * batches, 1, 16, 16) * 2 - 1
    loader = DataLoader([(image, 0) for image in images], batch_size=8)  # type: ignore[arg-type]
    names = ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar")
    quiet = dict.fromkeys(names, False)
    done = pl.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=list(callbacks), **quiet, **trainer)  # type: ignore[arg-type]
    done.fit(model, loader)
    return done


def pictures(folder: Path, **settings: Any) -> ImageGrid:
    """What the configurations name."""
    named = {"name": "amp_fake_samples", "file": "{name}_epoch_{epoch:03d}.png", "real": "real_samples"}
    return ImageGrid(folder=str(folder), **named, **settings)


def weights(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in network.parameters()])


def read_grid(file: Path) -> Tensor:
    """Reads grey levels, ``(height, width)``."""
    picture = Image.open(file).convert("L")
    return torch.tensor(list(picture.tobytes()), dtype=torch.float32).reshape(picture.height, picture.width)


# The module


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_both_networks_train(level: str | None) -> None:
    """At every opt level, and under Lightning's own precision."""
    model = small()
    before = weights(model.netD), weights(model.netG)
    plugins = None if level is None else [AmpPrecision(level, num_losses=3, init_scale=1024.0)]  # type: ignore[arg-type]
    trainer = fit(model, plugins=plugins)
    for old, network in zip(before, (model.netD, model.netG), strict=True):
        assert weights(network).isfinite().all()
        assert (weights(network) - old).abs().max() > 1e-4
    losses = {name: trainer.callback_metrics[name].item() for name in ("d_real", "d_fake", "g")}
    assert all(0 < loss < 5 for loss in losses.values())


def test_losses_are_those_of_the_paper() -> None:
    """Computed by hand before the first step: real images real, generated ones not, generated ones passing as real."""
    model, reference = small(lr=0.0), small()
    noise: list[Tensor] = []
    model.netG.register_forward_pre_hook(lambda _, args: noise.append(args[0]))
    trainer = fit(model, batches=1)
    torch.manual_seed(2)
    real = torch.rand(8, 1, 16, 16) * 2 - 1
    on_real, on_fake = (reference.netD(images).double().sigmoid() for images in (real, reference.netG(noise[-1])))
    wanted = {"d_real": -on_real.log().mean(), "d_fake": -(1 - on_fake).log().mean(), "g": -on_fake.log().mean()}
    for name, loss in wanted.items():
        assert trainer.callback_metrics[name].item() == pytest.approx(loss.item(), rel=1e-5)
    assert abs(wanted["d_fake"] - wanted["g"]) > 1e-3


@pytest.mark.parametrize(
    ("loss_ids", "expected"), [((0, 1, 2), [0, 1, 2]), ((0, 0, 0), [0, 0, 0]), (None, [None, None, None])]
)
def test_losses_are_named_to_the_plugin(loss_ids: Any, expected: list[int | None]) -> None:
    plugin = RecordingAmp("O1", num_losses=3)
    fit(small(loss_ids=loss_ids), plugins=[plugin], batches=1)
    assert plugin.seen == expected


def test_scalers_per_optimizer_without_names() -> None:
    plugin = AmpPrecision("O1")
    fit(small(loss_ids=None), plugins=[plugin])
    assert len(plugin.loss_scales()) == 2


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_toggling_changes_nothing_but_the_work(level: str) -> None:
    results = []
    for toggle in (True, False):
        model = small(toggle=toggle)
        fit(model, plugins=[AmpPrecision(level, num_losses=3, init_scale=1024.0)], batches=3)  # type: ignore[arg-type]
        results.append(torch.cat([weights(model.netD), weights(model.netG)]))
    assert torch.equal(*results)


def test_clipping_is_per_network_and_of_true_gradients() -> None:
    free, clipped = Watch(), Watch()
    fit(small(), free, plugins=[AmpPrecision("O1", num_losses=3, init_scale=1024.0)], batches=1)
    plugin = AmpPrecision("O1", num_losses=3, init_scale=1024.0)
    fit(small(), GradientClipping([0.5, 1e-3]), clipped, plugins=[plugin], batches=1)
    assert dict(free.steps)["d"] > 0.5
    assert dict(free.steps)["g"] > 1e-3
    assert dict(clipped.steps)["d"] == pytest.approx(0.5, rel=1e-3)
    assert dict(clipped.steps)["g"] == pytest.approx(1e-3, rel=1e-3)


def test_accumulation_steps_at_the_end_of_a_window_and_of_an_epoch() -> None:
    """Five batches in windows of two: three steps each, the last from one batch."""
    watch = Watch()
    fit(small(accumulate=2), watch, batches=5)
    assert [name for name, _ in watch.steps] == ["d", "g"] * 3


def test_accumulated_gradients_are_means() -> None:
    """The same images and the same noise twice in one window give the gradient of having them once."""
    norms = []
    for accumulate in (1, 2):
        model, watch = small(accumulate=accumulate, lr=0.0), Watch()
        torch.manual_seed(2)
        image = torch.rand(1, 16, 16)
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, callbacks=[watch], logger=False, enable_checkpointing=False,
            enable_model_summary=False, enable_progress_bar=False,
        )  # fmt: skip
        model.noise = lambda count: torch.ones(count, 8, 1, 1)  # type: ignore[method-assign]
        trainer.fit(model, DataLoader([(image, 0)] * 4 * accumulate, batch_size=4))  # type: ignore[arg-type]
        norms.append(dict(watch.steps))
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"accumulate": 0}, "accumulate=0"), ({"accumulate": 2, "toggle": False}, "accumulate=2 needs toggle=True")],
)
def test_bad_accumulation_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        small(**settings)


# What it leaves


@pytest.mark.parametrize("level", LEVELS)
def test_weights_are_float32_and_plain(level: str, tmp_path: Path) -> None:
    """Each epoch's files load into a bare network; the last are what the training ended with."""
    model = small()
    plugin = AmpPrecision(level, num_losses=3, init_scale=1024.0)  # type: ignore[arg-type]
    fit(model, NetworkWeights(str(tmp_path)), epochs=2, plugins=[plugin])
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["netD_epoch_0.pth", "netD_epoch_1.pth", "netG_epoch_0.pth", "netG_epoch_1.pth"]
    for name, bare in (("netG", Generator(16, 8, 4, 1)), ("netD", Discriminator(16, 4, 1))):
        saved = torch.load(tmp_path / f"{name}_epoch_1.pth", weights_only=True)
        assert {value.dtype for value in saved.values()} <= {torch.float32, torch.int64}
        bare.load_state_dict(saved, strict=True)
        assert torch.equal(weights(bare), weights(model.get_submodule(name)))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_training_goes_on_from_saved_weights(level: str, tmp_path: Path) -> None:
    first = small()
    fit(first, NetworkWeights(str(tmp_path)))
    files = {f"weights_{x}": str(tmp_path / f"net{x.upper()}_epoch_0.pth") for x in "gd"}
    torch.manual_seed(99)
    second = small(lr=0.0, **files)
    assert not torch.equal(weights(second), weights(first))
    fit(second, plugins=[AmpPrecision(level, num_losses=3)])  # type: ignore[arg-type]
    assert torch.equal(weights(second), weights(first))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    torch.save(Generator(16, 8, 2, 1).state_dict(), tmp_path / "netG.pth")
    with pytest.raises(
        InputError, match=r"netG.pth' do not fit this Generator: .*Use the sizes they were trained with"
    ):
        fit(small(weights_g=str(tmp_path / "netG.pth")))
    with pytest.raises(InputError, match=r"no file '.*gone.pth' to read the Discriminator's weights from"):
        fit(small(weights_d=str(tmp_path / "gone.pth")))


@pytest.mark.parametrize("level", LEVELS)
def test_pictures_are_written(level: str, tmp_path: Path) -> None:
    """The last grid shows what the trained generator makes of the fixed noise, within half precision's rounding."""
    plugin = AmpPrecision(level, num_losses=3, init_scale=1024.0)  # type: ignore[arg-type]
    model = small()
    fit(model, pictures(tmp_path, count=9, seed=5), batches=40, epochs=2, plugins=[plugin])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["amp_fake_samples_epoch_000.png", "amp_fake_samples_epoch_001.png", "real_samples.png"]
    noise = torch.randn(9, 8, 1, 1, generator=torch.Generator().manual_seed(5))
    expected = (model.eval()(noise) + 1) * 127.5
    drawn = read_grid(tmp_path / names[1])
    assert drawn.shape == (3 * 18 + 2, 3 * 18 + 2)
    assert expected.std() > 5
    for i in range(9):
        row, column = 18 * (i // 3) + 2, 18 * (i % 3) + 2
        assert (drawn[row : row + 16, column : column + 16] - expected[i, 0]).abs().max() < 2


def test_real_picture_shows_the_batch(tmp_path: Path) -> None:
    """Images in ±1 come out as grey levels from 0 to 255, whatever the batch holds."""
    model = small(lr=0.0)
    fit(model, pictures(tmp_path, count=8), batches=1)
    torch.manual_seed(2)
    expected = (torch.rand(8, 1, 16, 16) * 255).round()
    assert (read_grid(tmp_path / "real_samples.png")[2:18, 2:18] - expected[0, 0]).abs().max() <= 1


def test_looking_changes_nothing(tmp_path: Path) -> None:
    """Weights, running statistics and random numbers are those of a training without pictures."""
    results = []
    for callbacks in ([], [pictures(tmp_path, every_n_batches=1)]):
        model = small()
        fit(model, *callbacks, batches=3)
        assert model.netG.training
        results.append([*model.state_dict().values(), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_samples_are_drawn_from_the_same_noise(tmp_path: Path) -> None:
    """With weights and running statistics that stay, two epochs' grids are the same file."""
    model = small(lr=0.0)
    for module in model.netG.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    fit(model, pictures(tmp_path), epochs=2)
    first, second = (tmp_path / f"amp_fake_samples_epoch_00{i}.png" for i in range(2))
    assert first.read_bytes() == second.read_bytes()
