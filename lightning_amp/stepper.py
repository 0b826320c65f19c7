"""One optimizer: its hooks, the loan of its masters, and a step that a non-finite gradient cannot pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.loan import Loan
from lightning_amp.master_weights import MasterWeights
from lightning_amp.outcomes import Outcome, OutcomeRecord
from lightning_amp.spent_closure import takes_closure


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Returns the torch optimizers behind one: itself, or those that a wrapper holds as attributes.

    A wrapper may be an `Optimizer` that never ran its constructor, as many a Lookahead is: torch runs no hook of it.
    The constructor leaves a mark on ``step``; there is no public way to tell.

    Args:
        optimizer: Anything with ``param_groups``, ``state`` and ``step``.
    """
    mine = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else []
    return mine if mine and getattr(type(optimizer).step, "hooked", False) else _held(optimizer) or mine


def _held(optimizer: Any) -> list[torch.optim.Optimizer]:
    return [held for held in getattr(optimizer, "__dict__", {}).values() if isinstance(held, torch.optim.Optimizer)]


class Stepper:
    """Steps one optimizer.

    Args:
        optimizer: Anything with ``param_groups``, ``state`` and ``step``.
        masters: Where its half weights have their masters.
        name: How messages call it.
    """

    def __init__(self, optimizer: Any, masters: MasterWeights, name: str) -> None:
        self.optimizer = optimizer
        self.record = OutcomeRecord()
        self.name = name
        self._masters = masters
        self._loan = Loan(masters, optimizer, _held(optimizer))
        self._lent_outside = False
        self.stepping = False
        """Whether it is this object that runs the optimizer's ``step`` now."""
        self._primed: list[int] = []
        self._regrown = 0
        self._handles: list[Any] = []
        for inner in torch_optimizers(optimizer):
            self._attach(inner)
        masters.ensure(p for group in optimizer.param_groups for p in group["params"])
        self._widen_state()

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is self.optimizer:  # a wrapper may go on with the weights after the step of what it wraps
            after = optimizer.register_step_post_hook(self._give_back)
            # Half weights are to be fresh before anybody else's post-hook looks at them. There is no public way to
            # register a hook in front of those that are already there.
            optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
            self._handles.append(after)
        self._handles += [
            optimizer.register_step_pre_hook(self._refuse_stray_step),
            optimizer.register_load_state_dict_pre_hook(self._keep_loaded),
            optimizer.register_load_state_dict_post_hook(self._put_loaded_fp32),
        ]

    def _refuse_stray_step(self, *_: Any) -> None:
        if not self.stepping:
            raise RuntimeError(
                f"step() of {self.name} was called directly: mixed precision would neither check its gradients nor "
                "move the float32 weights. Call step() on what self.optimizers() returns, or let the engine step it."
            )

    def _widen_state(self) -> None:
        """Makes floating state float32 that the optimizer already holds for half parameters."""
        if not self._masters.lend_to_optimizers:
            return
        holders = (self.optimizer, *_held(self.optimizer))
        for param, state in (entry for holder in holders for entry in holder.state.items()):
            if isinstance(param, Tensor) and param.dtype in HALF_DTYPES and isinstance(state, dict):
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
                        state[name] = value.float()

    # torch casts loaded state to the dtype of its parameter, which is half here: eight of sixty-five second moments
    # became zero when it was tried. The values in the file are put back as they are.

    def _keep_loaded(self, _: Any, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _put_loaded_fp32(self, optimizer: Any) -> None:
        loaded = self.__dict__.pop("_loaded")
        self._primed = []  # what is loaded may have no state for a parameter yet
        if not self._masters.lend_to_optimizers:
            return
        ids = [i for group in loaded["param_groups"] for i in group["params"]]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for i, param in zip(ids, params, strict=True):
            if param.dtype not in HALF_DTYPES or i not in loaded["state"]:
                continue
            for name, value in loaded["state"][i].items():
                mine = optimizer.state[param].get(name)
                if isinstance(value, Tensor) and isinstance(mine, Tensor) and mine.dtype in HALF_DTYPES:
                    optimizer.state[param][name] = value.detach().to(mine.device, torch.float32, copy=True)

    def _give_back(self, *_: Any) -> None:
        if self._lent_outside:
            self._loan.refresh()
        else:
            self._loan.give_back()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Has the optimizer hold the masters inside the block; the half weights are refreshed on leaving."""
        if self._loan.held:
            yield
            return
        self._loan.take()
        try:
            yield
        finally:
            self._loan.give_back()

    def step(self, found_inf: Tensor, params: list[Tensor], **kwargs: Any) -> Any:
        """Steps unless a gradient is non-finite.

        torch's fused optimizers decide that on the device. Any other, and a fused one where a parameter has no state
        yet (a first step skipped on the device would leave momentum uninitialised), costs one host synchronisation.

        Args:
            found_inf: 1.0 if a gradient this step would use is non-finite, else 0.0; 0-dim float32.
            params: The parameters that have a gradient.
            **kwargs: For the optimizer's ``step``.

        Returns:
            What the optimizer's ``step`` returned, None if it was not called.
        """
        # Set by torch's fused=True family.
        can_decide = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        if not can_decide or not self._primed_for(params):
            if found_inf.item():
                self.record.add(Outcome.SKIPPED)
                return None
            result = self._call(kwargs)
            self._masters.outgrow(params)
            self.record.add(Outcome.STEPPED)
            if can_decide:
                # Also where an optimizer keeps no state, as plain SGD.
                self._primed, self._regrown = list(map(id, params)), self._masters.regrown
            return result
        # The protocol between torch's GradScaler and its fused optimizers: these two attributes, there for one step.
        self.optimizer.grad_scale, self.optimizer.found_inf = None, found_inf
        try:
            result = self._call(kwargs)
        finally:
            del self.optimizer.grad_scale, self.optimizer.found_inf
        self.record.defer(found_inf)
        return result

    def _call(self, kwargs: dict[str, Any]) -> Any:
        loan = self._loan
        self.stepping, self._lent_outside = True, loan.held
        try:
            if self._masters.lend_to_optimizers and not loan.held:
                loan.take()
            return self.optimizer.step(**kwargs)
        finally:
            if loan.held and not self._lent_outside:  # it raised, or it is none of torch's
                loan.give_back()
            self.stepping = self._lent_outside = False

    @cached_property
    def takes_closure(self) -> bool:
        """Whether the optimizer's ``step`` has an argument ``closure``."""
        return takes_closure(self.optimizer)

    def _primed_for(self, params: list[Tensor]) -> bool:
        """Tells whether each parameter has been stepped before, so that its state is there."""
        ids = list(map(id, params))
        if ids != self._primed or self._regrown != self._masters.regrown:
            if not all(self.optimizer.state.get(p) for p in params) or not self._masters.outgrown(params):
                return False
            self._primed, self._regrown = ids, self._masters.regrown
        return True

    def idle(self) -> None:
        """Records a ``step()`` for which no parameter had a gradient."""
        self.record.add(Outcome.IDLE)

    def close(self) -> None:
        """Removes every hook from the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
