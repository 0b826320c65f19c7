"""Toy LightningModules whose training step is a function, and a Trainer with nothing around it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp.precision import AmpPrecision

LEVELS = ("O0", "O1", "O2", "O3")
HALF_LEVELS = ("O1", "O2", "O3")
SCALED_LEVELS = ("O1", "O2")
SCALE = 1024.0
"""Where scales start in tests: high enough to show when it is left in, low enough for every first step to be taken."""

Step = Callable[[Any, Any, int], Any]
"""A training step: ``(module, batch, batch_idx)``."""


def amp(opt_level: str = "O1", **settings: Any) -> AmpPrecision:
    """Returns the plugin, its scale starting at `SCALE` unless told otherwise."""
    return AmpPrecision(opt_level, **{"init_scale": SCALE, **settings})  # type: ignore[arg-type]


class Scripted(pl.LightningModule):
    """A module of the networks it is given, which trains as the function it is given says.

    Args:
        step: What ``training_step`` does and returns.
        optimizers: Makes what ``configure_optimizers`` returns, from the module.
        automatic: Whether Lightning runs the backward pass and the steps.
        **networks: The children, by name.
    """

    def __init__(
        self, step: Step, optimizers: Callable[[Any], Any], *, automatic: bool = False, **networks: nn.Module
    ) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self._step, self._optimizers = step, optimizers
        for name, network in networks.items():
            self.add_module(name, network)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self._optimizers(self)


class Batches:
    """A data loader over these batches. A bare list of them would be one loader each to Lightning."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def trainer(plugin: Any = None, **settings: Any) -> pl.Trainer:
    """Returns a CPU Trainer of one epoch that writes nothing and prints nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(plugins=None if plugin is None else [plugin], **defaults | settings)


def fit(
    module: pl.LightningModule, plugin: Any = None, batches: Iterable[Any] = (torch.ones(1),), **settings: Any
) -> pl.Trainer:
    """Trains ``module`` on ``batches`` and returns the Trainer."""
    it = trainer(plugin, **settings)
    it.fit(module, Batches(batches))
    return it


def run(step: Step, optimizers: Callable[[Any], Any], plugin: Any = None, steps: int = 1, **networks: Any) -> Any:
    """Trains networks for some steps of manual optimization, on batches of a lone one, and returns the module."""
    module = Scripted(step, optimizers, **networks)
    fit(module, plugin, [torch.ones(1)] * steps)
    return module


def linear(*weights: float) -> nn.Linear:
    """Returns a linear layer with one output, these weights, and no bias."""
    layer = nn.Linear(len(weights), 1, bias=False)
    layer.weight.data = torch.tensor([weights])
    return layer


def sgd(*names: str, lr: float = 1.0, **settings: Any) -> Callable[[Any], Any]:
    """Returns a ``configure_optimizers`` with an SGD for each of the named children."""
    return lambda module: [torch.optim.SGD(getattr(module, n).parameters(), lr, **settings) for n in names]


def watch_steps(optimizer: Optimizer) -> list[list[Tensor | None]]:
    """Records the gradients that each raw ``step()`` of ``optimizer`` has used, float32 copies.

    Afterwards, since plain Lightning has the step itself run the backward pass in automatic optimization.
    """
    seen: list[list[Tensor | None]] = []

    def record(optimizer: Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append([None if p.grad is None else p.grad.detach().float().clone() for p in params])

    optimizer.register_step_post_hook(record)
    return seen


def weights(module: nn.Module) -> list[Tensor]:
    """Returns copies of a module's parameters, as they are."""
    return [p.detach().clone() for p in module.parameters()]


def same(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    """Tells whether two lists of tensors are equal bit for bit, dtypes included."""
    return len(left) == len(right) and all(
        a is b if a is None or b is None else a.dtype is b.dtype and torch.equal(a, b)
        for a, b in zip(left, right, strict=True)
    )
