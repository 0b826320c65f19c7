"""The distributed wrappers of models in plain PyTorch, which are made after `amp.initialize` and never shown to it."""

import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def processes() -> int:
    """Returns how many processes train together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class Wrappers:
    """Those of one training's models, found when a model is called through one."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[DistributedDataParallel]] = {}

    def found_now(self, model: nn.Module) -> DistributedDataParallel | None:
        """Returns the wrapper that a model is called through, the first time; else None.

        Args:
            model: One that is being called.
        """
        if processes() == 1 or id(model) in self._refs:
            return None
        # There is no public way to ask for it.
        wrapper = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if wrapper is None or wrapper.module is not model:
            return None
        self._refs[id(model)] = weakref.ref(wrapper)
        return wrapper  # type: ignore[no-any-return]

    @property
    def unreduced(self) -> bool:
        """Whether one of them leaves gradients as they are for now (``no_sync``)."""
        alive = [wrapper for ref in self._refs.values() if (wrapper := ref()) is not None]
        return any(not wrapper.require_backward_grad_sync for wrapper in alive)
