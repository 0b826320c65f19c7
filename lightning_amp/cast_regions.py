"""Where O1's casts hold in plain PyTorch.

As in Apex they hold for all code in the thread, losses and metrics too, from the first `initialize` at O1 on until the
training ends. Models are set apart: each runs under the casts of its own training, wherever it is called, and with a
cache of weight casts that lasts for the call (outside of models there is none, since nobody tells of a weight that
changes between two uses).
"""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_amp.autocast import no_autocast
from lightning_amp.cpu_casts import casts

DEVICE_TYPES = ("cpu", "cuda")


class _Here(threading.local):
    """What holds in this thread: how often casts are disabled, and the calls of models under way."""

    def __init__(self) -> None:
        self.disabled = 0
        self.calls: list[tuple[nn.Module, AbstractContextManager[Any]]] = []


_here = _Here()


class AmbientCasts(threading.local):
    """The casts that hold outside of models: those of this thread's latest training at O1 that has not ended."""

    def __init__(self) -> None:
        self._open: list[tuple[weakref.ref[Any], str, torch.dtype]] = []
        self._context = ExitStack()

    def add(self, training: Any, device_type: str, dtype: torch.dtype) -> None:
        """Has the casts of a training hold from now on.

        Args:
            training: Whose they are, held weakly, until it has ``ended``.
            device_type: As in `torch.autocast`.
            dtype: The half type.
        """
        self._open.append((weakref.ref(training), device_type, dtype))
        self._renew()

    def review(self) -> None:
        """Has the casts of trainings that have ended, in whatever thread, or were dropped hold no longer."""
        alive = [entry for entry in self._open if _lives(entry[0]())]
        if len(alive) < len(self._open):
            self._open = alive
            self._renew()

    def prune(self) -> None:
        """As `review`, and finds those that were dropped."""
        if self._open:
            gc.collect()  # an optimizer and its training hold each other, so that dropping them does not free them
            self.review()

    def _renew(self) -> None:
        self._context.close()
        if self._open:
            _, device_type, dtype = self._open[-1]
            self._context.enter_context(casts(device_type, dtype, cache=False))

    def hold(self, device_type: str) -> bool:
        """Tells whether casts hold on a device type."""
        self.review()
        return any(entry[1] == device_type for entry in self._open)


def _lives(training: Any) -> bool:
    return training is not None and not training.ended


ambient = AmbientCasts()


def kept_out(device_type: str) -> AbstractContextManager[None]:
    """Returns a block that the casts of other trainings do not reach; autocast that the user turned on does.

    Args:
        device_type: As in `torch.autocast`.
    """
    return no_autocast(device_type) if ambient.hold(device_type) else nullcontext()


@contextmanager
def disable_casts() -> Iterator[None]:
    """Has nothing cast inside the block, in models and outside; half tensors stay half.

    Example:
        >>> with torch.autocast("cpu", torch.float16), disable_casts():
        ...     torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
        torch.float32
    """
    _here.disabled += 1
    try:
        with ExitStack() as stack:
            for device_type in DEVICE_TYPES:
                stack.enter_context(no_autocast(device_type))
            yield
    finally:
        _here.disabled -= 1


class EnterModel:
    """A forward pre-hook that has a model run under the casts of its own training.

    A copy or a pickle of it keeps the casts and forgets the training.

    Args:
        dtype: The half type, None where the training casts no functions.
        cache: Whether a weight's half copy is kept until the call ends.
        training: Kept alive for as long as the model is; its ``on_call(model)`` is told of every call.
    """

    def __init__(self, dtype: torch.dtype | None, cache: bool, training: Any = None) -> None:
        self._dtype = dtype
        self._cache = cache
        self._training = training

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._dtype, self._cache)

    def __call__(self, model: nn.Module, args: Any) -> None:
        if self._training is not None:
            self._training.on_call(model)
        context = self._context(model)
        context.__enter__()
        _here.calls.append((model, context))

    def _context(self, model: nn.Module) -> AbstractContextManager[Any]:
        if _here.disabled:
            return nullcontext()
        param = next(model.parameters(), None)
        device_type = "cpu" if param is None else param.device.type
        if self._dtype is None:
            return kept_out(device_type)
        # By the user, around this call.
        turned_off = ambient.hold(device_type) and not torch.is_autocast_enabled(device_type)
        return nullcontext() if turned_off else casts(device_type, self._dtype, self._cache)


def leave_model(model: nn.Module, args: Any, output: Any) -> None:
    """The forward hook that belongs to `EnterModel`; also called when ``forward`` raised."""
    if _here.calls and _here.calls[-1][0] is model:
        _here.calls.pop()[1].__exit__(None, None, None)
        if not _here.calls:
            torch.clear_autocast_cache()  # autocast itself does so at the end of the outermost region alone
