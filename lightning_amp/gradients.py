"""Where each gradient is between a backward pass and a step, and under which scale.

A gradient in ``.grad`` is either true, or pending: it still carries the scale of a delayed backward pass. A backward
pass sets the true ones aside, so that autograd hands over fresh tensors, and collects ``true + fresh / scale``.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp.collecting import Collector, Fresh
from lightning_amp.kernels.devices import Backends
from lightning_amp.kernels.getters import dtype_of, grad_of, is_there, layout_of, requires_grad
from lightning_amp.liability import Liabilities
from lightning_amp.loss_scaler import Scale
from lightning_amp.pending import Pending, Window
from lightning_amp.registrations import Registrations

_STRIDED = {torch.strided}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


class Gradients:
    """The gradients of one training.

    Args:
        optimizers: Anything with ``param_groups``.
        others: Gives the parameters that are to have true gradients although no optimizer owns them.
        widen: Whether half gradients become float32 when they are collected.
    """

    def __init__(
        self, optimizers: Sequence[Any], others: Callable[[], Iterable[Tensor]] = tuple, widen: bool = True
    ) -> None:
        self.optimizers = optimizers
        self.collector = Collector(widen)
        """Makes fresh gradients true."""
        self.reducing = False
        """Whether DDP reduces these gradients: it then looks at every one that is there, of frozen parameters too."""
        self.backends = Backends()
        """What runs over lists of these gradients, for each device."""
        self.liabilities = Liabilities(len(optimizers), self.norm)
        """The overflows that each optimizer answers for."""
        self.registrations = Registrations()
        """Tells when ``others`` may give more than it did."""
        self._others = others
        self._ids: list[int] | None = None
        self._all: list[Tensor] = []
        self.pending: list[Pending] = []
        """The gradients that still carry a scale, or did until they were replaced."""

    def lists(self) -> list[list[Tensor]]:
        """Returns each optimizer's parameters, read from its ``param_groups`` now."""
        return list(map(self.of, self.optimizers))

    @staticmethod
    def of(optimizer: Any) -> list[Tensor]:
        """Returns an optimizer's parameters, read from its ``param_groups`` now."""
        params: list[Tensor] = []
        for group in optimizer.param_groups:
            params += group["params"]
        return params

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Returns the total 2-norm of some gradients, at least one: 0-dim float32, no host synchronisation.

        Args:
            grads: Of any layout.
        """
        return self.backends.read(dense_values(grads)).norm

    def params(self) -> list[Tensor]:
        """Returns every parameter once, those of no optimizer last."""
        owned: list[Tensor] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:  # as `of`, without a call for each
                owned += group["params"]
        ids = list(map(id, owned))
        if ids != self._ids or self.registrations.seen:
            self._ids, self.registrations.seen = ids, False
            self._all = list({id(p): p for p in [*owned, *self._others()]}.values())
        return self._all

    def expect(self, scale: Scale) -> Scale:
        """Collects what is pending under other scales than that of the coming backward pass.

        Args:
            scale: The scale the pass would run under.

        Returns:
            The one to use: that of gradients which a distributed wrapper has yet to reduce, if there are any.
        """
        if self.pending:
            scale = next((pending.scale for pending in self.pending if pending.held), scale)
            self.collect_pending(keep=scale)
        return scale

    def begin(self, params: list[Tensor], scale: Scale, *, delay: bool, hold: bool) -> Window:
        """Makes room for a backward pass: sets true gradients aside.

        Args:
            params: Those that are to have true gradients afterwards.
            scale: From `expect`.
            delay: Whether its gradients keep the scale until `collect_pending`; not where there are true ones.
            hold: Whether they are not reduced yet (DDP's ``no_sync``): always delayed, and not touched until then.

        Returns:
            The pass under way.
        """
        live = params if self.reducing and not hold else list(filter(requires_grad, params))
        olds: list[Tensor | None] = list(map(grad_of, live))
        versions: list[int] = []
        for pending in self.pending:
            pending.drop_replaced()
            carried = {id(g) for g in pending.grads}
            olds = [None if id(old) in carried else old for old in olds]
            versions = [g._version for g in pending.grads]
        # What is true already would be looked at with the window, and is no work of its losses: collected at once.
        delay = delay and not any(map(is_there, olds))
        window = Window(scale, live, olds, delay or hold, hold, versions)
        if window.delay:
            self._put_under_scale(window)
            return window
        for p, old in zip(live, olds, strict=True):
            if old is not None:
                p.grad = None
        if not self.collector.in_place:
            # DDP makes views of gradients when it rebuilds its buckets, and writes into them.
            window.olds = [None if old is None else old.clone() for old in olds]
        return window

    @staticmethod
    def _put_under_scale(window: Window) -> None:
        """Gives true gradients the scale that the pass adds to them under: all of ``.grad`` is pending then.

        They are not set aside, so that a `zero_grad` that nobody tells us of finds them where they are.
        """
        with torch.no_grad():
            for p, old in zip(window.live, window.olds, strict=True):
                if old is None:
                    continue
                if window.scale.scale is not None:
                    old.mul_(window.scale.scale)
                if window.hold and old.dtype is not p.dtype:
                    p.grad = old.to(p.dtype)  # DDP's buckets take no other

    def put_back(self, window: Window) -> None:
        """Ends a pass that failed: what it produced is dropped, what was set aside is back.

        What it added to pending gradients before it failed stays there, as it does in torch.
        """
        if window.delay:
            first = not self.pending
            self._note(self._take_pending(window), window)
            if first and not self.pending[-1].params:
                self.pending.pop()
            return
        for p, old in zip(window.live, window.olds, strict=True):
            p.grad = old
        for pending in self.pending:
            for p, g in zip(pending.params, pending.grads, strict=True):
                p.grad = g

    def _take_pending(self, window: Window) -> Pending:
        """Returns what was pending already for the window's pass to go on with, or a fresh one."""
        if self.pending:
            return self.pending.pop()
        return Pending(window.scale.kept() if window.delay else window.scale)

    def finish(
        self, window: Window, loss: Tensor, create_graph: bool | None = False, liable: Collection[int] = ()
    ) -> None:
        """Ends a backward pass: collects what it produced and moves its scaler on, or notes that it is pending.

        Args:
            window: From `begin`.
            loss: The loss before scaling, any shape.
            create_graph: Whether the gradients are part of a graph and may not be changed in place; None if that is
                seen by them.
            liable: The optimizers, by index, that answer for an overflow whatever their own gradients are.
        """
        if not window.delay and not self.pending:
            self._collect(_fresh(window), window.scale, [loss], liable, create_graph)
            return
        pending = self._take_pending(window)
        pending.losses.append(loss.detach())
        pending.liable.update(liable)
        if window.delay:
            self._note(pending, window)
            return
        if pending.held:
            self._keep_unreduced(pending, window)
        fresh = _fresh(window)
        if pending.params:  # frozen since its pass, and still under its scale
            alive = {id(p) for p in window.live}
            fresh += [(p, g, None) for p, g in pending.present() if id(p) not in alive]
        self._collect(fresh, pending.scale, pending.losses, pending.liable, create_graph)

    def _note(self, pending: Pending, window: Window) -> None:
        reached = [(p, p.grad) for p in window.live if p.grad is not None]
        known = {id(p) for p, _ in reached}
        reached += [(p, g) for p, g in pending.present() if id(p) not in known]
        pending.params = [p for p, _ in reached]
        pending.grads = [g for _, g in reached]
        pending.held = window.hold
        self.pending.append(pending)

    def _keep_unreduced(self, pending: Pending, window: Window) -> None:
        """Leaves pending what a reduced pass did not reach: its turn comes with the pass that does."""
        waiting = [
            (p, g)
            for (p, g), version in zip(zip(pending.params, pending.grads, strict=True), window.versions, strict=True)
            if p.grad is g and g._version == version
        ]
        if waiting:
            params, grads = (list(column) for column in zip(*waiting, strict=True))
            self.pending.append(Pending(pending.scale, params, grads, held=True, liable=set(pending.liable)))
            left = {id(p) for p in params}
            window.olds = [p.grad if id(p) in left else old for p, old in zip(window.live, window.olds, strict=True)]
            pending.params, pending.grads = [], []

    def collect_pending(self, keep: Scale | None = None, owned: Iterable[Tensor] | None = None) -> None:
        """Makes pending gradients true, each by the scale of its own pass, and moves their scalers on.

        Args:
            keep: What is pending under this scale stays.
            owned: Held gradients stay held, except where the step of their owner needs them: those of these parameters.
        """
        if not self.pending:
            return
        owned_ids = set() if owned is None else {id(p) for p in owned}
        waiting: list[Pending] = []
        for pending in self.pending:
            same = keep is not None and pending.scale[:2] == keep[:2]
            if same or (pending.held and not any(id(p) in owned_ids for p in pending.params)):
                waiting.append(pending)
            else:
                fresh: list[Fresh] = [(p, g, None) for p, g in pending.present()]
                self._collect(fresh, pending.scale, pending.losses, pending.liable)
        self.pending = waiting

    def _collect(
        self,
        fresh: list[Fresh],
        scale: Scale,
        losses: list[Tensor],
        liable: Collection[int],
        create_graph: bool | None = False,
    ) -> None:
        if create_graph is None:
            create_graph = any(g.requires_grad for _, g, _ in fresh)
        with torch.set_grad_enabled(False):  # as torch.no_grad(), in half as many Python calls
            loss = None if not losses else losses[0] if len(losses) == 1 else torch.stack([x.sum() for x in losses])
            if create_graph:
                self.collector.collect_in_graph(fresh, scale, loss)
            else:
                self.collector.collect(fresh, scale, loss)
        if self.liabilities.noted or not scale.scaler.known_clean:
            self.liabilities.note(scale.scaler, self.lists(), liable)


def _fresh(window: Window) -> list[Fresh]:
    """Returns what a pass produced; what was set aside, and not reached, is back."""
    fresh: list[Fresh] = []
    for p, g, old in zip(window.live, map(grad_of, window.live), window.olds, strict=True):
        if g is None:
            if old is not None:
                p.grad = old
        elif g is not old:
            fresh += ((p, g, old),)
    return fresh


def dense_values(grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns the numbers of each gradient as a dense real tensor that shares its memory, and is part of no graph.

    Args:
        grads: Gradients of any layout; a sparse one is coalesced first, and then does not share.
    """
    if any(map(requires_grad, grads)):
        grads = [g.detach() for g in grads]
    if set(map(layout_of, grads)) == _STRIDED and not _COMPLEX & set(map(dtype_of, grads)):
        return list(grads)
    values = [g.coalesce().values() if g.is_sparse else g for g in grads]
    return [torch.view_as_real(v) if v.dtype.is_complex else v for v in values]
