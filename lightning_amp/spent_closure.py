"""What an optimizer is given for a closure that has run already, before it was known whether there is to be a step."""

import inspect
from typing import Any


class SpentClosure:
    """Returns what the closure returned; a call that would want other gradients is refused.

    Such is a second one, and one after the gradients were cleared, as SAM does when it has moved the weights.

    Args:
        result: What the closure returned.
        optimizer: Which is to be given this.

    Example:
        >>> import torch
        >>> weight = torch.ones(1, requires_grad=True)
        >>> weight.grad = torch.ones(1)
        >>> closure = SpentClosure(0.5, torch.optim.SGD([weight], lr=0.1))
        >>> closure()
        0.5
    """

    def __init__(self, result: Any, optimizer: Any) -> None:
        self._result = result
        self._optimizer = optimizer
        self._called = False

    def __call__(self) -> Any:
        """Returns the result.

        Raises:
            RuntimeError: It was called before, or the gradients are gone.
        """
        name, groups = type(self._optimizer).__name__, self._optimizer.param_groups
        if self._called or all(p.grad is None for group in groups for p in group["params"]):
            when = "a second time" if self._called else "after it had cleared the gradients"
            raise RuntimeError(
                f"step() of {name} ran its closure {when}. Mixed precision runs a closure once, before the step, so "
                "that a non-finite gradient can be kept from the weights. Make both passes by hand in "
                "manual optimization, moving the weights inside masters(optimizer), or use opt_level='O0'."
            )
        self._called = True
        return self._result


def takes_closure(optimizer: Any) -> bool:
    """Tells whether the ``step`` of ``optimizer`` has an argument ``closure``.

    Args:
        optimizer: Anything with ``step``.
    """
    try:
        return "closure" in inspect.signature(optimizer.step).parameters
    except (TypeError, ValueError):  # of a C function, say
        return False
