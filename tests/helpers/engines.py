"""The engine and its parts without a framework around them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp.casting import Conversion
from lightning_amp.engine import Engine
from lightning_amp.master_weights import MasterWeights
from lightning_amp.opt_levels import AmpConfig, resolve

SCALE = 1024.0
"""Where scales start: high enough to show when it is left in, low enough for every first step to be taken."""


def config_of(level: str, **settings: Any) -> AmpConfig:
    """Returns the config of a level whose scale starts at `SCALE`."""
    return resolve(level, **{"init_scale": SCALE} | settings)


def converted(model: nn.Module, level: str = "O2", *, inside: bool = False, **settings: Any) -> Conversion:
    """Converts a model in place.

    Args:
        model: The model, or what owns the models.
        level: O2 or O3.
        inside: Whether ``model`` stands for a LightningModule, whose children are the models.
        **settings: Overrides.
    """
    config = config_of(level, **settings)
    conversion = Conversion(config, MasterWeights(config.master_weights))
    conversion.convert(model, root_is_model=not inside)
    return conversion


def masters_of(conversion: Conversion) -> MasterWeights:
    """Returns where a conversion put the originals."""
    return conversion._masters


def engine_of(
    level: str, optimizers: Sequence[Any], *models: nn.Module, engine: dict[str, Any] | None = None, **settings: Any
) -> Engine:
    """Converts models as the level says and returns the engine that trains them.

    Args:
        level: The level.
        optimizers: Over parameters of the models.
        *models: The models.
        engine: Further arguments of `Engine`.
        **settings: Overrides.
    """
    config = config_of(level, **settings)
    masters = MasterWeights(config.master_weights)
    if config.cast_model_type is not None:
        for model in models:
            Conversion(config, masters).convert(model, root_is_model=True)
    return Engine(config, optimizers, models, masters=masters, **{"num_losses": 3} | (engine or {}))


def grad_of(param: Tensor) -> Tensor:
    """Returns a gradient that is there."""
    assert param.grad is not None
    return param.grad


def param(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Returns a parameter of these values."""
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Returns the dtype of every parameter and buffer."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: tensor.dtype for name, tensor in named}


def halves(module: nn.Module) -> set[str]:
    """Returns the names of the parameters and buffers that are half."""
    return {name for name, dtype in dtypes(module).items() if dtype is torch.float16}


X = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
"""The batch of `backward`."""


def linear_training(level: str, make: Callable[..., Any], **settings: Any) -> tuple[nn.Linear, Any, Engine]:
    """Returns a linear layer, the optimizer that ``make`` makes of its parameters, and their engine."""
    layer = nn.Linear(2, 1)
    optimizer = make(layer.parameters())
    return layer, optimizer, engine_of(level, [optimizer], layer, **settings)


def backward(engine: Engine, layer: nn.Module, factor: float = 1.0) -> None:
    """Runs a pass whose gradients are multiplied by ``factor``, while the loss is not."""
    out = layer(X).float()
    out.register_hook(lambda g: g * factor)
    engine.backward(out.pow(2).sum())


def all_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Tells whether two lists of tensors hold the same values."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
