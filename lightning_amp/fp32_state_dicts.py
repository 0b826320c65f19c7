"""State-dict hooks of converted modules: float32 values are saved and loaded, though the weights are half."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp.master_weights import MasterWeights, merged


class _StateDictHook:
    """A hook that a copy of its module does not carry on: copies and pickles of it do nothing.

    Args:
        masters: Where the float32 values are; held weakly.
    """

    def __init__(self, masters: MasterWeights | None = None) -> None:
        self._masters = (lambda: None) if masters is None else weakref.ref(masters)

    def __reduce__(self) -> tuple[type["_StateDictHook"], tuple[()]]:
        return type(self), ()

    def _pairs(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields the key, the half tensor and its float32 side, for each of the module's own tensors that has one."""
        masters = self._masters()
        if masters is None:
            return
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            master = masters.of(param)
            if master is not None:
                yield prefix + name, param, master
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            original = masters.of_buffer(module, name)
            if original is not None:
                yield prefix + name, buffer, original


class SaveFp32(_StateDictHook):
    """Puts float32 values into a state dict in place of half ones; they are fresh tensors.

    One instance serves all modules of a model, so that a tied weight is one tensor under both its names, and is
    written to a file once.

    Args:
        masters: Where the float32 values are; held weakly.
    """

    def __init__(self, masters: MasterWeights | None = None) -> None:
        super().__init__(masters)
        self._latest: dict[int, tuple[str, weakref.ref[Tensor]]] = {}

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        for key, half, master in self._pairs(module, prefix):
            value = state_dict.get(key)
            if value is half or not isinstance(value, Tensor):  # with keep_vars the caller wants the parameter itself
                continue
            if value.data_ptr() == half.data_ptr():
                state_dict[key] = self._value(key, half, master, state_dict)
            elif value.dtype is half.dtype:  # another hook's work
                state_dict[key] = value.float()

    def _value(self, key: str, half: Tensor, master: Tensor, state_dict: dict[str, Any]) -> Tensor:
        other, made = self._latest.get(id(half), (key, None))
        known = None if made is None else made()
        there = known is state_dict.get(other)
        if known is not None and other != key and there:
            return known
        value = merged(half, master)
        self._latest[id(half)] = key, weakref.ref(value)
        return value


class LoadFp32(_StateDictHook):
    """Fills the float32 side from a state dict that is being loaded; the half side follows by the usual copy."""

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        masters = self._masters()
        if masters is None:
            return
        for key, half, master in self._pairs(module, prefix):
            value = state_dict.get(key)
            if isinstance(value, Tensor) and value.shape == half.shape:
                with torch.no_grad():
                    if master.shape != half.shape:
                        masters.regrow(master, half)
                    master.copy_(value)
