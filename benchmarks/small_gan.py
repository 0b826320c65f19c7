"""A small GAN under manual optimization, two optimizers and three losses, and the precisions it is compared under."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from lightning_amp import AmpPrecision

WIDTH, BATCH = 32, 16
LOSSES, OPTIMIZERS = 3, 2
PRECISIONS = ("32-true", "16-mixed", "O0", "O1", "O1 step", "O2")
"""Lightning's own two, the first three levels, and O1 with ``cache_casts="step"``."""

Style = Literal["named", "toggled", "plain"]


@dataclass(frozen=True)
class Setup:
    """One training to look at.

    Attributes:
        precision: One of `PRECISIONS`.
        tensors: How many parameter tensors the two networks have together: a multiple of four.
        style: How a loss is told apart: ``"named"`` (loss ids), ``"toggled"`` (`toggle_optimizer`), ``"plain"``
            (neither: the plugin walks the graph). Lightning's own precisions know no loss ids.
        fused: Whether Adam is torch's fused one, else the foreach one.
    """

    precision: str
    tensors: int = 8
    style: Style = "named"
    fused: bool = False

    def plugin(self) -> Precision | None:
        """Returns the plugin for a Trainer, None for Lightning's default. All scales start alike, and low enough."""
        if self.precision == "32-true":
            return None
        if self.precision == "16-mixed":
            return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        level, _, cached = self.precision.partition(" ")
        options: dict[str, Any] = {"cache_casts": "step"} if cached else {}
        return AmpPrecision(level, num_losses=LOSSES, init_scale=1024.0, **options)  # type: ignore[arg-type]


def _network(depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(WIDTH, WIDTH)
        # Gradients that vanish over many layers end as subnormal numbers, on which a CPU is slow.
        nn.init.kaiming_normal_(linear.weight, a=0.2)
        layers += [linear, nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class SmallGan(pl.LightningModule):
    """Two stacks of linear layers that train against each other; `phase` says what the step is at.

    Args:
        setup: What to train.
    """

    noise: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.setup_ = setup
        self.netG, self.netD = _network(setup.tensors // 4), _network(setup.tensors // 4)
        self.register_buffer("noise", torch.randn(BATCH, WIDTH))
        self.phase = "forward"
        """``"forward"``, ``"backward"`` or ``"step"``."""

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns Adam for the discriminator, then for the generator."""
        kind: dict[str, Any] = {"fused": True} if self.setup_.fused else {"foreach": True}
        return [
            torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999), **kind) for net in (self.netD, self.netG)
        ]

    @contextmanager
    def _at(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield
        self.phase = "forward"

    def _backward(self, logits: Tensor, target: float, loss_id: int) -> None:
        loss = binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))
        named = self.setup_.style == "named" and isinstance(self.trainer.precision_plugin, AmpPrecision)
        with self._at("backward"):
            self.manual_backward(loss, **({"loss_id": loss_id} if named else {}))

    def _step(self, optimizer: Any) -> None:
        with self._at("step"):
            optimizer.step()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Takes a step of the discriminator on real and on fake samples, then one of the generator."""
        toggled = self.setup_.style == "toggled"
        optimizer_d, optimizer_g = self.optimizers()  # type: ignore[attr-defined]
        if toggled:
            self.toggle_optimizer(optimizer_d)
        optimizer_d.zero_grad()
        self._backward(self.netD(batch[0]), 1.0, 0)
        fake = self.netG(self.noise)
        self._backward(self.netD(fake.detach()), 0.0, 1)
        self._step(optimizer_d)
        if toggled:
            self.untoggle_optimizer(optimizer_d)
            self.toggle_optimizer(optimizer_g)
            fake = self.netG(self.noise)
        optimizer_g.zero_grad()
        self._backward(self.netD(fake), 1.0, 2)
        self._step(optimizer_g)
        if toggled:
            self.untoggle_optimizer(optimizer_g)


def train(setup: Setup, steps: int, callback: pl.Callback) -> None:
    """Trains a fresh GAN, the same one whatever the precision.

    Args:
        setup: What to train.
        steps: How many training steps.
        callback: Watches them.
    """
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(BATCH * steps, WIDTH)), BATCH)
    plugin = setup.plugin()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[] if plugin is None else [plugin],
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(SmallGan(setup), data)
