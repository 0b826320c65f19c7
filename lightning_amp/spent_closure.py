"""What an optimizer is given for a closure that has run already, before it was known whether there is to be a step."""

import inspect
from typing import Any


class SpentClosure:
    """Returns what the closure returned; a second call, which would want other gradients, is refused.

    Args:
        result: What the closure returned.
        name: How the message calls the optimizer.

    Example:
        >>> closure = SpentClosure(0.5, "SAM")
        >>> closure()
        0.5
    """

    def __init__(self, result: Any, name: str) -> None:
        self._result = result
        self._name = name
        self._called = False

    def __call__(self) -> Any:
        """Returns the result.

        Raises:
            RuntimeError: It was called before.
        """
        if self._called:
            raise RuntimeError(
                f"step() of {self._name} ran its closure a second time. Mixed precision runs a closure once, before "
                "the step, so that a non-finite gradient can be kept from the weights. Make both passes by hand in "
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
