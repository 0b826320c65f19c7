"""Functions wrapped where they live, for as long as a training casts functions."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from lightning_amp.autocast import no_autocast
from lightning_amp.batches import tensors_in
from lightning_amp.cast_lists import Kind, without_half_kernel
from lightning_amp.functions import Place, autocast_device, find_function, registry, wrapped
from lightning_amp.kernels.reference import HALF_DTYPES

_LOST = (
    "binary_cross_entropy (BCELoss) was given half probabilities: one near 0 or 1 is rounded to it, and its logarithm "
    "is lost. Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on what went into the sigmoid, or cast the "
    "input with .float(), or have that done each time with "
    'register_float_function(torch.nn.functional, "binary_cross_entropy") before training starts.'
)


def _refusing_half(function: Callable[..., Any]) -> Callable[..., Any]:
    """What binary cross-entropy is under O1, on every device: float32, and refused for half."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = autocast_device(args, kwargs)
        if device is None:
            return function(*args, **kwargs)
        if any(t.dtype in HALF_DTYPES for t in tensors_in((args, kwargs))):
            raise RuntimeError(_LOST)
        with no_autocast(device):
            return function(*args, **kwargs)

    return run


class _Wrapper:
    """One function wrapped where it lives.

    Args:
        place: Where that is.
        kind: How its tensors are cast.
    """

    def __init__(self, place: Place, kind: Kind | Literal["refuse"]) -> None:
        owner, name = place
        self.kind = kind
        self.users = 0
        self._place = place
        self._before = vars(owner).get(name)
        found = getattr(owner, name)
        function = _refusing_half(found) if kind == "refuse" else wrapped(found, kind)
        bound = isinstance(self._before, (staticmethod, classmethod)) or inspect.ismethod(found)
        self._mine: Any = staticmethod(function) if bound and isinstance(owner, type) else function
        setattr(owner, name, self._mine)

    def remove(self) -> None:
        """Puts back what was there, unless somebody else has put something over it since."""
        owner, name = self._place
        if vars(owner).get(name) is not self._mine:
            return
        if self._before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, self._before)


_wrappers: dict[Place, _Wrapper] = {}


class FunctionPatches:
    """The functions that a training at O1 has cast besides those on autocast's lists.

    These are the registered ones, those named here, torch's that have no half kernel (in float32, where they would
    raise), `Tensor.cpu` (likewise, as in Apex), and binary cross-entropy.

    Args:
        half: Dotted names of functions to run in half.
        floating: Dotted names of functions to run in float32.
        promote: Dotted names of functions to run in the widest dtype they are given.

    Raises:
        ValueError: There is no function of such a name.

    Example:
        >>> import torch
        >>> patches = FunctionPatches(half=["torch.nn.functional.hardswish"])
        >>> patches.apply()
        >>> with torch.autocast("cpu", torch.float16):
        ...     torch.nn.functional.hardswish(torch.ones(1)).dtype
        torch.float16
        >>> patches.undo()
    """

    def __init__(self, half: Iterable[str] = (), floating: Iterable[str] = (), promote: Iterable[str] = ()) -> None:
        kinds: dict[Kind, Iterable[str]] = {"half": half, "float": floating, "promote": promote}
        self._named: dict[str, Kind] = {
            path: kind for kind, paths in kinds.items() for path in ([paths] if isinstance(paths, str) else paths)
        }
        for path in self._named:
            find_function(path)
        self._mine: list[Place] = []

    def apply(self) -> None:
        """Wraps the functions. A second call does nothing.

        Raises:
            ValueError: Another training under way has one of them cast in another way.
        """
        if self._mine:
            return
        wanted: dict[Place, Any] = dict.fromkeys(without_half_kernel(), "float")
        wanted[Tensor, "cpu"] = "float"
        wanted[F, "binary_cross_entropy"] = "refuse"
        wanted |= registry.kinds | {find_function(path): kind for path, kind in self._named.items()}
        for (owner, name), kind in wanted.items():
            other = _wrappers.get((owner, name))
            if other is not None and other.kind != kind:
                raise ValueError(
                    f"{owner.__name__}.{name} is a {kind} function here and a {other.kind} function in another "
                    "training that is under way. Let them agree, or run one after the other."
                )
        for place, kind in wanted.items():
            wrapper = _wrappers.get(place) or _wrappers.setdefault(place, _Wrapper(place, kind))
            wrapper.users += 1
        self._mine = list(wanted)
        registry.users += 1

    def undo(self) -> None:
        """Puts the functions back, but for those that another training still needs. A second call does nothing."""
        if not self._mine:
            return
        for place in self._mine:
            wrapper = _wrappers[place]
            wrapper.users -= 1
            if not wrapper.users:
                _wrappers.pop(place).remove()
        self._mine = []
        registry.users -= 1
