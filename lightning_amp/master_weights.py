"""FP32 originals and masters of half weights: kept from before the cast, for optimizers to step (see `loan`)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp.kernels.reference import HALF_DTYPES


def merged(half: Tensor, master: Tensor) -> Tensor:
    """Returns the float32 value a half tensor stands for now: its master, except where the half value was edited.

    Args:
        half: A half tensor.
        master: Its float32 master, on any device; of another shape, it counts for nothing.

    Returns:
        A fresh float32 tensor on the device of ``half``; neither argument is changed.
    """
    if half.shape != master.shape:  # outgrown, or a buffer that was replaced by another
        return half.detach().to(master.dtype, copy=True)
    master = master.detach().to(half.device)
    half = half.detach()
    return torch.where(half == master.to(half.dtype), master, half.to(master.dtype))


class MasterWeights:
    """The float32 side of every tensor that was converted to half.

    A parameter's entry is its master under O2. At a level without masters, and for buffers and for parameters that no
    optimizer owns, it is the original that `restore` gives back.

    Args:
        lend_to_optimizers: Whether optimizers step the masters (O2) or the half weights themselves (O3).
    """

    def __init__(self, lend_to_optimizers: bool) -> None:
        self.lend_to_optimizers = lend_to_optimizers
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._by_id: dict[int, nn.Parameter] = {}  # the same masters
        self.lent: set[int] = set()
        """The ids of the masters that an optimizer holds now."""
        self.regrown = 0
        """How often `regrow` was called: what was `outgrown` before need not be so now."""
        self._buffers: dict[tuple[nn.Module, str], Tensor] = {}

    def __len__(self) -> int:
        return len(self._masters)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_id": {}, "lent": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._by_id = {id(param): master for param, master in self._masters.items()}  # a copy has tensors of its own

    def convert(self, param: Tensor, dtype: torch.dtype) -> None:
        """Makes a float32 parameter half, in place, and keeps the original. A second call does nothing.

        Args:
            param: The parameter; it stays the same object.
            dtype: The half type.
        """
        if param not in self._masters:
            self._add(param, param.detach().clone())
            grad, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            self._take_fp32_gradients(param)
            if not self.lend_to_optimizers and param.grad_dtype is not dtype:
                param.grad_dtype = dtype  # it no longer follows the dtype once it has been set, as by `restore`
            param.grad = grad if grad is None or self.lend_to_optimizers else grad.to(dtype)

    def _add(self, param: Tensor, value: Tensor) -> nn.Parameter:
        master = nn.Parameter(value, requires_grad=param.requires_grad)
        self._masters[param] = self._by_id[id(param)] = master
        return master

    def _take_fp32_gradients(self, param: Tensor) -> None:
        if self.lend_to_optimizers:
            param.grad_dtype = None  # autograd may leave half there, collecting makes it float32

    def convert_buffer(self, module: nn.Module, name: str, dtype: torch.dtype) -> None:
        """Makes a float32 buffer half, in place, and keeps the original. A second call does nothing.

        Args:
            module: The module that owns it.
            name: Its name there.
            dtype: The half type.
        """
        if (module, name) not in self._buffers:
            buffer = module.get_buffer(name)
            if buffer.dtype is dtype:  # converted already, as another module's
                original = next(o for (m, n), o in self._buffers.items() if m.get_buffer(n) is buffer)
            else:
                original = buffer.detach().clone()
            self._buffers[module, name] = original
            buffer.data = buffer.data.to(dtype)

    def of(self, param: Tensor) -> nn.Parameter | None:
        """Returns the master of ``param``, None if it has none."""
        return self._masters.get(param)

    def of_all(self, params: Iterable[Tensor]) -> list[nn.Parameter | None]:
        """Returns the master of each of ``params``, None for those that have none."""
        return list(map(self._by_id.get, map(id, params)))

    def of_buffer(self, module: nn.Module, name: str) -> Tensor | None:
        """Returns the float32 original of a buffer, None if it was not converted."""
        return self._buffers.get((module, name))

    def ensure(self, params: Iterable[Tensor]) -> list[nn.Parameter | None]:
        """Gives a master to each half parameter that has none (a module added during training).

        Also brings masters to where their weights are.

        Args:
            params: Parameters of any dtype.

        Returns:
            The master of each, None for those that need none.
        """
        params = list(params)
        masters = self.of_all(params)
        for i, (param, master) in enumerate(zip(params, masters, strict=True)):
            if master is None:
                if param.dtype in HALF_DTYPES and self.lend_to_optimizers:
                    if param not in self._masters:
                        self._add(param, param.detach().float())
                        self._take_fp32_gradients(param)
                    masters[i] = self._masters[param]
            elif master.device != param.device:
                master.data = master.data.to(param.device)
        return masters

    def outgrow(self, params: Iterable[Tensor]) -> None:
        """Has weights that were stepped without masters stand for themselves from now on, also where one comes back to
        the half value it had: what is saved depends on what it is, not on where it has been.

        Args:
            params: Parameters of any dtype. Where masters are lent, nothing happens.
        """
        if self._masters and not self.lend_to_optimizers:
            for param in params:
                if (original := self._masters.get(param)) is not None:
                    original.data = original.new_empty(0)

    def regrow(self, original: Tensor, param: Tensor) -> None:
        """Makes room for the values that an outgrown weight is loaded from: its original stands for it again.

        Args:
            original: What `outgrow` emptied.
            param: The half weight.
        """
        original.data = original.new_empty(param.shape)
        self.regrown += 1

    def outgrown(self, params: Iterable[Tensor]) -> bool:
        """Tells whether none of these parameters has an original left that `outgrow` would take."""
        if self.lend_to_optimizers:
            return True
        return not any((m := self._masters.get(p)) is not None and m.shape == p.shape for p in params)

    def broadcast(self) -> None:
        """Brings every process's float32 values in line with those of the first; DDP does so for half weights only."""
        for param, master in self._masters.items():
            value = master.detach().to(param.device)  # those that no optimizer owns may wait on another device
            torch.distributed.broadcast(value, 0)
            master.data.copy_(value)
        for (module, name), original in self._buffers.items():
            value = original.to(module.get_buffer(name).device)
            torch.distributed.broadcast(value, 0)
            original.copy_(value)

    def restore(self) -> None:
        """Makes everything float32 again, in place: masters, with edits of half values taken over. Forgets them all."""
        with torch.no_grad():
            for param, master in self._masters.items():
                if param.dtype in HALF_DTYPES:
                    value = merged(param, master)
                    grad = param.grad
                    param.grad = None  # a gradient of the old dtype would make the next line raise
                    param.data = value
                    if param.grad_dtype is not torch.float32:
                        param.grad_dtype = torch.float32
                    param.grad = None if grad is None else grad.to(torch.float32)
            for (module, name), original in self._buffers.items():
                buffer = dict(module.named_buffers(recurse=False, remove_duplicate=False)).get(name)
                if buffer is not None and buffer.dtype in HALF_DTYPES:  # it may have been removed
                    buffer.data = merged(buffer, original)
        self._masters.clear()
        self._by_id.clear()
        self._buffers.clear()
