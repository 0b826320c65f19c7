"""The DCGAN in a plain loop with Apex's calls and as a LightningModule: the same losses, step by step."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from examples.dcgan.module import DCGAN, LOSSES
from examples.dcgan.train_torch import train_steps
from lightning_amp import AmpPrecision

STEPS, BATCH = 20, 16
SCALE = 128.0


class Noted(DCGAN):
    """Keeps the losses of each batch; draws noise from a generator of its own, as the plain loop does here."""

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__.setdefault("seen", []).append({name: value.item() for name, value in dictionary.items()})

    def noise(self, count: int) -> Tensor:
        return noise_of(self.__dict__.setdefault("source", torch.Generator().manual_seed(3)), count)


def noise_of(source: torch.Generator, count: int) -> Tensor:
    return torch.randn(count, 8, 1, 1, generator=source)


def batches() -> list[tuple[Tensor, int]]:
    images = torch.rand(STEPS * BATCH, 1, 16, 16, generator=torch.Generator().manual_seed(2)) * 2 - 1
    return [(image, 0) for image in images]


def model(**settings: Any) -> Noted:
    torch.manual_seed(1)
    return Noted(16, 1, 8, 4, 4, 1e-3, **settings)


def with_lightning(level: str, **settings: Any) -> Tensor:
    module = model(**settings)
    plugin = AmpPrecision(level, num_losses=3, loss_scale=1.0 if level == "O0" else SCALE)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, plugins=[plugin], logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches(), batch_size=BATCH))  # type: ignore[arg-type]
    return as_tensor(module.seen)


def with_torch(level: str) -> Tensor:
    module, source = model(), torch.Generator().manual_seed(3)
    loader = DataLoader(batches(), batch_size=BATCH)  # type: ignore[arg-type]
    scale = None if level == "O0" else SCALE
    steps = train_steps(
        module.netG, module.netD, loader, lambda n: noise_of(source, n), level, loss_scale=scale, lr=1e-3
    )
    losses = as_tensor(list(steps))
    assert all(p.dtype is torch.float32 for p in module.parameters())
    return losses


def as_tensor(losses: list[dict[str, float]]) -> Tensor:
    assert len(losses) == STEPS
    return torch.tensor([[loss[name] for name in LOSSES] for loss in losses])


@pytest.mark.parametrize("toggle", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_plain_loop_and_lightning_agree(level: str, toggle: bool) -> None:
    """Bit for bit at O0; at the others as the two differ in nothing but which casts autocast remembers."""
    lightning, plain = with_lightning(level, toggle=toggle), with_torch(level)
    assert not torch.equal(lightning[0], lightning[-1])
    if level == "O0":
        assert torch.equal(lightning, plain)
    else:
        torch.testing.assert_close(lightning, plain, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_levels_follow_float32(level: str) -> None:
    """Within a hundredth of the loss over twenty steps, and not the same: half precision really ran."""
    half, full = with_lightning(level), with_lightning("O0")
    torch.testing.assert_close(half, full, rtol=1e-2, atol=1e-2)
    assert not torch.equal(half, full)
