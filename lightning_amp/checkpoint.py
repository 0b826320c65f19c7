"""What mixed precision saves, what of it a training can go on with, and a half export.

A state is read as a whole before anything is touched, so that a damaged one leaves the training as it was. What does
not fit the training at hand is left out and told in words.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_amp.entry_reader import CheckpointError
from lightning_amp.kernels.scale_rule import ScaleRule, initial_state
from lightning_amp.loss_scaler import Key, LossScaler, first_scale, name_of
from lightning_amp.opt_levels import DTYPES, AmpConfig
from lightning_amp.saved_state import VERSION, Saved, SavedScaler

_TOTALS = ("overflows", "bad_losses", "streak", "last_bad")
"""What a scaler has been through, which stays true at another scale."""


@dataclass(frozen=True)
class Fitted:
    """What of a `Saved` fits a training.

    Attributes:
        scalers: Values for `LossScaler.load_state_dict`, by key.
        optimizers: Values for `OutcomeRecord.load_state_dict`, in the optimizers' order.
        left_out: What was dropped or starts anew, in words.
    """

    scalers: dict[Key, dict[str, float]]
    optimizers: list[dict[str, Any]]
    left_out: list[str]


def fit(saved: Saved, config: AmpConfig, num_losses: int, num_optimizers: int) -> Fitted:
    """Tells what of a saved state a training can go on with. The settings are always the training's own.

    Args:
        saved: From `read`.
        config: The training's.
        num_losses: How many loss ids it has.
        num_optimizers: How many optimizers it has.

    Returns:
        What fits, and what does not.
    """
    scalers: dict[Key, dict[str, float]] = {}
    left_out: list[str] = []
    for key, scaler in saved.scalers.items():
        limit, what = {"loss": (num_losses, "losses"), "optimizer": (num_optimizers, "optimizers")}.get(key[0], (0, ""))
        if key[1] and max(key[1]) >= limit:
            left_out.append(f"the scale of {name_of(key)}: dropped, there are {limit} {what}")
            continue
        scalers[key], note = _fit_scaler(scaler, config, first_scale(key, config))
        left_out += [f"the scale of {name_of(key)}: {note}"] if note else []
    if config.rule.dynamic and not saved.scalers and saved.optimizers is None:
        left_out.append(f"the loss scales: there are none to go on with, they start at {config.init_scale:g}")
    elif config.rule.dynamic and saved.num_losses is not None:
        new = [name_of(("loss", (i,))) for i in range(saved.num_losses, num_losses)]
        left_out += [f"the scale of {name}: starts anew" for name in new]
    outcomes = saved.optimizers
    if outcomes is not None and len(outcomes) != num_optimizers:
        extra, verb = (len(outcomes), "dropped") if len(outcomes) > num_optimizers else (num_optimizers, "start anew")
        which = range(min(len(outcomes), num_optimizers), extra)
        left_out += [f"the step totals of optimizer {i}: {verb}" for i in which]
    return Fitted(scalers, list(outcomes or [])[:num_optimizers], left_out)


def _fit_scaler(saved: SavedScaler, config: AmpConfig, start: float) -> tuple[dict[str, float], str]:
    rule = config.rule
    anew = initial_state(start, rule)._asdict()
    was, note = saved.values["scale"], ""
    values = anew | saved.values
    if saved.dynamic is not rule.dynamic or not (rule.dynamic or was == start):
        kind = "dynamic" if saved.dynamic else "static"
        note = f"{kind} {was:g} is dropped, it " + (f"starts at {start:g}" if rule.dynamic else f"is static {start:g}")
        values = anew | {name: saved.values[name] for name in _TOTALS if name in saved.values}
    elif rule.dynamic and not rule.min_scale <= was <= rule.max_scale:
        values["scale"] = min(max(was, rule.min_scale), rule.max_scale)
        values["inv_scale"] = 1.0 / values["scale"]
        note = f"{was:g} is outside {rule.min_scale:g} to {rule.max_scale:g}, it goes on from {values['scale']:g}"
    elif abs(values["inv_scale"] * was - 1.0) > 1e-6:  # the format has none, or the scale was edited by hand
        values["inv_scale"] = 1.0 / was
    values["hysteresis"] = min(values["hysteresis"], float(rule.hysteresis))
    return values | {"attempts": saved.attempts}, note


def write(
    config: AmpConfig, num_losses: int, scalers: Iterable[LossScaler], optimizers: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the state to save: numbers, strings, lists and dicts alone. One host synchronisation a scaler.

    Args:
        config: The training's.
        num_losses: How many loss ids it has.
        scalers: Its scalers.
        optimizers: From `OutcomeRecord.state_dict`, in the optimizers' order.
    """
    return {
        "version": VERSION,
        "settings": {"opt_level": config.opt_level, "dtype": str(config.dtype), "loss_scale": config.loss_scale}
        | vars(config.rule),
        "num_losses": num_losses,
        "scalers": {scaler.name: scaler.state_dict() for scaler in scalers},
        "optimizers": list(optimizers),
    }


def grad_scaler_state(scalers: Iterable[LossScaler], rule: ScaleRule) -> dict[str, Any]:
    """Returns a state that `torch.amp.GradScaler` can load: the lowest of the scales, which is safe for every loss.

    Args:
        scalers: Those of a training.
        rule: Their settings.

    Returns:
        Empty where no scale moves, or none exists yet.
    """
    states = [scaler.read() for scaler in scalers]
    if not (rule.dynamic and states):
        return {}
    lowest = min(states, key=lambda state: state.scale)
    return {
        "scale": lowest.scale,
        "growth_factor": rule.growth_factor,
        "backoff_factor": rule.backoff_factor,
        "growth_interval": rule.growth_interval,
        "_growth_tracker": int(lowest.clean),
    }


# Half on request


def export_half(
    source: nn.Module | Mapping[str, Any],
    dtype: str | torch.dtype = "float16",
    *,
    keep_batchnorm_fp32: bool = True,
    keep_fp32: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns weights in half precision, to serve or to send; checkpoints themselves are float32.

    Args:
        source: A module, also one that trains at this moment, or a state dict of float32 weights.
        dtype: ``"float16"`` or ``"bfloat16"``.
        keep_batchnorm_fp32: Whether BatchNorm's tensors stay float32. In a state dict it is told by its running means.
        keep_fp32: Patterns of further names that stay so (``"head.*"``).

    Returns:
        A state dict: its float32 tensors are half copies, everything else is as it was; tied tensors stay tied.

    Raises:
        CheckpointError: A finite value would become infinite.
        ValueError: The dtype is neither.

    Example:
        >>> {name: str(t.dtype) for name, t in export_half(nn.Linear(2, 1)).items()}
        {'weight': 'torch.float16', 'bias': 'torch.float16'}
    """
    half = DTYPES.get(str(dtype).removeprefix("torch."))
    if half is None:
        raise ValueError(f"dtype={dtype!r} cannot be used. Use one of {', '.join(map(repr, DTYPES))}.")
    state = source.state_dict() if isinstance(source, nn.Module) else source
    prefixes = _batchnorm_prefixes(source) if keep_batchnorm_fp32 else set()
    done: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] = {}
    out: dict[str, Any] = {}
    for name, value in state.items():
        kept = name.rpartition(".")[0] in prefixes or any(fnmatchcase(name, pattern) for pattern in keep_fp32)
        if kept or not isinstance(value, Tensor) or value.dtype is not torch.float32:
            out[name] = value
            continue
        place = (value.data_ptr(), tuple(value.shape), value.stride())
        if place not in done:
            done[place] = _halved(name, value.detach(), half)
        out[name] = done[place]
    return out


def _batchnorm_prefixes(source: nn.Module | Mapping[str, Any]) -> set[str]:
    if isinstance(source, nn.Module):
        return {name for name, module in source.named_modules() if isinstance(module, _BatchNorm)}
    return {name.rpartition(".")[0] for name in source if name.rpartition(".")[2] == "running_mean"}


def _halved(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    half = value.to(dtype)
    if bool((half.isinf() & value.isfinite()).any()):
        raise CheckpointError(
            f"{name!r} holds {value.abs().max().item():g}, which is beyond {dtype} ({torch.finfo(dtype).max:g}). Name "
            "it in keep_fp32, or use dtype='bfloat16'."
        )
    return half
