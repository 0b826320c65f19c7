"""Running a training step once more without a trace: nothing is differentiated, stepped, logged or kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_amp.precision import AmpPrecision


class _Still:
    """Stands in for a scheduler that is not to move.

    Args:
        scheduler: The scheduler.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, *_: Any, **__: Any) -> None:
        """Does nothing."""


def floating_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the floating buffers of ``module`` by name.

    Args:
        module: Any module.
    """
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers() if buffer.is_floating_point()}


def write_buffers(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Writes back what `floating_buffers` gave.

    Args:
        module: The same module.
        values: From `floating_buffers`.
    """
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in values:
                buffer.copy_(values[name])


def random_states(device: torch.device) -> dict[torch.device, Tensor]:
    """Returns the states of torch's random numbers, those of the CPU and of ``device``.

    Args:
        device: Where a module runs.
    """
    states = {torch.device("cpu"): torch.get_rng_state()}
    if device.type == "cuda":
        states[device] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[torch.device, Tensor]) -> None:
    """Takes over what `random_states` gave.

    Args:
        states: From `random_states`.
    """
    for device, state in states.items():
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)


@contextmanager
def rehearsal(plugin: AmpPrecision, module: "pl.LightningModule") -> Iterator[None]:
    """Makes a training step harmless inside the block: run it to watch its forward passes.

    Backward passes, clips and steps do nothing, and Lightning counts none. Gradients, buffers, schedulers, what was
    logged and torch's random numbers are afterwards as they were. For use outside Lightning's own call of the step.

    Args:
        plugin: The trainer's plugin.
        module: The module that is being trained.
    """
    grads = [(p, p.grad) for p in module.parameters()]
    buffers = floating_buffers(module)
    configs = module.trainer.lr_scheduler_configs
    schedulers = [config.scheduler for config in configs]
    for param, _ in grads:
        param.grad = None
    for config in configs:
        config.scheduler = _Still(config.scheduler)  # type: ignore[assignment]
    muted = {"log": lambda *_, **__: None, "log_dict": lambda *_, **__: None}
    module.__dict__.update(muted)
    random = random_states(module.device)
    plugin.rehearsing = True
    try:
        yield
    finally:
        plugin.rehearsing = False
        set_random_states(random)
        for name in muted:
            del module.__dict__[name]
        for config, scheduler in zip(configs, schedulers, strict=True):
            config.scheduler = scheduler
        write_buffers(module, buffers)
        for param, grad in grads:
            param.grad = grad
