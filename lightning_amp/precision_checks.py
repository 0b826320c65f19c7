"""What the Lightning plugin cannot train, each refused with a sentence."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import LBFGS

from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.opt_levels import AmpConfig

_SUPPORTED_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
_UNSUPPORTED_STRATEGIES = {"DeepSpeedStrategy", "ModelParallelStrategy"}  # the first derives from DDPStrategy


def refuse_half(module: nn.Module, config: AmpConfig) -> None:
    """Refuses a module that has half weights where the level trains float32 ones."""
    for name, param in module.named_parameters():
        if param.dtype in HALF_DTYPES:
            raise MisconfigurationException(
                f"Parameter {name!r} is {param.dtype} already, and opt_level={config.opt_level!r} trains float32 "
                "weights. Convert it with .float(), or use opt_level='O2' or 'O3', which train half ones."
            )


def refuse_strategy(strategy: Any) -> None:
    """Refuses a strategy that would show the plugin gradients that are not what they seem."""
    names = {c.__name__ for c in type(strategy).__mro__}
    if names & _UNSUPPORTED_STRATEGIES or not names & _SUPPORTED_STRATEGIES:
        raise MisconfigurationException(
            f"{type(strategy).__name__} cannot be used with AmpPrecision, which would not see its gradients as they "
            "are. Use a single device, 'ddp', 'ddp_spawn' or 'ddp_fork', or that strategy's own precision."
        )


def refuse_device(device: torch.device, config: AmpConfig) -> None:
    """Refuses a kind of device on which functions cannot be cast, where the level casts them."""
    if config.patch_torch_functions and not torch.amp.is_autocast_available(device.type):
        raise MisconfigurationException(
            f"opt_level={config.opt_level!r} casts functions by autocast, which torch does not have on {device.type!r}."
            " Use accelerator='cpu' or 'gpu', or opt_level='O2' or 'O3', which cast weights."
        )


def refuse_lbfgs(optimizers: Iterable[Any], config: AmpConfig) -> None:
    """Refuses an optimizer that runs backward passes of its own."""
    if any(isinstance(o, LBFGS) for o in optimizers):
        raise MisconfigurationException(
            f"LBFGS cannot be used at opt_level={config.opt_level!r}: it runs the backward pass inside its step, where "
            "a scale cannot be taken out. Use opt_level='O0', or another optimizer."
        )
