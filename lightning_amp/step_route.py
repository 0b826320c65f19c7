"""Has ``optimizer.step()`` go through the engine, whoever calls it."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch


def route_step(optimizer: Any, step: Callable[..., Any], passes_on: Callable[[], bool]) -> Callable[[], None]:
    """Puts a step of ours in the place of an optimizer's own, on the object, as torch's schedulers do.

    Args:
        optimizer: Anything with ``step``.
        step: What ``optimizer.step`` does from now on.
        passes_on: Tells whether a call is to reach the step that was there: the engine is stepping, or has ended.

    Returns:
        What undoes it.
    """
    before = vars(optimizer).get("step")
    original = optimizer.step

    @functools.wraps(getattr(original, "__func__", original))
    def routed(_: Any, *args: Any, **kwargs: Any) -> Any:
        if passes_on():
            return original(*args, **kwargs)
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn if there was no step
        return step(*args, **kwargs)

    mine = optimizer.step = types.MethodType(routed, optimizer)  # bound: a scheduler wraps its function in turn

    def undo() -> None:
        if vars(optimizer).get("step") is not mine:
            return  # wrapped in turn; then it does nothing but pass the call on
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before

    return undo
