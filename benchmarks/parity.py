"""The same LightningModules at O0 and at each level: how far their weights end up from each other.

    python -m benchmarks.parity            # the whole table, about two minutes on one core
    python -m benchmarks.parity --quick    # one optimizer

Each row is a training of two networks with three losses, its columns are levels. A cell is the distance between a
network's weights after training at that level and at O0, over the distance they moved at O0, for the worse network;
``<=`` gives the tolerance of the level, and the command fails where a cell is above it.
"""

import argparse
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision

STEPS = 24
LEVELS = {"O1": 0.03, "O2": 0.03, "O1 bf16": 0.1, "O2 bf16": 0.1}
"""The levels, and how far from O0 they may end up; bfloat16 has three bits fewer."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=2e-3, betas=(0.5, 0.999), eps=1e-4),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=2e-3, betas=(0.5, 0.999), eps=1e-4, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=2e-3, eps=1e-4, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3),
}
"""Adam's eps is large, so that a gradient near zero moves a weight in proportion and not by its sign."""


@dataclass(frozen=True)
class Row:
    """One training: an optimizer and what is asked of it."""

    optimizer: str
    window: int
    clip: str
    toggled: bool
    automatic: bool = False

    def __str__(self) -> str:
        mode = "automatic" if self.automatic else "toggled" if self.toggled else "untoggled"
        return f"{self.optimizer:14} {self.window:6} {self.clip:6} {mode:10}"


class Pair(pl.LightningModule):
    """A generator and a discriminator of two layers each.

    Args:
        row: What to do.
    """

    def __init__(self, row: Row) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row = row
        self.automatic_optimization = row.automatic
        self.d = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.g = nn.Sequential(nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))

    def losses(self, real: Tensor, noise: Tensor) -> Iterator[tuple[int, Tensor]]:
        fake = self.g(noise)
        for index, (x, target) in enumerate(((real, 1.0), (fake.detach(), 0.0), (fake, 1.0))):
            score = self.d(x)
            yield index, bce(score, torch.full_like(score, target)) / (1 if self.row.automatic else self.row.window)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return torch.stack([loss for _, loss in self.losses(*batch)]).sum()
        last = (batch_idx + 1) % self.row.window == 0
        optimizers = self.optimizers()
        for index, loss in self.losses(*batch):
            optimizer = optimizers[index // 2]
            if self.row.toggled and index != 1:
                self.toggle_optimizer(optimizer)
                if index == 2:
                    loss = list(self.losses(*batch))[2][1]
            self.manual_backward(loss)
            if index:
                if last:
                    self.finish(optimizer)
                if self.row.toggled:
                    self.untoggle_optimizer(optimizer)
        return None

    def finish(self, optimizer: Any) -> None:
        if self.row.clip != "none":
            self.clip_gradients(optimizer, 0.05 if self.row.clip == "norm" else 0.01, self.row.clip)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        make = OPTIMIZERS[self.row.optimizer]
        return (
            make(self.parameters()) if self.automatic_optimization else [make(m.parameters()) for m in (self.d, self.g)]
        )


def train(row: Row, level: str) -> dict[str, Tensor]:
    """Trains a row at a level and returns the weights, float32, by name.

    Args:
        row: The training.
        level: ``"O0"`` to ``"O3"``, with `` bf16`` behind it for bfloat16.
    """
    module = Pair(row)
    generator = torch.Generator().manual_seed(1)
    batches = [[torch.randn(16, 8, generator=generator) for _ in range(2)] for _ in range(STEPS)]
    name, _, half = level.partition(" ")
    settings: dict[str, Any] = {"accumulate_grad_batches": row.window} if row.automatic else {}
    if row.automatic and row.clip != "none":
        settings |= {"gradient_clip_val": 0.05 if row.clip == "norm" else 0.01, "gradient_clip_algorithm": row.clip}
    plugin = AmpPrecision(name, "bfloat16" if half else "float16", init_scale=1024.0)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[plugin],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def difference(start: dict[str, Tensor], wanted: dict[str, Tensor], given: dict[str, Tensor]) -> float:
    """Returns, for the worse network, how far its weights ended up from those wanted, over how far those moved."""

    def distance(a: dict[str, Tensor], b: dict[str, Tensor], network: str) -> float:
        return torch.cat([(a[n] - b[n]).flatten() for n in a if n.startswith(network)]).norm().item()

    return max(distance(wanted, given, network) / distance(wanted, start, network) for network in ("d.", "g."))


def rows(quick: bool) -> list[Row]:
    """Returns the trainings of the table."""
    names = ["Adam fused"] if quick else list(OPTIMIZERS)
    windows, clips = (1, 3), ("none", "norm", "value")
    manual = [Row(*r) for r in itertools.product(names, windows, clips, (False, True))]
    return manual + [Row(n, w, c, False, automatic=True) for n, w, c in itertools.product(names, windows, clips)]


def main() -> int:
    """Prints the table; returns 1 if a cell is above its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one optimizer only")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    heads = "".join(f"{f'{level} <={tolerance:g}':>16}" for level, tolerance in LEVELS.items())
    print(f"{'optimizer':14} {'window':>6} {'clip':6} {'mode':10}{heads}")
    failed = 0
    for row in rows(args.quick):
        start = {n: p.detach().clone() for n, p in Pair(row).named_parameters()}
        wanted = train(row, "O0")
        cells = {level: difference(start, wanted, train(row, level)) for level in LEVELS}
        failed += sum(cells[level] > tolerance for level, tolerance in LEVELS.items())
        print(str(row) + "".join(f"{value:16.4f}" for value in cells.values()), flush=True)
    print(f"{failed} cells above their tolerance")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
