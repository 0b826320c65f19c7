"""Mixed precision for models with several optimizers and losses."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_amp import amp
from lightning_amp.batches import register_batch_type
from lightning_amp.engine import Engine
from lightning_amp.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from lightning_amp.opt_levels import AmpConfig, AmpConfigError, resolve
from lightning_amp.outcomes import Outcome

if TYPE_CHECKING:
    from lightning_amp.precision import AmpPrecision
    from lightning_amp.trainer_arguments import trainer_kwargs

__all__ = [
    "AmpConfig",
    "AmpConfigError",
    "AmpPrecision",
    "Engine",
    "Outcome",
    "amp",
    "float_function",
    "half_function",
    "promote_function",
    "register_batch_type",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "resolve",
    "trainer_kwargs",
]


_NEEDS_LIGHTNING = {"AmpPrecision": "precision", "trainer_kwargs": "trainer_arguments"}


def __getattr__(name: str) -> Any:
    # Lightning is imported by its front end only, so that the plain-PyTorch one starts without it.
    if name in _NEEDS_LIGHTNING:
        return getattr(import_module(f"{__name__}.{_NEEDS_LIGHTNING[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
