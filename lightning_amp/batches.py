"""Casts of whole batches: every floating tensor in a tree, whatever the tree is made of."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Names = Sequence[str]
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type, torch.dtype, torch.device)

_registered: dict[type, Callable[[Any, torch.dtype], Any]] = {}


def register_batch_type(cls: type[T], convert: Callable[[T, torch.dtype], T]) -> None:
    """Says how batches of a class are cast; goes before everything else `cast` knows, for subclasses too.

    Args:
        cls: A class of yours or of a library's, also a subclass of Tensor or of a mapping.
        convert: Returns a cast copy of the batch, or the batch itself to have it left alone. A later registration for
            the same class replaces it.

    Raises:
        TypeError: ``cls`` is no class or ``convert`` cannot be called.

    Example:
        >>> class Boxes:
        ...     def __init__(self, corners):
        ...         self.corners = corners
        >>> register_batch_type(Boxes, lambda boxes, dtype: Boxes(boxes.corners.to(dtype)))
        >>> cast(Boxes(torch.ones(4)), torch.float16).corners.dtype
        torch.float16
    """
    if not isinstance(cls, type) or not callable(convert):
        raise TypeError(
            f"register_batch_type({cls!r}, {convert!r}) cannot be used. Give a class, and a function "
            "(value, dtype) -> value that returns a cast copy."
        )
    _registered[cls] = convert


def cast(value: Any, dtype: torch.dtype, doubles: bool = True, uncast: Names = ()) -> Any:
    """Casts every floating tensor in a tree; everything else, and the tree itself, is left as it is.

    Looked into are lists, tuples (named ones and `PackedSequence` too), mappings of any type, and dataclasses (frozen
    ones too). Any other object that has a ``to`` converts itself: a copy of it is asked with ``to(dtype)``, and integer
    fields that it turned into floats are put back. NumPy arrays, strings and modules are no tensors and stay.

    Args:
        value: A tensor, a container, or anything else.
        dtype: The dtype to cast to.
        doubles: Whether float64 tensors are cast too, as those of a batch are.
        uncast: Patterns of keys and field names whose values are left as they are.

    Returns:
        The same tree with the same types; the very same object where there was nothing to cast.

    Raises:
        TypeError: A container of a class of its own cannot be rebuilt; `register_batch_type` tells how.

    Example:
        >>> cast({"x": torch.ones(1), "label": torch.ones(1, dtype=torch.int64)}, torch.float16)["x"].dtype
        torch.float16
    """
    return _cast(value, _How(dtype, doubles, uncast, {}))


def cast_call(args: Any, kwargs: Any, dtype: torch.dtype, doubles: bool = True, uncast: Names = ()) -> tuple[Any, Any]:
    """As `cast`, for the arguments of a call: a tensor that is given twice stays one.

    Args:
        args: Positional ones.
        kwargs: Those by keyword.
        dtype: As in `cast`, like the rest.
        doubles: See there.
        uncast: See there.
    """
    how = _How(dtype, doubles, uncast, {})
    return _cast(args, how), _cast(kwargs, how)


class _How(NamedTuple):
    """How a tree is cast; ``seen`` has each tensor and what became of it, by id, so that one given twice stays one."""

    dtype: torch.dtype
    doubles: bool
    uncast: Names
    seen: dict[int, tuple[Tensor, Tensor]]


def _cast(value: Any, how: _How) -> Any:
    if _registered:
        for cls in type(value).__mro__:
            if cls in _registered:
                return _registered[cls](value, how.dtype)
    if isinstance(value, Tensor):
        return _cast_tensor(value, how)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return _cast_sequence(value, how)
    if isinstance(value, Mapping):
        return _cast_mapping(value, how)
    if isinstance(value, nn.Module):
        return value
    if callable(getattr(value, "to", None)):
        return _cast_by_itself(value, how)
    if dataclasses.is_dataclass(value):
        return _cast_dataclass(value, how)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a tree of tuples, lists, mappings and dataclasses.

    Args:
        value: A tensor, a container, or anything else.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def _cast_tensor(value: Tensor, how: _How) -> Tensor:
    if value.dtype is how.dtype or not value.is_floating_point() or (value.dtype is torch.float64 and not how.doubles):
        return value
    known = how.seen.get(id(value))
    if known is None:
        known = how.seen[id(value)] = (value, value.to(how.dtype))
    return known[1]


def _cast_named(named: Mapping[Any, Any], how: _How) -> dict[Any, Any]:
    return {
        name: item if how.uncast and _is_named(name, how.uncast) else _cast(item, how) for name, item in named.items()
    }


def _is_named(name: Any, patterns: Names) -> bool:
    return isinstance(name, str) and any(fnmatchcase(name, pattern) for pattern in patterns)


def _cast_sequence(value: Any, how: _How) -> Any:
    if how.uncast and hasattr(value, "_fields"):
        items = list(_cast_named(dict(zip(value._fields, value, strict=True)), how).values())
    else:
        items = [_cast(item, how) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return _rebuilt(value, items)


def _cast_mapping(value: Mapping[Any, Any], how: _How) -> Any:
    items = _cast_named(value, how)
    if all(items[key] is item for key, item in value.items()):
        return value
    if not isinstance(value, (dict, UserDict)):
        return _rebuilt(value, items)
    new = copy.copy(value)  # keeps what such classes hold besides their items, a default factory say
    for key, item in items.items():
        new[key] = item
    return new


def _rebuilt(value: Any, items: Any) -> Any:
    try:
        return type(value)(items)
    except TypeError as error:
        name = type(value).__name__
        raise TypeError(
            f"A {name} holds tensors to cast, and {name}(items) does not make another one ({error}). Tell how with "
            f"register_batch_type({name}, lambda value, dtype: ...)."
        ) from error


def _cast_dataclass(value: Any, how: _How) -> Any:
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    items = _cast_named(fields, how)
    changed = {name: item for name, item in items.items() if item is not fields[name]}
    if not changed:
        return value
    new = copy.copy(value)  # no second __init__, which may want other arguments than the fields
    for name, item in changed.items():
        object.__setattr__(new, name, item)  # a frozen one refuses the usual way
    return new


def _cast_by_itself(value: Any, how: _How) -> Any:
    fields = _attributes(value)
    floats = [t for t in tensors_in(fields) if t.is_floating_point()]
    if floats and all(t.dtype is how.dtype for t in floats):
        return value  # a state that a model writes into, say
    try:
        # The copy is asked, because some convert themselves in place, and targets in the batch are to stay as they are.
        twin = copy.copy(value)
        new = twin.to(how.dtype)
    except (TypeError, ValueError, AttributeError):
        return value  # its `to` takes no dtype; what reaches a module is cast there
    new = twin if new is None else new
    if type(new) is type(value):
        for name, old in fields.items():
            if _is_named(name, how.uncast):
                object.__setattr__(new, name, old)
            elif _integers(getattr(new, name, None)) != _integers(old):
                object.__setattr__(new, name, _cast(old, how))
    return new


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _integers(value: Any) -> list[torch.dtype]:
    return [t.dtype for t in tensors_in(value) if not t.is_floating_point()]
