"""Functions of one's own under O1: which run in half, which in float32, and which in the widest dtype they are given.

A function is cast where autocast is on for its tensors, and only there: inside a training at O1 (or with
``patch_torch_functions``), not inside `disable_casts`, not in a step. Decorated functions look for themselves;
registered ones are wrapped where they live for as long as a training needs them.
"""

import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from lightning_amp.autocast import no_autocast
from lightning_amp.batches import cast_call, tensors_in
from lightning_amp.cast_lists import Kind

Fn = TypeVar("Fn", bound=Callable[..., Any])
Place = tuple[Any, str]
"""A module or class, and a name in it."""


class _Registry:
    """The functions registered in this process.

    Attributes:
        kinds: How each is cast.
        users: How many trainings have them wrapped now.
    """

    def __init__(self) -> None:
        self.kinds: dict[Place, Kind] = {}
        self.users = 0


registry = _Registry()


def half_function(function: Fn) -> Fn:
    """Has a function run in half under O1: its float32 tensors are cast, also inside containers and keywords.

    Autocast stays on inside it.

    Args:
        function: Any function; generators, modules and other arguments that hold no tensor are handed on.

    Example:
        >>> @half_function
        ... def double(x):
        ...     return x + x
        >>> with torch.autocast("cpu", torch.float16):
        ...     double(torch.ones(1)).dtype
        torch.float16
    """
    return wrapped(function, "half")


def float_function(function: Fn) -> Fn:
    """Has a function run in float32 under O1: its half tensors are cast, and autocast is off inside it.

    Args:
        function: As in `half_function`.
    """
    return wrapped(function, "float")


def promote_function(function: Fn) -> Fn:
    """Has a function run, under O1, in the widest floating dtype among its tensors.

    Args:
        function: As in `half_function`.
    """
    return wrapped(function, "promote")


def register_half_function(module: Any, name: str) -> None:
    """As `half_function`, for a function that cannot be decorated; before training starts.

    Args:
        module: The module or class that has it.
        name: Its name there.

    Raises:
        ValueError: There is no such function.
        RuntimeError: A training that casts functions is under way.

    Example:
        >>> class Ops:
        ...     @staticmethod
        ...     def fused(x):
        ...         return x + x
        >>> register_half_function(Ops, "fused")
    """
    _register(module, name, "half")


def register_float_function(module: Any, name: str) -> None:
    """As `float_function`, for a function that cannot be decorated; see `register_half_function`."""
    _register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """As `promote_function`, for a function that cannot be decorated; see `register_half_function`."""
    _register(module, name, "promote")


def _register(module: Any, name: str, kind: Kind) -> None:
    where = f"register_{kind}_function({getattr(module, '__name__', module)}, {name!r})"
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{where}: there is no such function. Give a module or class, and the function's name in it.")
    if registry.users:
        raise RuntimeError(
            f"{where} comes too late: a training that casts functions is under way. Register before it starts "
            "(before amp.initialize, or before Trainer.fit)."
        )
    registry.kinds[module, name] = kind


def find_function(path: str) -> Place:
    """Finds a function by its dotted name, as a YAML file has it.

    Args:
        path: ``"package.module.function"`` or ``"package.module.Class.method"``.

    Raises:
        ValueError: There is no such function.

    Example:
        >>> find_function("torch.nn.functional.gelu")[1]
        'gelu'
    """
    if not isinstance(path, str):
        raise ValueError(f"{path!r} is no name. Give a full dotted name, such as 'my_package.ops.fused_bias'.")
    *owners, name = path.split(".")
    for n in range(len(owners), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(owners[:n]))
        except ModuleNotFoundError:
            continue
        for part in owners[n:]:
            owner = getattr(owner, part, None)
        if callable(getattr(owner, name, None)):
            return owner, name
        break
    raise ValueError(f"There is no function {path!r}. Give its full dotted name, such as 'my_package.ops.fused_bias'.")


# What a wrapper does


def wrapped(function: Fn, kind: Kind) -> Fn:
    """Returns the function with its tensors cast wherever autocast is on for them.

    Args:
        function: Any function.
        kind: How they are cast.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = autocast_device(args, kwargs)
        if device is None:
            return function(*args, **kwargs)
        args, kwargs = cast_arguments(kind, device, args, kwargs)
        with no_autocast(device) if kind == "float" else nullcontext():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def autocast_device(args: Any, kwargs: Any) -> str | None:
    """Returns the device type of the first floating tensor among the arguments for which autocast is on, or None."""
    for tensor in tensors_in((args, kwargs)):
        if tensor.is_floating_point() and torch.is_autocast_enabled(tensor.device.type):
            return tensor.device.type
    return None


def cast_arguments(kind: Kind, device: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns a function's arguments with their floating tensors cast; float64 ones only where that is the widest.

    Args:
        kind: How they are cast.
        device: The device type whose autocast says what half is.
        args: Positional ones.
        kwargs: Those by keyword.
    """
    dtype = torch.float32 if kind == "float" else torch.get_autocast_dtype(device)
    if kind == "promote":
        dtypes = {t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()}
        if len(dtypes) < 2:
            return args, kwargs
        dtype = functools.reduce(torch.promote_types, dtypes)
    return cast_call(args, kwargs, dtype, doubles=False)
