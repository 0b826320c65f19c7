"""What a training had better know of its settings when it starts: those that do nothing, and those that do harm."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from lightning_amp.casting import matches
from lightning_amp.opt_levels import AmpConfig, KeepFp32


def notices(config: AmpConfig, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[str]:
    """Returns a sentence for each; the front ends warn of them.

    Args:
        config: The level and its settings.
        models: Where ``keep_fp32`` is looked for.
        optimizers: Anything with ``param_groups``.

    Example:
        >>> from lightning_amp import resolve
        >>> notices(resolve("O2", keep_fp32="LayerNrom"), [nn.Sequential(nn.LayerNorm(1))], [])[0][:58]
        "keep_fp32='LayerNrom' fits no module, by class or by name:"
    """
    return [*_kept_in_vain(config, models), *_lost_eps(config, optimizers)]


def _kept_in_vain(config: AmpConfig, models: Sequence[nn.Module]) -> Iterator[str]:
    modules = [(name, module) for model in models for name, module in model.named_modules()]
    for entry in config.keep_fp32:
        what = f"keep_fp32={getattr(entry, '__name__', entry)!r}"
        if config.cast_model_type is None:
            if config.patch_torch_functions:
                yield (
                    f"{what} does nothing at opt_level={config.opt_level!r}, where weights are float32 and functions "
                    "are cast whoever calls them. Use amp.disable_casts() in the module's forward, amp.float_function, "
                    "or opt_level='O2'."
                )
        elif not any(matches(entry, module, name) for name, module in modules):
            near = _near(entry, modules)
            hint = f"Did you mean {' or '.join(near)}?" if near else "Patterns are for module names, such as '*.head'."
            yield f"{what} fits no module, by class or by name: nothing stays float32 for its sake. {hint}"


def _near(entry: KeepFp32, modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Returns names that the entry may have been meant for."""
    wanted = entry if isinstance(entry, str) else getattr(entry, "__name__", "")
    known = dict.fromkeys(name for path, module in modules for name in (type(module).__name__, path) if name)
    plain = wanted.strip("*.").lower()
    inside = [name for name in known if plain and plain in name.lower()]
    close = get_close_matches(plain, [name.lower() for name in known], n=3)
    found = [*inside, *(name for c in close for name in known if name.lower() == c)]
    return [repr(name) for name in dict.fromkeys(found)][:3]


def _lost_eps(config: AmpConfig, optimizers: Sequence[Any]) -> Iterator[str]:
    """An ``eps`` that half weights without masters round to zero: Adam then divides zero by zero."""
    half = config.cast_model_type
    if half is None or config.master_weights:
        return
    for optimizer in optimizers:
        for eps in {group["eps"] for group in optimizer.param_groups if isinstance(group.get("eps"), float)}:
            if eps > 0.0 and torch.tensor(eps, dtype=half).item() == 0.0:
                yield (
                    f"{type(optimizer).__name__} has eps={eps:g}, which is zero in {str(half).removeprefix('torch.')}: "
                    f"a parameter without a gradient becomes NaN. Use opt_level='O2', which steps float32 weights, or "
                    f"eps={torch.finfo(half).smallest_normal:g}."
                )
