"""One backward, one step: ties scalers, gradients, masters and optimizers together, and knows no framework."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp import scaler_choice
from lightning_amp.alarm import Alarm
from lightning_amp.autocast import no_autocast
from lightning_amp.backward_pass import BackwardPass
from lightning_amp.engine_answers import EngineAnswers
from lightning_amp.engine_checks import partners, refuse_optimizer_in_backward
from lightning_amp.gradients import Gradients, dense_values
from lightning_amp.kernels.getters import grad_of, is_there, layout_of
from lightning_amp.loss_scaler import GRAD_KEY, LossScaler, LossScalers
from lightning_amp.master_weights import MasterWeights
from lightning_amp.opt_levels import AmpConfig
from lightning_amp.readings import Known
from lightning_amp.scaled_grad import scaled_grad
from lightning_amp.spent_closure import SpentClosure
from lightning_amp.stepper import Stepper


class Engine(EngineAnswers):
    """Runs backward passes and optimizer steps in mixed precision.

    Args:
        config: The level and its settings.
        optimizers: All optimizers of the training: anything with ``param_groups``, ``state`` and ``step``.
        modules: The models; their parameters get true gradients also where no optimizer owns them.
        masters: From the conversion of the models, or None where none were converted.
        scalers: Scalers to go on with, or None to start anew.
        num_losses: How many loss ids there are.
        device: Where the scalers' states live.
        distributed: Whether several processes train together: the scaler is then chosen and moved on only by what is
            the same on each of them.
        skip_together: Groups of optimizers, by index: none of a group steps while one of them holds a non-finite
            gradient.
        max_consecutive_skips: Skips in a row of one optimizer that raise `TrainingDivergedError`, None for no limit.

    Example:
        >>> from lightning_amp.opt_levels import resolve
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> engine = Engine(resolve("O1"), [optimizer], [model])
        >>> engine.backward(model(torch.ones(1, 2)).mean())
        >>> engine.step(optimizer)
        >>> engine.outcome(optimizer).value
        'stepped'
    """

    def __init__(
        self,
        config: AmpConfig,
        optimizers: Sequence[Any],
        modules: Sequence[nn.Module] = (),
        *,
        masters: MasterWeights | None = None,
        scalers: LossScalers | None = None,
        num_losses: int = 1,
        device: torch.device | str = "cpu",
        distributed: bool = False,
        skip_together: Sequence[Sequence[int]] = (),
        max_consecutive_skips: int | None = 100,
    ) -> None:
        device = torch.device(device)
        self.config = config
        self.optimizers = list(optimizers)
        self._partners = partners(skip_together, len(self.optimizers))
        if config.loss_scale != 1.0:
            refuse_optimizer_in_backward(modules)
        self.masters = MasterWeights(False) if masters is None else masters
        self.scalers = LossScalers(config, device) if scalers is None else scalers
        self.scalers.to(device)
        self._modules = modules
        self._num_losses = num_losses
        self._device = device
        self._distributed = distributed
        self._steppers = [Stepper(o, self.masters, f"optimizer {i}") for i, o in enumerate(self.optimizers)]
        widen = config.master_weights or config.cast_model_type is None
        self.gradients = Gradients(self.optimizers, self._others, widen=widen)
        self._alarm = Alarm(max_consecutive_skips, self.scalers, self.name_of)
        self.gradients.reducing = distributed
        self._known: dict[int, Known] = {}
        self._liable = self.gradients.liabilities
        self._clears_casts = config.patch_torch_functions and config.cache_casts != "step"

    def _others(self) -> list[Tensor]:
        """Returns the modules' parameters; asked for when there may be others: some may need masters."""
        for optimizer in self.optimizers:
            self.masters.ensure(Gradients.of(optimizer))
        return [p for module in self._modules for p in module.parameters()]

    # Which optimizer, which scaler

    def scaler_for(self, loss: Tensor, loss_id: int | None, optimizers: Any) -> LossScaler:
        """Chooses the scaler of a backward pass: a question of range only, the gradients come out the same.

        Args:
            loss: What the pass starts from.
            loss_id: The caller's name for it, or None.
            optimizers: One optimizer or several that the pass is for, or None.

        Raises:
            ValueError: The loss id is out of range, or an optimizer is unknown.
        """
        if loss_id is not None:
            return self.scalers.get(scaler_choice.loss_key(loss_id, self._num_losses))
        if optimizers not in (None, [], ()):
            named = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
            return self.scalers.get(scaler_choice.optimizers_key(self.index(o) for o in named))
        lists = self.gradients.lists()
        return self.scalers.get(scaler_choice.reached_key(loss, lists, may_differ=self._distributed))

    # One backward

    @contextmanager
    def scaled_loss(
        self,
        loss: Tensor,
        *,
        loss_id: int | None = None,
        optimizers: Any = None,
        delay_unscale: bool = False,
        hold: bool = False,
        create_graph: bool | None = False,
        inputs: Iterable[Tensor] = (),
        liable: Iterable[Any] = (),
    ) -> Iterator[Tensor]:
        """Gives the scaled loss to run backward on; after the block the gradients are true.

        The pass begins when autograd reaches the scaled loss: what happens to gradients in the block before is none of
        its business. Hooks that run during the backward pass still see the scale.

        Args:
            loss: Any shape, any floating dtype; a half loss is multiplied in float32.
            loss_id: Chooses the scaler, 0 to ``num_losses - 1``.
            optimizers: Chooses the scaler, where ``loss_id`` does not.
            delay_unscale: Whether the gradients keep their scale until the next pass without it, a clip, a step or
                `unscale`. With master weights it changes nothing: half sums would lose small terms.
            hold: Whether a distributed wrapper has yet to reduce these gradients (DDP's ``no_sync``).
            create_graph: Whether the gradients become part of a graph; None if that is seen when they are there.
            inputs: Tensors that get gradients although they are no parameters.
            liable: Optimizers that skip their next step together if this pass overflows, as long as the gradients they
                have after it are still there.

        Yields:
            ``loss * scale`` in float32.

        Raises:
            ValueError: The loss id is out of range, or an optimizer is unknown.
        """
        answering = [self.index(o) for o in liable]
        with no_autocast(self._device.type):
            this = self._pass(loss, loss_id, optimizers, delay_unscale, hold, create_graph, inputs)
            try:
                with this.awaited():
                    yield this.scaled
            except BaseException:
                this.fail()
                raise
            this.finish(create_graph, answering)
        if self._clears_casts:
            torch.clear_autocast_cache()

    def _pass(
        self,
        loss: Tensor,
        loss_id: int | None,
        optimizers: Any,
        delay_unscale: bool,
        hold: bool,
        create_graph: bool | None,
        inputs: Iterable[Any],
    ) -> BackwardPass:
        """Returns a backward pass that has not begun, for the arguments of `scaled_loss`."""
        gradients = self.gradients
        scale = self.scaler_for(loss, loss_id, optimizers).now()
        params = gradients.params()
        if inputs:
            params = self._with_inputs(params, inputs)
        if gradients.pending:
            if self._liable.noted:
                self._liable.look(closely=True)
            scale = gradients.expect(scale)
        if create_graph is not False:
            scale = scale.kept()  # a graph keeps it, and the scaler moves on
        return BackwardPass(gradients, params, loss, scale, delay_unscale and not self.config.master_weights, hold)

    def backward(
        self,
        loss: Tensor,
        run: Callable[..., Any] = torch.Tensor.backward,
        *,
        loss_id: int | None = None,
        optimizers: Any = None,
        delay_unscale: bool = False,
        hold: bool = False,
        **kwargs: Any,
    ) -> None:
        """Runs one backward pass; afterwards every gradient that can be seen is true.

        Args:
            loss: What to differentiate.
            run: Runs autograd on the scaled loss.
            loss_id: As in `scaled_loss`.
            optimizers: As in `scaled_loss`.
            delay_unscale: As in `scaled_loss`.
            hold: As in `scaled_loss`.
            **kwargs: For ``run``: ``retain_graph``, ``gradient``, …

        Raises:
            ValueError: As `scaled_loss`.
        """
        inputs: Any = ()
        create_graph = False
        if kwargs:
            inputs, create_graph = kwargs.get("inputs"), bool(kwargs.get("create_graph"))
            inputs = [inputs] if isinstance(inputs, Tensor) else inputs or ()
        with no_autocast(self._device.type):
            this = self._pass(loss, loss_id, optimizers, delay_unscale, hold, create_graph, inputs)
            this.begin()
            try:
                run(this.scaled, **kwargs)
            except BaseException:
                this.fail()
                raise
            this.finish(create_graph, ())
        if self._clears_casts:
            torch.clear_autocast_cache()

    @staticmethod
    def _with_inputs(params: list[Tensor], inputs: Iterable[Any]) -> list[Tensor]:
        """Returns the parameters, and the tensors among ``inputs`` that are none of them."""
        tensors = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        if not tensors:
            return params
        known = set(map(id, params))
        extra = [t for t in tensors if id(t) not in known]
        for tensor in extra:
            tensor.retain_grad()  # as torch does with what is no leaf, only now, so that ``.grad`` can be looked at
        return params + extra

    def unscale(self, optimizer: Any = None) -> None:
        """Makes pending gradients true now.

        Args:
            optimizer: The one they are wanted for, or None for all.
        """
        if not self.gradients.pending:
            return
        if self._liable.noted:
            self._liable.look(closely=True)
        chosen = self.optimizers if optimizer is None else [self.optimizers[self.index(optimizer)]]
        self.gradients.collect_pending(owned=[p for o in chosen for p in self.gradients.of(o)])

    # One step

    def _ready(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the parameters of an optimizer that have a gradient, and the gradients, all true."""
        params = self.gradients.of(self.optimizers[index])
        if self._liable.noted:
            self._liable.look(closely=bool(self.gradients.pending))
        if self.gradients.pending:
            self.gradients.collect_pending(owned=params)
        grads: list[Any] = list(map(grad_of, params))
        params = list(compress(params, map(is_there, grads)))
        grads = list(filter(is_there, grads))
        if torch.sparse_coo in set(map(layout_of, grads)):
            grads = [g.coalesce() if g.is_sparse else g for g in grads]  # else its values are nowhere to be clipped
            for p, g in zip(params, grads, strict=True):
                p.grad = g
        return params, grads

    def norm(self, optimizer: Any) -> Tensor:
        """Returns the total 2-norm of an optimizer's true gradients: 0-dim float32, no host synchronisation.

        Args:
            optimizer: One of this engine's. Zero if none of its parameters has a gradient.
        """
        _, grads = self._ready(self.index(optimizer))
        with no_autocast(self._device.type):
            return self.gradients.norm(grads) if grads else torch.zeros((), device=self._device)

    def clip(self, optimizer: Any, value: float, algorithm: str = "norm") -> None:
        """Clips an optimizer's true gradients in place; non-finite ones are left for `step` to see.

        Args:
            optimizer: One of this engine's.
            value: The bound, positive.
            algorithm: ``"norm"`` (total 2-norm) or ``"value"`` (each element).

        Raises:
            ValueError: The bound or the algorithm cannot be used.
        """
        if algorithm not in ("norm", "value"):
            raise ValueError(f"algorithm={algorithm!r} is unknown. Use 'norm' or 'value'.")
        if not value > 0:
            raise ValueError(f"A clip value of {value!r} cannot be used. Use a positive number.")
        index = self.index(optimizer)
        _, grads = self._ready(index)
        if not grads:
            return
        with no_autocast(self._device.type):
            # What the optimizer is liable for goes with the reading, so that the step need not add it.
            also = self._liable.of(index) if self._liable.noted else None
            reading = self.gradients.backends.read_and_clip(dense_values(grads), algorithm, float(value), also)
        self._known[index] = Known(grads, reading, also)
        if self._liable.noted:
            self._liable.hold()  # this clip hides nothing

    def step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps an optimizer unless one of the gradients the step would use is non-finite.

        At most one host synchronisation; none with torch's fused optimizers after a parameter's first step.

        Args:
            optimizer: One of this engine's.
            closure: Computes the gradients; it runs before the step, so that they can be looked at, and once: the
                optimizer is handed a `SpentClosure`. One that has run already may be given as such.
            **kwargs: For its ``step``.

        Returns:
            What the closure returned; without one, what the optimizer's ``step`` returned, None if it was not called.
        """
        if closure is not None and not isinstance(closure, SpentClosure):
            with torch.enable_grad():
                result = closure()
            self.step(optimizer, SpentClosure(result, optimizer), **kwargs)
            return result
        index = self.index(optimizer)
        stepper = self._steppers[index]
        if closure is not None and stepper.takes_closure:
            kwargs["closure"] = closure
        params, grads = self._ready(index)
        if not grads:
            stepper.idle()
            self._alarm.hear(stepper.name, stepper.record, self.gradients.of(self.optimizers[index]))
            return None
        try:
            with no_autocast(self._device.type):
                result = stepper.step(self._step_found_inf(index, grads), params, **kwargs)
        finally:
            torch.clear_autocast_cache()  # a cast made before the step is stale after it
        self._alarm.hear(stepper.name, stepper.record, params)
        return result

    def _step_found_inf(self, index: int, grads: list[Tensor]) -> Tensor:
        """Tells whether anything speaks against a step: its gradients, its partners', or a pass it answers for."""
        known = self._known.pop(index, None)
        reading = None if known is None else known.of(grads)
        partners = self._partners[index]
        mine = self._liable.of(index, forget=not partners) if self._liable.noted else None
        found = reading.found_inf if reading else self.gradients.backends.found_inf(dense_values(grads), mine)
        answers = [] if reading is None or known is None or mine is known.also else [mine]
        for other in partners:
            _, theirs = self._ready(other)
            if theirs:
                answers += [self.gradients.backends.found_inf(dense_values(theirs)), self._liable.of(other)]
        for answer in answers:
            if answer is not None:
                found = torch.maximum(found, answer.to(found.device))
        return found

    # Gradients of one's own

    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Tensor | Sequence[Tensor],
        grad_outputs: Any = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_unused: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad` under a loss scale of its own: half intermediates neither underflow nor show it.

        For gradient penalties (WGAN-GP, R1, path length) and adaptive loss weights. An overflow comes back as it is,
        so that the loss made of it is non-finite and its step is skipped, and lowers this scale for the next call. No
        host synchronisation.

        Args:
            outputs: What to differentiate, any shape, any floating dtype.
            inputs: With respect to what; a half parameter or activation is fine.
            grad_outputs: As in `torch.autograd.grad`, before scaling.
            retain_graph: Likewise.
            create_graph: Likewise: the result can be differentiated again.
            allow_unused: Likewise.

        Returns:
            The true gradients: float32 for half inputs, else in the dtype of the input; None where unused.
        """
        with no_autocast(self._device.type):
            return scaled_grad(
                self.scalers.get(GRAD_KEY),
                outputs,
                inputs,
                grad_outputs,
                retain_graph=retain_graph,
                create_graph=create_graph,
                allow_unused=allow_unused,
            )

    def close(self) -> None:
        """Removes every hook; the masters and scalers stay."""
        self.gradients.registrations.close()
        for stepper in self._steppers:
            stepper.close()
