"""Which models and optimizers `amp.initialize` can take."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.opt_levels import AmpConfig
from lightning_amp.stepper import torch_optimizers

_NEEDED = ("param_groups", "state", "step", "zero_grad", "state_dict", "load_state_dict")


def refuse_models(models: Sequence[Any], allow_half: bool) -> None:
    """Refuses models that cannot be used.

    Args:
        models: What was given.
        allow_half: Whether their weights may be half already.

    Raises:
        TypeError: One is no module.
        ValueError: One is given twice, wrapped for data parallelism, or half.
    """
    for i, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise TypeError(f"{type(model).__name__} is no model. Give a torch.nn.Module, or a list of them.")
        if any(model is other for other in models[:i]):
            raise ValueError(f"{type(model).__name__} is there twice among the models. Give each of them once.")
        for module in model.modules():
            if isinstance(module, (DataParallel, DistributedDataParallel)):
                raise ValueError(
                    f"{type(model).__name__} is wrapped in {type(module).__name__} already. Call amp.initialize on the "
                    "model first, and wrap it afterwards."
                )
        for name, param in model.named_parameters():
            if param.dtype in HALF_DTYPES and not allow_half:
                raise ValueError(
                    f"Parameter {name!r} of {type(model).__name__} is {param.dtype} already, so its float32 value is "
                    "lost. Give the model in float32 (.float()) and let opt_level convert it, or set "
                    "allow_half_models=True."
                )


def refuse_optimizers(optimizers: Sequence[Any], config: AmpConfig) -> None:
    """Refuses what cannot be stepped.

    Args:
        optimizers: Torch's, or anything that has an optimizer's methods and shares the groups of what it wraps.
        config: The level and its settings.

    Raises:
        TypeError: One is no optimizer.
        ValueError: One is given twice, runs the backward pass itself, or hides the optimizer it wraps.
    """
    for i, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        missing = [wanted for wanted in _NEEDED if not hasattr(optimizer, wanted)]
        if missing:
            raise TypeError(
                f"{name} is no optimizer: it has no {', '.join(missing)}. Give a torch.optim.Optimizer, a wrapper that "
                "has its methods, or a list of them."
            )
        if any(optimizer is other or optimizer.param_groups is other.param_groups for other in optimizers[:i]):
            raise ValueError(f"{name} is there twice among the optimizers. Give each of them once.")
        if config.passive:
            continue
        for inner in torch_optimizers(optimizer):
            if isinstance(inner, torch.optim.LBFGS):
                raise ValueError(
                    f"LBFGS cannot be used at opt_level={config.opt_level!r}: it runs the backward pass inside its "
                    "step, where a scale cannot be taken out. Use opt_level='O0', or another optimizer."
                )
            if inner.param_groups is not optimizer.param_groups:
                raise ValueError(
                    f"{name} wraps {type(inner).__name__} and does not share its param_groups, so that it "
                    f"would not step the float32 weights. Give the {type(inner).__name__}, and wrap it afterwards."
                )
