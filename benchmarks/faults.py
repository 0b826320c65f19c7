"""Faults injected into one batch of a training, at each level: what became of weights, optimizer state and buffers.

    python -m benchmarks.faults          # prints the table of docs/faults.md, about a minute on one core

A cell says ``equal`` where weights and optimizer state after the training are those of the same training without the
faulty batch, bit for bit, and what became of BatchNorm's running statistics: ``clean`` (as without the batch),
``moved`` (finite, but the batch counted), ``spoilt`` (non-finite). The second table is the same with the callback
``NonFiniteReport(restore_buffers=True)``. The command fails where a weight or a state is not equal.
"""

import argparse
import logging
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import AmpPrecision
from lightning_amp.callbacks import NonFiniteReport

LEVELS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O3": {"opt_level": "O3", "loss_scale": 128.0},
    "O1 bf16": {"opt_level": "O1", "dtype": "bfloat16"},
    "O2 bf16": {"opt_level": "O2", "dtype": "bfloat16"},
}
FAULTY, BATCHES = 3, 8


class NonFiniteGradient(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns ``x``."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Returns infinity."""
        return torch.full_like(grads[0], torch.inf)


FAULTS: dict[str, Any] = {
    "infinite loss": lambda module, x: module.loss(x) * torch.inf,
    "NaN loss": lambda module, x: module.loss(x) * torch.nan,
    "log of zero in the loss": lambda module, x: module.loss(x) + (module.head.bias * 0).float().log().sum(),
    "infinite gradient": lambda module, x: module.loss(x, NonFiniteGradient.apply),
    "NaN in the batch": lambda module, x: module.loss(torch.where(x > 1, torch.nan, x)),
    "infinity in the batch": lambda module, x: module.loss(torch.where(x > 1, torch.inf, x)),
    "a loss of 1e38": lambda module, x: module.loss(x) * 1e38 * 1e4,
}


class Classifier(pl.LightningModule):
    """A convolution with BatchNorm and a head; one batch is faulty.

    Args:
        fault: What the faulty batch's loss is, or None for none.
    """

    def __init__(self, fault: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(24, 1)
        self.fault = fault

    def loss(self, x: Tensor, between: Any = lambda h: h) -> Tensor:
        """Returns the loss of a batch ``[N, 1, 8]``, with ``between`` applied to the features."""
        return (self.head(between(self.body(x))).float() - 1).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.fault is not None and batch_idx == FAULTY:
            return self.fault(self, batch)  # type: ignore[no-any-return]
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4)


def train(fault: Any, level: dict[str, Any], leave_out: bool, restore: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Trains and returns the module's state and the optimizer's.

    Args:
        fault: From `FAULTS`, or None.
        level: From `LEVELS`.
        leave_out: Whether the faulty batch is left out.
        restore: Whether buffers are restored after a skip.
    """
    module = Classifier(fault)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 1, 8, generator=generator) for _ in range(BATCHES)]
    if leave_out:
        del batches[FAULTY]
    settings: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 10_000} | level
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[AmpPrecision(**settings)],
        callbacks=[NonFiniteReport(restore_buffers=True)] if restore else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    states = trainer.optimizers[0].state.values()
    return module.state_dict(), [v for state in states for v in state.values() if isinstance(v, Tensor)]


def judge(fault: Any, level: dict[str, Any], restore: bool) -> str:
    """Returns the cell of a fault at a level: the verdict on weights and states, and that on buffers.

    Args:
        fault: From `FAULTS`.
        level: From `LEVELS`.
        restore: Whether buffers are restored after a skip.
    """
    (given, given_state), (wanted, wanted_state) = (
        train(fault, level, leave_out=False, restore=restore),
        train(None, level, leave_out=True, restore=False),
    )
    buffers = [name for name in given if "running" in name]
    equal = all(torch.equal(given[n], wanted[n]) for n in given if n not in buffers and "tracked" not in n)
    equal = equal and all(torch.equal(a, b) for a, b in zip(given_state, wanted_state, strict=True))
    if not all(torch.isfinite(given[n]).all() for n in buffers):
        return f"{'equal' if equal else 'DIFFERENT'}, spoilt"
    clean = all(torch.equal(given[n], wanted[n]) for n in buffers)
    return f"{'equal' if equal else 'DIFFERENT'}, {'clean' if clean else 'moved'}"


def table(restore: bool) -> tuple[str, bool]:
    """Returns the table in Markdown, and whether every weight and state was equal.

    Args:
        restore: Whether buffers are restored after a skip.
    """
    lines = ["| fault | " + " | ".join(LEVELS) + " |", "| --- |" + " --- |" * len(LEVELS)]
    fine = True
    for name, fault in FAULTS.items():
        cells = [judge(fault, level, restore) for level in LEVELS.values()]
        fine = fine and not any("DIFFERENT" in cell for cell in cells)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines), fine


def main() -> int:
    """Prints both tables; returns 1 if a weight or a state is not equal."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    plain, restored = table(restore=False), table(restore=True)
    print(f"{plain[0]}\n\nWith NonFiniteReport(restore_buffers=True):\n\n{restored[0]}")
    return int(not (plain[1] and restored[1]))


if __name__ == "__main__":
    sys.exit(main())
