"""The WGAN-GP example: the penalty is the paper's at every level, and every configuration trains."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.wgan_gp import __main__ as command
from examples.wgan_gp.module import WGANGP
from lightning_amp import AmpPrecision

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs" / "wgan_gp").glob("*.yaml"))
TOLERANCE = {None: 1e-5, "O0": 1e-5, "O1": 2e-2, "O2": 2e-2}


class Checked(WGANGP):
    """Compares each penalty with one computed in float64 from a copy of the critic."""

    def gradient_penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        state = torch.get_rng_state()
        penalty = super().gradient_penalty(real, fake)
        torch.set_rng_state(state)
        between = torch.lerp(real, fake, torch.rand(len(real), 1, 1, 1)).double().requires_grad_()
        critic = WGANGP(16, 1, 8, 4, 4).netD.double()
        critic.load_state_dict(self.netD.state_dict())
        with torch.autocast("cpu", enabled=False):
            (gradient,) = torch.autograd.grad(critic(between).sum(), between)
        expected = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        assert penalty.requires_grad  # else the critic would not learn from it
        self.__dict__.setdefault("pairs", []).append((penalty.item(), expected.item()))
        return penalty


@pytest.mark.parametrize("level", [None, "O0", "O1", "O2"])
def test_penalty_is_that_of_float64(level: Any) -> None:
    model = Checked(16, 1, 8, 4, 4, lr=1e-3, critic_steps=2)
    with torch.no_grad():
        for p in model.netD.parameters():
            p.mul_(4)  # away from a gradient of zero, where the penalty is 1 whatever happens
    plugins = None if level is None else [AmpPrecision(level, num_losses=2, init_scale=256.0)]
    images = torch.rand(32, 1, 16, 16) * 2 - 1
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, plugins=plugins, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    trainer.fit(model, DataLoader([(image, 0) for image in images], batch_size=8))  # type: ignore[arg-type]
    assert len(model.pairs) == 4
    for penalty, expected in model.pairs:
        assert penalty == pytest.approx(expected, rel=TOLERANCE[level])
        assert not 0.99 < expected < 1.01
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert all(changed)


def test_critic_has_no_batchnorm() -> None:
    model = WGANGP(32, 1, 8, 4, 4)
    assert not [m for m in model.netD.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [m for m in model.netG.modules() if isinstance(m, nn.BatchNorm2d)]


@pytest.mark.filterwarnings("ignore:Batch .* skipped a step")  # a scale that finds its height
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_trains(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for the generator's first step."""
    small = ["--data.image_size=16", "--model.ngf=2", "--model.ndf=2", "--data.batch_size=8"]
    steps = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=5", "--trainer.log_every_n_steps=1"]
    monkeypatch.setattr(
        sys, "argv", ["wgan_gp", "fit", "--config", str(config), "--outf", str(tmp_path), *small, *steps]
    )
    trainer = command.main().trainer
    level = "O1" if config.stem == "base" else config.stem.upper()
    assert trainer.precision_plugin.config.opt_level == level
    assert {"critic", "penalty", "g"} <= set(trainer.callback_metrics)
    losses = {n: v for n, v in trainer.callback_metrics.items() if not n.startswith("amp/")}
    assert all(value.isfinite() for value in losses.values())
    assert (tmp_path / "amp_report.html").exists()
