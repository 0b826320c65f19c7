"""DCGAN on 64x64 images through Lightning's Trainer: images a second under our levels and Lightning's precisions."""

import logging
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu_timing import Setting
from examples.dcgan.networks import Discriminator, Generator
from lightning_amp import AmpPrecision

Row = dict[str, Any]

PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "O0", "O1", "O2", "O3")


class _Gan(pl.LightningModule):
    """A discriminator and a generator that learn in turns, and the clock that times windows of steps."""

    def __init__(self, setting: Setting, fused: bool, warm_up: int, window: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        size, width = (16, 4) if setting.dry else (64, 64)
        self.generator = Generator(image_size=size, ngf=width)
        self.discriminator = Discriminator(image_size=size, ndf=width)
        self.seconds: list[float] = []
        self._setting, self._fused, self._warm_up, self._window = setting, fused, warm_up, window
        self._start = 0.0

    def configure_optimizers(self) -> Any:
        options: dict[str, Any] = {"lr": 2e-4, "betas": (0.5, 0.999), "fused": self._fused or None}
        networks: tuple[nn.Module, ...] = (self.discriminator, self.generator)
        return [torch.optim.Adam(network.parameters(), **options) for network in networks]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        (real,) = batch
        optimizer_d, optimizer_g = self.optimizers()  # type: ignore[misc]
        noise = torch.randn(len(real), 100, 1, 1, device=self.device)

        def judged(logits: Tensor, target: float) -> Tensor:
            return binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))

        self.toggle_optimizer(optimizer_d)
        optimizer_d.zero_grad()
        self.manual_backward(judged(self.discriminator(real), 1.0))
        self.manual_backward(judged(self.discriminator(self.generator(noise).detach()), 0.0))
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)
        self.toggle_optimizer(optimizer_g)
        optimizer_g.zero_grad()
        self.manual_backward(judged(self.discriminator(self.generator(noise)), 1.0))
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1 - self._warm_up
        if done >= 0 and done % self._window == 0:
            self._setting.wait()
            now = time.perf_counter()
            if done:
                self.seconds.append((now - self._start) / self._window)
            self._start = now


def _train(setting: Setting, precision: str, fused: bool) -> Row:
    batch, warm_up, window, windows = (4, 1, 1, 1) if setting.dry else (128, 30, 60, 2)
    pl.seed_everything(0, verbose=False)
    gan = _Gan(setting, fused, warm_up, window)
    images = torch.rand((warm_up + window * windows) * batch, 3, *(2 * (16 if setting.dry else 64,))) * 2 - 1
    ours = precision.startswith("O")
    plugin = AmpPrecision(opt_level=precision) if ours else None  # type: ignore[arg-type]
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator=setting.device.type if setting.is_cuda else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"plugins": [plugin]} if ours else {"precision": precision}),  # type: ignore[arg-type]
    )
    loader = DataLoader(TensorDataset(images.to(setting.device)), batch_size=batch)
    trainer.fit(gan, loader)
    rate = batch / min(gan.seconds)
    scales = plugin.engine.loss_scales() if plugin is not None and precision != "O0" else {}
    finite = all(bool(p.isfinite().all()) for p in gan.parameters())
    return {"precision": precision, "fused": fused, "images/s": rate, "scales": scales, "finite": finite}


def dcgan(setting: Setting, more_time: Any = lambda: True) -> list[Row]:
    """Trains under every precision, fused and not, two rounds in opposite order; the better of both counts.

    Args:
        setting: Where.
        more_time: Whether another training may start.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.backends.cudnn.benchmark = True
    variants = [(precision, fused) for fused in (True, False) for precision in PRECISIONS]
    best: dict[tuple[str, bool], Row] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for order in (variants, variants[::-1])[: 1 if setting.dry else 2]:
            for variant in order:
                if not more_time():
                    continue
                if not setting.is_cuda and variant[0] == "16-mixed":
                    continue  # Lightning has a loss scaler for CUDA only
                row = _train(setting, *variant)
                if variant not in best or best[variant]["images/s"] < row["images/s"]:
                    best[variant] = row
    return [best[variant] for variant in variants if variant in best]
