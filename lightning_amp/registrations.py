"""Notices that a module gained a parameter or a child, without looking for it."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Registrations:
    """Whether any parameter or module was registered in any module of this process.

    torch tells of every registration; nothing is added to a module, and where nothing is registered it costs nothing.
    Unlike a look at the modules it does not take longer with more parameters.

    Args:
        tell: Told of each, before it takes effect: the module, the name, and what is registered there, None included.

    Example:
        >>> registrations, net = Registrations(), nn.Sequential()
        >>> registrations.seen
        False
        >>> net.append(nn.Linear(2, 1)) is net
        True
        >>> registrations.seen
        True
        >>> registrations.close()
    """

    def __init__(self, tell: Callable[[nn.Module, str, Any], None] | None = None) -> None:
        self.seen = False
        """Whether there was one; whoever has dealt with it sets it back."""
        self._tell = tell
        mine = weakref.ref(self)

        def note(module: nn.Module, name: str, registered: Any) -> None:
            if (watch := mine()) is not None:
                watch.seen = True
                if watch._tell is not None:
                    watch._tell(module, name, registered)

        handles = (register_module_parameter_registration_hook(note), register_module_module_registration_hook(note))
        self._remove = weakref.finalize(self, _remove, handles)

    def close(self) -> None:
        """Removes the hooks. It is done too when this object is dropped; a second call does nothing."""
        self._remove()


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
