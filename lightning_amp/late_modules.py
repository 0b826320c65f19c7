"""What joins a converted model during training, as in progressive growing: converted when it is first called.

Not when it is registered, since whoever adds a layer may go on to initialise it, in float32.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_amp.registrations import Registrations

Convert = Callable[[Mapping[nn.Module, str], Iterable[nn.Module]], Callable[..., Any]]
"""Converts modules, given by their names, of which some are models to cast around; returns what casts the inputs of a
call that is under way."""

_LISTS = (nn.ModuleList, nn.ModuleDict)


def _doors(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children() if isinstance(module, _LISTS) else ():
        yield from _doors(child)


def _is_lazy(module: nn.Module) -> bool:
    return any(is_lazy(p) for p in module.parameters(recurse=False))


class LateModules:
    """Watches the modules of a converted model for what is registered in them.

    Args:
        names: The modules that are converted already, and their names.
        owner: The module whose own parameters stay float32, and whose children are models; None if there is none.
        convert: See `Convert`.
    """

    def __init__(self, names: Mapping[nn.Module, str], owner: nn.Module | None, convert: Convert) -> None:
        self._names = dict(names)
        self._owner = owner
        self._convert = convert
        self._models = {door for child in owner.children() for door in _doors(child)} if owner is not None else set()
        self._awaited: dict[nn.Module, Any] = {}
        self._registrations = Registrations(self._note)

    def _note(self, parent: nn.Module, name: str, new: Any) -> None:
        path = self._names.get(parent)
        if path is None or new is None:
            return
        if not isinstance(new, nn.Module):
            if parent is not self._owner:
                self._await(parent)
            return
        for below, module in new.named_modules():
            if module not in self._names and not isinstance(module, torch.jit.ScriptModule):
                self._names[module] = ".".join(part for part in (path, name, below) if part)
                self._await(module)
        if parent is self._owner or (parent in self._models and isinstance(parent, _LISTS)):
            self._models.update(_doors(new))

    def _await(self, module: nn.Module) -> None:
        if module not in self._awaited:
            self._awaited[module] = module.register_forward_pre_hook(_FirstCall(self), with_kwargs=True)

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Converts a module that is being called, and what is below it; returns what is to be handed to it."""
        names = {m: self._names[m] for m in module.modules() if m in self._awaited and not _is_lazy(m)}
        for late in names:
            self._awaited.pop(late).remove()
        return self._convert(names, [m for m in names if m in self._models])(module, args, kwargs)

    def close(self) -> None:
        """Removes every hook."""
        self._registrations.close()
        for handle in self._awaited.values():
            handle.remove()
        self._awaited.clear()


class _FirstCall:
    """A hook that a copy of its module does not carry on: copies and pickles of it do nothing.

    Args:
        late: Who is told; held weakly.
    """

    def __init__(self, late: LateModules | None = None) -> None:
        self._late = (lambda: None) if late is None else weakref.ref(late)

    def __reduce__(self) -> tuple[type["_FirstCall"], tuple[()]]:
        return type(self), ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        late = self._late()
        return None if late is None else late.called(module, args, kwargs)
