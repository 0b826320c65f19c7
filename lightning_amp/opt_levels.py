"""Opt levels: named recipes that fill one frozen config, and the one check that looks at the whole."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from lightning_amp.kernels.scale_rule import ScaleRule

KeepFp32 = str | type[nn.Module] | Callable[[nn.Module, str], bool]
"""A module type, its name or a name pattern (``"*.head"``), or a predicate ``(module, name)``."""

LEVELS = ("O0", "O1", "O2", "O3")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SCALE_RANGE = (2.0**-126, 2.0**126)
"""A scale is a float32, and so is its inverse."""


class AmpConfigError(ValueError):
    """A setting, or a pair of settings, that cannot be used; the message says what to do instead."""


@dataclass(frozen=True)
class AmpConfig:
    """What mixed precision does to a training; made by `resolve`.

    Attributes:
        opt_level: The recipe it came from.
        dtype: The half type, `torch.float16` or `torch.bfloat16`.
        cast_model_type: The dtype weights are converted to, or None where they stay float32.
        patch_torch_functions: Whether forward passes run under autocast.
        keep_batchnorm_fp32: Whether BatchNorm stays float32 where weights are converted.
        master_weights: Whether optimizers step float32 masters of the half weights.
        loss_scale: ``"dynamic"`` or the static scale.
        cast_model_outputs: The dtype a converted model's outputs are cast to.
        keep_fp32: Modules that stay float32 where weights are converted.
        uncast_inputs: Names of inputs that are not cast where weights are converted.
        cache_casts: How long autocast keeps a weight's half copy: True (until the next backward or step), ``"step"``
            (until the next step) or False (it is made anew on each use).
        init_scale: Where a dynamic scale starts.
        rule: How it moves.
    """

    opt_level: str
    dtype: torch.dtype
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool
    master_weights: bool
    loss_scale: float | Literal["dynamic"]
    cast_model_outputs: torch.dtype | None
    keep_fp32: tuple[KeepFp32, ...]
    uncast_inputs: tuple[str, ...]
    cache_casts: bool | Literal["step"]
    init_scale: float
    rule: ScaleRule

    @cached_property
    def passive(self) -> bool:
        """Whether there is nothing to do: float32 weights, float32 compute, a scale of one (plain O0)."""
        return self.opt_level == "O0" and self.loss_scale == 1.0

    def for_processes(self, count: int) -> "AmpConfig":
        """Returns the config for so many processes that train together.

        Their losses differ, their reduced gradients do not: with more than one, only these move a scale.

        Args:
            count: At least 1.
        """
        return self if count == 1 else replace(self, rule=replace(self.rule, excuse_loss=False))

    def describe(self) -> str:
        """Returns the lines said at start: the level, what it sets by itself, and what was replaced."""
        standard = resolve(self.opt_level, dtype=self.dtype)
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("opt_level", "dtype", "rule")}
        usual = {name: getattr(standard, name) for name in shown} | vars(standard.rule)
        shown |= vars(self.rule)
        level = ", ".join(f"{name}={_word(usual[name])}" for name in _recipe(self.opt_level, self.dtype))
        replaced = [f"{name}={_word(value)}" for name, value in shown.items() if value != usual[name]]
        scale = f"static {self.loss_scale}"
        if self.loss_scale == "dynamic":
            scale = (
                f"dynamic, from {self.init_scale:g}, doubling"
                if self.rule.growth_factor == 2.0
                else f"dynamic, from {self.init_scale:g}, times {self.rule.growth_factor:g}"
            ) + f" every {self.rule.growth_interval} clean passes, {self.rule.min_scale:g} to {self.rule.max_scale:g}"
        casts = self.cast_model_type is not None or self.patch_torch_functions
        half = f"half type {_word(self.dtype)}" if casts else "float32 throughout"
        return (
            f"opt level {self.opt_level}, {half}\n  level: {level}\n"
            f"  replaced: {', '.join(replaced) or 'nothing'}\n  loss scale: {scale}"
        )


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def _recipe(level: str, half: torch.dtype) -> dict[str, Any]:
    weights_in_half = level in ("O2", "O3")
    scaled = level in ("O1", "O2") and half is torch.float16
    return {
        "cast_model_type": half if weights_in_half else None,
        "patch_torch_functions": level == "O1",
        "keep_batchnorm_fp32": level == "O2",
        "master_weights": level == "O2",
        "loss_scale": "dynamic" if scaled else 1.0,
        "cast_model_outputs": torch.float32 if weights_in_half else None,
    }


def resolve(
    opt_level: str = "O1",
    *,
    dtype: str | torch.dtype = "float16",
    cast_model_type: str | torch.dtype | None = None,
    patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: str | torch.dtype | None = None,
    keep_fp32: KeepFp32 | Iterable[KeepFp32] | None = None,
    uncast_inputs: str | Iterable[str] | None = None,
    cache_casts: bool | Literal["step"] = True,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    hysteresis: int = 1,
) -> AmpConfig:
    """Fills a config from a level and the overrides that are not None.

    Args:
        opt_level: ``"O0"`` to ``"O3"``.
        dtype: The half type: ``"float16"`` or ``"bfloat16"``.
        cast_model_type: Replaces the level's dtype of the weights.
        patch_torch_functions: Replaces whether forward passes run under autocast.
        keep_batchnorm_fp32: Replaces whether BatchNorm stays float32.
        master_weights: Replaces whether float32 masters are kept.
        loss_scale: ``"dynamic"``, or a number (a string of one will do).
        cast_model_outputs: Replaces the dtype of a converted model's outputs.
        keep_fp32: Module types, their names, name patterns or predicates: these modules stay float32.
        uncast_inputs: Keys, field names and keywords, or patterns of them: what is given to a module under these names
            is not cast at O2 and O3.
        cache_casts: True, ``"step"`` or False; see `AmpConfig`.
        init_scale: Where a dynamic scale starts.
        growth_factor: See `ScaleRule`, as for the following.
        backoff_factor: Above 0, below 1.
        growth_interval: At least 1.
        min_loss_scale: 2^-14 where not given.
        max_loss_scale: At least ``min_loss_scale``.
        hysteresis: At least 1.

    Returns:
        The checked config.

    Raises:
        AmpConfigError: A value is unknown or two settings contradict each other.

    Example:
        >>> resolve("O2", loss_scale="128.0").loss_scale
        128.0
    """
    level = _level(opt_level)
    half = _dtype("dtype", dtype, DTYPES)
    wide = {**DTYPES, "float32": torch.float32}
    given = {
        "cast_model_type": None if cast_model_type is None else _dtype("cast_model_type", cast_model_type, wide),
        "patch_torch_functions": _flag("patch_torch_functions", patch_torch_functions),
        "keep_batchnorm_fp32": _flag("keep_batchnorm_fp32", keep_batchnorm_fp32),
        "master_weights": _flag("master_weights", master_weights),
        "loss_scale": _loss_scale(loss_scale),
        "cast_model_outputs": (
            None if cast_model_outputs is None else _dtype("cast_model_outputs", cast_model_outputs, wide)
        ),
    }
    given = {name: value for name, value in given.items() if value is not None}
    _check_against_level(level, given)
    if level == "O0":  # there all is float32, and what is told to stay so does; Apex took these settings too
        given = {name: value for name, value in given.items() if name not in ("keep_batchnorm_fp32", "master_weights")}
    values = _recipe(level, half) | given
    if values["cast_model_type"] is torch.float32:
        values["cast_model_type"] = None
    rule = ScaleRule(
        dynamic=values["loss_scale"] == "dynamic",
        growth_factor=_number("growth_factor", growth_factor, low=1.0),
        backoff_factor=_number("backoff_factor", backoff_factor, high=1.0),
        growth_interval=_count("growth_interval", growth_interval),
        min_scale=_scale("min_loss_scale", 2.0**-14 if min_loss_scale is None else min_loss_scale),
        max_scale=_scale("max_loss_scale", max_loss_scale),
        hysteresis=_count("hysteresis", hysteresis),
    )
    if cache_casts not in (True, False, "step"):
        raise AmpConfigError(f"cache_casts={cache_casts!r} is unknown. Use True, False or 'step'.")
    config = AmpConfig(
        opt_level=level,
        dtype=half,
        keep_fp32=_keep(keep_fp32),
        uncast_inputs=_names(uncast_inputs),
        cache_casts=cache_casts,
        init_scale=_scale("init_scale", init_scale),
        rule=rule,
        **values,
    )
    _check_whole(config)
    return config


def _level(level: Any) -> str:
    if level in LEVELS:
        return str(level)
    hint = ""
    text = str(level)
    if text.upper().lstrip("O0") in ("", "1", "2", "3") and text[-1:].isdigit():
        hint = f" Did you mean 'O{text[-1]}', with the capital letter O and not the digit zero?"
    raise AmpConfigError(f"opt_level={level!r} is unknown. Use one of {', '.join(map(repr, LEVELS))}.{hint}")


def _dtype(name: str, value: Any, allowed: dict[str, torch.dtype]) -> torch.dtype:
    if isinstance(value, str) and value.removeprefix("torch.") in allowed:
        return allowed[value.removeprefix("torch.")]
    if value is False and torch.float32 in allowed.values():  # Apex's spelling of "do not cast"
        return torch.float32
    if isinstance(value, torch.dtype) and value in allowed.values():
        return value
    raise AmpConfigError(f"{name}={value!r} cannot be used. Use one of {', '.join(map(repr, allowed))}.")


def _flag(name: str, value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value in ("True", "true", "False", "false"):
        return str(value).lower() == "true"
    raise AmpConfigError(f"{name}={value!r} cannot be used. Use True, False or None (what the level sets).")


def _loss_scale(value: Any) -> float | str | None:
    if value is None or value == "dynamic":
        return value  # type: ignore[no-any-return]
    try:
        return _scale("loss_scale", float(value) if isinstance(value, str) else value)
    except ValueError:
        raise AmpConfigError(
            f"loss_scale={value!r} cannot be used. Use 'dynamic', a positive number (2^-126 to 2^126), or None "
            "(what the level sets)."
        ) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scale(name: str, value: Any) -> float:
    low, high = SCALE_RANGE
    if not _is_number(value) or not low <= value <= high:
        raise AmpConfigError(f"{name}={value!r} cannot be used. Use a positive number (2^-126 to 2^126).")
    return float(value)


def _number(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
    if not _is_number(value) or not low < value < high:
        bound = "" if high == math.inf else f" and below {high:g}"
        raise AmpConfigError(f"{name}={value!r} cannot be used. Use a finite number above {low:g}{bound}.")
    return float(value)


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AmpConfigError(f"{name}={value!r} cannot be used. Use a whole number of at least 1.")
    return value


def _keep(keep: Any) -> tuple[KeepFp32, ...]:
    if keep is None:
        return ()
    single = isinstance(keep, (str, nn.Module)) or not isinstance(keep, Iterable)
    entries = (keep,) if single else tuple(keep)
    for entry in entries:
        if isinstance(entry, nn.Module) or not (isinstance(entry, str) or callable(entry)):
            raise AmpConfigError(
                f"keep_fp32 holds {entry!r}. Use module types, their names ('LayerNorm'), name patterns ('decoder.*') "
                "or predicates (module, name) -> bool."
            )
    return entries


def _names(names: Any) -> tuple[str, ...]:
    entries = (names,) if isinstance(names, str) else tuple(names or ())
    if not all(isinstance(name, str) for name in entries):
        raise AmpConfigError(
            f"uncast_inputs={names!r} cannot be used. Use names of inputs ('timestamps'), or patterns of them ('*_id')."
        )
    return entries


def _check_against_level(level: str, given: dict[str, Any]) -> None:
    """Refuses what contradicts the level, by Apex's rules."""
    if level == "O1":
        for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
            if given.get(name) is not None and given[name] is not torch.float32:
                raise AmpConfigError(
                    f"{name}={given[name]!r} contradicts opt_level='O1': its weights are float32 and stay so, autocast "
                    f"casts around functions. Remove {name}, or use opt_level='O2' or 'O3'."
                )
    if level == "O0":
        for name, cure in (("cast_model_type", "'O2' or 'O3'"), ("patch_torch_functions", "'O1'")):
            if given.get(name) and given[name] is not torch.float32:
                raise AmpConfigError(
                    f"{name}={given[name]!r} contradicts opt_level='O0', which is float32 throughout. Remove {name}, "
                    f"or use opt_level={cure}."
                )


def _check_whole(config: AmpConfig) -> None:
    half = config.cast_model_type
    if half is not None and half is not config.dtype:
        raise AmpConfigError(
            f"cast_model_type={half} and dtype={config.dtype} name two half types. Use one of them for both: "
            f"dtype={str(half).removeprefix('torch.')!r} alone will do."
        )
    for name in ("master_weights", "keep_batchnorm_fp32"):
        if getattr(config, name) and half is None:
            raise AmpConfigError(
                f"{name}=True and cast_model_type=float32 contradict each other: without half weights there is nothing "
                f"to keep in float32. Remove cast_model_type, or use opt_level='O0' or 'O1', whose weights are float32."
            )
    rule = config.rule
    if rule.min_scale > rule.max_scale:
        raise AmpConfigError(
            f"min_loss_scale={rule.min_scale:g} is above max_loss_scale={rule.max_scale:g}. Lower the first or raise "
            "the second."
        )
    if rule.dynamic and not rule.min_scale <= config.init_scale <= rule.max_scale:
        raise AmpConfigError(
            f"init_scale={config.init_scale:g} is outside min_loss_scale={rule.min_scale:g} to "
            f"max_loss_scale={rule.max_scale:g}. Move it inside, or widen them."
        )
