"""Apex's ``amp`` for plain PyTorch, over the engine that the Lightning plugin has: ``from lightning_amp import amp``.

Example:
    >>> from torch import nn
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
    >>> with scale_loss(model(torch.ones(1, 2)).mean(), optimizer) as scaled_loss:
    ...     scaled_loss.backward()
    >>> optimizer.step()
    >>> deinitialize()
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_amp.cast_regions import ambient, disable_casts
from lightning_amp.engine import Engine
from lightning_amp.engine_checks import refuse_skip_settings
from lightning_amp.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.loss_scaler import DEFAULT_KEY
from lightning_amp.notices import notices
from lightning_amp.opt_levels import resolve
from lightning_amp.outcomes import Outcome
from lightning_amp.plain_checks import refuse_models, refuse_optimizers
from lightning_amp.plain_registry import listed, trainings
from lightning_amp.plain_training import PlainTraining
from lightning_amp.saved_state import read

__all__ = [
    "deinitialize",
    "disable_casts",
    "engine",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "outcome",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: str | torch.dtype | None = None,
    patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: str | torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    dtype: str | torch.dtype | None = None,
    keep_fp32: Any = None,
    uncast_inputs: list[str] | None = None,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    allow_half_models: bool = False,
    max_consecutive_skips: int | None = 100,
) -> Any:
    """Has models and optimizers train in mixed precision. All are changed in place, and come back as they were given.

    Call it once for models and optimizers that train together, when the models are on their device, and before they are
    wrapped for data parallelism. Other models of the same process may have a call of their own.

    Args:
        models: A model or a list of them.
        optimizers: An optimizer, a list of them, or None; wrappers with an optimizer's methods will do.
        enabled: False leaves everything alone, and makes `scale_loss` hand the loss on.
        opt_level: ``"O0"`` to ``"O3"``; what follows replaces what the level sets, where it is not None.
        cast_model_type: The dtype of the weights.
        patch_torch_functions: Whether torch's and registered functions are cast, as at O1.
        keep_batchnorm_fp32: Whether BatchNorm stays float32.
        master_weights: Whether float32 masters of half weights are kept.
        loss_scale: ``"dynamic"`` or a number.
        cast_model_outputs: The dtype of the models' outputs.
        num_losses: How many losses have a scale of their own (``loss_id`` of `scale_loss`).
        verbosity: 0 says nothing, 1 says once what runs.
        min_loss_scale: A dynamic scale never goes below this (2^-14 if None).
        max_loss_scale: Nor above this.
        dtype: The half type; float16 if None, or what ``cast_model_type`` says.
        keep_fp32: Modules that stay float32 at O2 and O3: types, their names, name patterns or predicates.
        uncast_inputs: Names of inputs that O2 and O3 do not cast: keys of a mapping, fields of a dataclass or a named
            tuple, keywords, or patterns of them (``"*_time"``).
        init_scale: Where a dynamic scale starts.
        growth_factor: Multiplies it after ``growth_interval`` clean backward passes in a row.
        backoff_factor: Multiplies it on an overflow.
        growth_interval: See ``growth_factor``.
        hysteresis: It is lowered only on this many overflows without a growth between them.
        allow_half_models: Whether models may come with half weights.
        max_consecutive_skips: Steps that an optimizer may skip in a row before an error says why; None for any number.

    Returns:
        ``models``, or ``(models, optimizers)`` if there are optimizers: a list where a list was given.

    Raises:
        AmpConfigError: A setting is unknown, or two contradict each other.
        TypeError: A model or an optimizer is none.
        ValueError: A model or an optimizer cannot be used, or was used already; or a setting is no number or flag.

    Example:
        >>> model = initialize(torch.nn.Linear(2, 1), opt_level="O3", verbosity=0)
        >>> model(torch.ones(1, 2)).dtype, model.weight.dtype
        (torch.float32, torch.float16)
        >>> deinitialize(model)
    """
    if isinstance(enabled, str):  # any string counts as True, and the level is easily given in its place
        raise ValueError(f"enabled={enabled!r} cannot be used. Use True or False; name a level: opt_level='O2'.")
    result = models if optimizers is None else (models, optimizers)
    all_models, all_optimizers = listed(models), [] if optimizers is None else listed(optimizers)
    if not enabled:
        trainings.leave_alone(all_optimizers)
        return result
    half = cast_model_type if dtype is None and cast_model_type in _HALF_NAMES else dtype
    config = resolve(
        opt_level,
        dtype=half or "float16",
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
        keep_fp32=keep_fp32,
        uncast_inputs=uncast_inputs,
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
    )
    # As in Apex, and unlike the plugin, an overflow lowers the scale whatever the loss was.
    config = replace(config, rule=replace(config.rule, excuse_loss=False))
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"num_losses={num_losses!r} cannot be used. Use a whole number of at least 1.")
    refuse_skip_settings(max_consecutive_skips)
    ambient.prune()
    refuse_models(all_models, allow_half_models)
    refuse_optimizers(all_optimizers, config)
    trainings.refuse_used([*all_models, *all_optimizers])
    for notice in notices(config, all_models, all_optimizers):
        warnings.warn(notice, stacklevel=2)
    training = PlainTraining(
        all_models, all_optimizers, config, num_losses=num_losses, max_consecutive_skips=max_consecutive_skips
    )
    trainings.add(training)
    if verbosity > 0:
        training.say()
    return result


_HALF_NAMES = (*HALF_DTYPES, "float16", "bfloat16", "torch.float16", "torch.bfloat16")


def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Gives the loss times its scale to run ``backward`` on; after the block all gradients are true.

    If a gradient overflows, the scale is lowered and ``step()`` of each of the optimizers does nothing the next time.

    Args:
        loss: A tensor of any floating dtype.
        optimizers: The optimizer or the list of optimizers whose parameters get gradients.
        loss_id: Which scale the loss has, from 0 to ``num_losses - 1``.
        model: Not used; there because Apex has it.
        delay_unscale: Whether the gradients may keep the scale until the next block without it, `master_params` or a
            step. Saves a pass over them when several losses or batches are summed up; the sums come out the same. Not
            used while other trainings are under way in this thread.
        delay_overflow_check: Not used; nothing here waits for the device.

    Raises:
        RuntimeError: `initialize` has not seen the optimizer.
        ValueError: The optimizers came from different calls of `initialize`, or ``loss_id`` is out of range.
    """
    named = listed(optimizers)
    training = trainings.find(named)
    if not isinstance(loss, Tensor):
        raise TypeError(f"A loss of type {type(loss).__name__} cannot be scaled. Give a tensor.")
    if training is None:
        return nullcontext(loss)
    return training.scaled_loss(loss, named, loss_id, delay_unscale, trainings.beside(training))


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yields what an optimizer steps, to clip or to edit: float32 masters at O2, else the model's own parameters.

    Their gradients are true, and are those of the model's parameters: clipping either is the same.

    Args:
        optimizer: Any optimizer.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
        >>> [p.dtype for p in master_params(optimizer)]
        [torch.float32, torch.float32]
        >>> deinitialize()
    """
    for training in reversed(trainings.alive()):
        if training.owns(optimizer):
            return iter(training.master_params(optimizer))
    return iter([p for group in optimizer.param_groups for p in group["params"]])


def state_dict(destination: dict[str, Any] | None = None, *, optimizers: Any = None) -> dict[str, Any]:
    """Returns the loss scales in Apex's format: one host synchronisation each.

    Args:
        destination: A dict to fill, or None for a new one.
        optimizers: One of the training's, where several trainings are under way; else it is the latest.

    Example:
        >>> state_dict()
        {}
    """
    training = trainings.chosen(optimizers)
    result: dict[str, Any] = {} if destination is None else destination
    if training is not None:
        for i in range(training.num_losses):
            scale, clean = training.loss_scale(i)
            result[f"loss_scaler{i}"] = {"loss_scale": scale, "unskipped": clean}
    return result


def load_state_dict(state_dict: dict[str, Any], *, optimizers: Any = None) -> None:
    """Goes on from loss scales that were saved, by this package or by Apex; also sets a static scale.

    A scale that was saved alone, or by a `torch.amp.GradScaler`, is for all losses. A level that works without a scale
    goes on without, and a dynamic scale stays between its bounds.

    Args:
        state_dict: From `state_dict`.
        optimizers: As in `state_dict`.

    Raises:
        CheckpointError: It is damaged or of no known format; nothing is taken over.
        RuntimeError: There is no training.
    """
    saved = read(state_dict, "amp")
    training = trainings.chosen(optimizers)
    if training is None:
        if optimizers is None and not trainings.left_alone:
            raise RuntimeError("There is no training to load into. Call amp.initialize first.")
        return
    named = {key[1][0]: scaler for key, scaler in saved.scalers.items() if key[0] == "loss"}
    cover = saved.scalers.get(DEFAULT_KEY) if saved.num_losses is None else None
    extra = [i for i in named if i >= training.num_losses]
    if extra:
        warnings.warn(
            f"num_losses={training.num_losses}: the saved scales of losses {extra} are left out.", stacklevel=2
        )
    for i in range(training.num_losses):
        scaler = named.get(i, cover)
        if scaler is not None:
            training.set_loss_scale(i, scaler.values["scale"], scaler.values["clean"])


def engine(optimizer: Any) -> Engine:
    """Returns the engine that steps an optimizer: norms, outcomes, counts and more.

    Args:
        optimizer: One that `initialize` has seen.

    Raises:
        RuntimeError: It has not, or there is none, at O0 and where ``enabled=False``.
    """
    training = trainings.find(optimizer)
    if training is None or training.engine is None:
        raise RuntimeError("There is no engine at opt_level='O0' or with enabled=False: nothing is done to a step.")
    return training.engine


def outcome(optimizer: Any) -> Outcome | None:
    """Returns what the latest ``step()`` of an optimizer did, None before the first, at O0 and if disabled.

    Args:
        optimizer: One that `initialize` has seen.
    """
    training = trainings.find(optimizer)
    return None if training is None or training.engine is None else training.engine.outcome(optimizer)


def deinitialize(*things: Any) -> None:
    """Ends trainings: casts end, weights are float32 again with the values of their masters, and no hook is left.

    Args:
        *things: Models or optimizers of the trainings to end; without any, all end.

    Raises:
        ValueError: One of them is of no training.
    """
    alive = trainings.alive()
    for thing in things:
        if not any(training.owns(thing) for training in alive):
            raise ValueError(f"{type(thing).__name__} is of no training. Give a model or an optimizer that is.")
    for training in alive:
        if not things or any(training.owns(thing) for thing in things):
            training.end()
    ambient.prune()
    if not things:
        trainings.left_alone.clear()
