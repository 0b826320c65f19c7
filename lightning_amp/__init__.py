"""Mixed precision for models with several optimizers and losses."""

from typing import TYPE_CHECKING, Any

from lightning_amp.engine import Engine
from lightning_amp.opt_levels import AmpConfig, AmpConfigError, resolve
from lightning_amp.outcomes import Outcome

if TYPE_CHECKING:
    from lightning_amp.precision import AmpPrecision

__all__ = ["AmpConfig", "AmpConfigError", "AmpPrecision", "Engine", "Outcome", "resolve"]


def __getattr__(name: str) -> Any:
    # Lightning is imported by its front end only, so that the plain-PyTorch one starts without it.
    if name == "AmpPrecision":
        from lightning_amp.precision import AmpPrecision

        return AmpPrecision
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
