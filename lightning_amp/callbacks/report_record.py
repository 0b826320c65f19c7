"""What `AmpReport` notes while a training runs: plain data, and the functions that gather it."""

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp.batches import tensors_in
from lightning_amp.outcomes import LossAccount, Outcome

Points = list[tuple[int, float]]
"""Values by batch, counted from one."""


@dataclass
class Record:
    """The course of a training.

    Attributes:
        batches: The latest batch.
        scales: Where each loss's scale changed, and to what.
        overflows: Where a backward pass of a loss overflowed, and the scale it had.
        accounts: What each loss scale has been through by now.
        zeros: The share of each optimizer's gradient elements that were zero, now and then.
        seconds: How long each batch took.
        steps: The steps of each optimizer by outcome.
        modules: The names of the modules that are alike, by class and dtypes of weights, input and output.
    """

    batches: int = 0
    scales: dict[str, Points] = field(default_factory=dict)
    overflows: dict[str, Points] = field(default_factory=dict)
    accounts: dict[str, LossAccount] = field(default_factory=dict)
    zeros: dict[str, Points] = field(default_factory=dict)
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    steps: dict[str, Mapping[Outcome, int]] = field(default_factory=dict)
    modules: dict[tuple[str, ...], list[str]] = field(default_factory=dict)

    def take(self, accounts: Mapping[str, LossAccount]) -> None:
        """Notes how the scales stand after the latest batch.

        Args:
            accounts: By the loss's name.
        """
        for name, account in accounts.items():
            points, before = self.scales.setdefault(name, []), self.accounts.get(name)
            if before is not None and account.overflows > before.overflows:
                self.overflows.setdefault(name, []).append((self.batches, before.scale))
            elif before is None and 0 < account.overflows == account.attempts:  # from the first pass on
                self.overflows.setdefault(name, []).append((self.batches, account.highest))
                points.append((self.batches - 1, account.highest))
            if not points or points[-1][1] != account.scale:
                points.append((self.batches, account.scale))
        self.accounts = dict(accounts)


def zero_share(optimizer: Optimizer) -> float | None:
    """Returns the share of gradient elements that are zero, None where there are none; one host synchronisation.

    Args:
        optimizer: Its parameters' gradients are looked at.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad.to_dense() for p in params if p.grad is not None]
    if not grads:
        return None
    zeros = torch.stack([(g == 0).sum().to(grads[0].device) for g in grads]).sum()
    count: int = sum(g.numel() for g in grads)
    return int(zeros) / count


def optimizer_names(module: nn.Module, optimizers: list[Optimizer]) -> list[str]:
    """Returns a name for each optimizer: its index, and the children of ``module`` that it trains.

    Args:
        module: The root.
        optimizers: Its optimizers.
    """
    child = {p: name.partition(".")[0] for name, p in module.named_parameters()}
    names = []
    for i, optimizer in enumerate(optimizers):
        trained = {child[p]: None for group in optimizer.param_groups for p in group["params"] if p in child}
        names.append(f"optimizer {i} ({', '.join(trained)})" if 0 < len(trained) <= 3 else f"optimizer {i}")
    return names


def watch_dtypes(module: nn.Module, seen: dict[tuple[str, ...], list[str]]) -> list[Any]:
    """Has every module without children note its dtypes when it first runs; returns handles to remove.

    Args:
        module: The root.
        seen: Gets the modules' names, by class and dtypes of weights, input and output.
    """
    done: set[str] = set()

    def hook_of(name: str) -> Any:
        def hook(leaf: nn.Module, args: Any, output: Any) -> None:
            if name in done or torch.compiler.is_compiling():
                return
            done.add(name)
            kinds = (_dtypes(list(leaf.parameters())), _dtypes(args), _dtypes(output))
            seen.setdefault((type(leaf).__name__, *kinds), []).append(name)

        return hook

    leaves = [(n, m) for n, m in module.named_modules() if n and not list(m.children())]
    return [leaf.register_forward_hook(hook_of(name)) for name, leaf in leaves]


def _dtypes(tree: Any) -> str:
    """Returns the floating dtypes in a tree, in the order they come."""
    kinds = Counter(_word(t) for t in tensors_in(tree) if t.is_floating_point())
    return ", ".join(kinds) or "none"


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
