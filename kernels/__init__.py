"""Fused operations over whole lists of gradients and weights, chosen by device."""

import os
import re
import warnings
from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch

from lightning_amp.kernels import reference

CHOICES = ("auto", "reference", "triton")
OLDEST_TRITON = (3, 6)


def backend(device: torch.device, choice: str | None = None) -> ModuleType:
    """Returns the module whose functions run on ``device``; all have the reference's signatures.

    Triton is imported only here, and only where it is used.

    Args:
        device: Where the tensors live.
        choice: ``"reference"``, ``"triton"`` or ``"auto"`` (Triton on CUDA); by default the environment variable
            ``LIGHTNING_AMP_KERNELS``, else ``"auto"``. Where Triton cannot run, one warning says so and the reference
            runs. On the CPU it runs only if asked for, and in its interpreter (``TRITON_INTERPRET=1``).

    Raises:
        ValueError: If the choice is none of these.

    Example:
        >>> backend(torch.device("cpu"), "reference").__name__
        'lightning_amp.kernels.reference'
    """
    return _backend(device.type, choice or os.environ.get("LIGHTNING_AMP_KERNELS") or "auto")


@lru_cache
def _backend(device_type: str, choice: str) -> ModuleType:
    if choice not in CHOICES:
        raise ValueError(f"Kernels {choice!r} are not known; LIGHTNING_AMP_KERNELS may be one of {', '.join(CHOICES)}.")
    if choice == "reference" or (choice == "auto" and device_type != "cuda"):
        return reference
    obstacle = _obstacle(device_type)
    if obstacle:
        warnings.warn(f"The Triton kernels are not used, plain PyTorch runs in their place: {obstacle}", stacklevel=3)
        return reference
    return import_module("lightning_amp.kernels.triton_backend")


def _obstacle(device_type: str) -> str | None:
    """Returns why Triton cannot run on a kind of device, None if it can."""
    try:
        found: str = import_module("triton").__version__
    except ImportError:
        return "Triton is not installed; `pip install triton` adds it."
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"Triton {found} is too old; `pip install -U triton` gets one from {oldest} on."
    if device_type == "cuda":
        # Without a GPU only fake tensors get here, whose launches are counted and not made.
        old = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() < (7, 0)
        return "this GPU is older than compute capability 7.0." if old else None
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"there is none for {device_type!r}; on the CPU they run in Triton's interpreter (TRITON_INTERPRET=1)."
