"""`EMAWeights`: float32 averages that follow real steps and leave training alone."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp import AmpPrecision
from lightning_amp.callbacks import EMAWeights

LEVELS = ["O0", "O1", "O2", "O3"]


class Regression(pl.LightningModule):
    """One linear layer; the batches named in ``bad`` give an infinite loss."""

    def __init__(self, bad: tuple[int, ...] = (), fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)
        self.bad = bad
        self.fused = fused
        self.seen: list[torch.Tensor] = []
        self.validated: torch.Tensor | None = None

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        return loss * torch.inf if batch_idx in self.bad else loss

    def validation_step(self, batch, batch_idx):
        self.validated = self.net.weight.detach().float().clone()

    def on_train_batch_end(self, *_):
        self.seen.append(self.trainer.precision_plugin.fp32_values([self.net.weight])[0].clone())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1, fused=self.fused, eps=1e-4)


def fit(module, level, ema, batches=6, **kwargs):
    """Trains ``module`` and returns the trainer."""
    data = DataLoader(TensorDataset(torch.randn(4 * batches, 4, generator=torch.Generator().manual_seed(1))), 4)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[AmpPrecision(level, init_scale=1024.0)],
        callbacks=[ema],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )
    trainer.fit(module, data, data if "limit_val_batches" in kwargs else None)
    return trainer


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_c32_c77_average_follows_real_steps_of_fp32_weights(level, fused):
    ema = EMAWeights(decay=0.9)
    bad = () if level == "O0" else (2, 3)
    module = Regression(bad=bad, fused=fused)
    start = module.net.weight.detach().double().clone()
    fit(module, level, ema)
    expected = start
    for i, weight in enumerate(module.seen):
        if i not in bad:
            expected = 0.9 * expected + 0.1 * weight.double()
    torch.testing.assert_close(ema.averages()["net.weight"].double(), expected, rtol=1e-6, atol=1e-7)


def test_c77_average_at_o2_moves_where_half_would_stand_still():
    ema = EMAWeights(decay=0.9999)
    module = Regression()
    start = module.net.weight.detach().clone()
    fit(module, "O2", ema)
    moved = ema.averages()["net.weight"] - start
    assert (moved != 0).all()
    assert (moved.abs() < torch.finfo(torch.float16).eps * start.abs()).any()


@pytest.mark.parametrize("level", LEVELS)
def test_validation_runs_on_the_averages_and_training_goes_on_bit_for_bit(level):
    plain, averaged = Regression(), Regression()
    fit(plain, level, EMAWeights(evaluate=False), limit_val_batches=1, val_check_interval=2)
    ema = EMAWeights(decay=0.5)
    fit(averaged, level, ema, limit_val_batches=1, val_check_interval=2)
    assert torch.equal(plain.net.weight, averaged.net.weight)
    half = torch.float16 if level in ("O2", "O3") else torch.float32
    assert torch.equal(averaged.validated, ema.averages()["net.weight"].to(half).float())


def test_window_that_is_still_open_leaves_the_average_alone():
    ema = EMAWeights(decay=0.9)
    module = Regression()
    start = module.net.weight.detach().double().clone()
    fit(module, "O1", ema, accumulate_grad_batches=3)
    expected = start
    for i in (2, 5):
        expected = 0.9 * expected + 0.1 * module.seen[i].double()
    torch.testing.assert_close(ema.averages()["net.weight"].double(), expected, rtol=1e-6, atol=1e-7)


def test_state_goes_through_a_checkpoint(tmp_path):
    ema = EMAWeights()
    trainer = fit(Regression(), "O2", ema)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]["EMAWeights"]
    other = EMAWeights()
    other.load_state_dict(saved)
    assert torch.equal(other.averages()["net.weight"], ema.averages()["net.weight"])


@pytest.mark.parametrize("decay", [0.0, 1.0, -1, 2, "0.5"])
def test_bad_decay_is_refused(decay):
    with pytest.raises(ValueError, match=r"decay=.* between 0 and 1"):
        EMAWeights(decay=decay)
