"""One training in plain PyTorch: what `amp.initialize` makes of models and optimizers, and what undoes it."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp.autocast import cache_is_sound
from lightning_amp.cast_regions import EnterModel, ambient, kept_out, leave_model
from lightning_amp.casting import Conversion, cast_outputs
from lightning_amp.dtype_errors import explain_failure
from lightning_amp.engine import Engine
from lightning_amp.function_patches import FunctionPatches
from lightning_amp.gradients import Gradients
from lightning_amp.master_weights import MasterWeights
from lightning_amp.opt_levels import AmpConfig
from lightning_amp.plain_wrappers import Wrappers, processes
from lightning_amp.shown_masters import ShownMasters
from lightning_amp.spent_closure import SpentClosure
from lightning_amp.step_route import route_step


class _Here(threading.local):
    """Whether a block is open in this thread, of any training."""

    in_block = False


_here = _Here()


class PlainTraining:
    """Models and optimizers that train together; state of its own, reached from any of them.

    Args:
        models: Converted in place.
        optimizers: Their ``step`` goes through the engine from now on, whoever calls it.
        config: The level and its settings.
        num_losses: How many loss ids there are.
        max_consecutive_skips: As in `Engine`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        config: AmpConfig,
        *,
        num_losses: int = 1,
        max_consecutive_skips: int | None = 100,
    ) -> None:
        self.models = list(models)
        self.optimizers = list(optimizers)
        self.config = config
        self.num_losses = num_losses
        self.device = next((p.device for model in models for p in model.parameters()), torch.device("cpu"))
        self.masters = MasterWeights(config.master_weights)
        self.conversion: Conversion | None = None
        self.engine: Engine | None = None
        self.ended = False
        self.thread = threading.get_ident()
        """The thread it was started in."""
        self._handles: list[Any] = []
        self.shown = ShownMasters(self.masters)
        self._wrappers = Wrappers()
        self._patches = FunctionPatches()
        self._undo_steps: list[Callable[[], None]] = []
        try:
            self._start(max_consecutive_skips)
        except BaseException:
            self.end()
            raise

    def _start(self, max_consecutive_skips: int | None) -> None:
        if self.config.cast_model_type is not None:
            self.conversion = Conversion(self.config, self.masters)
            for model in self.models:
                self.conversion.convert(model, root_is_model=True)
                self._handles.append(model.register_forward_hook(explain_failure, always_call=True))
        if not self.config.passive:
            self.engine = Engine(
                self.config,
                self.optimizers,
                self.models,
                masters=self.masters,
                num_losses=self.num_losses,
                device=self.device,
                distributed=processes() > 1,
                max_consecutive_skips=max_consecutive_skips,
            )
            self._undo_steps += [self._route(optimizer, self.engine) for optimizer in self.optimizers]
        self._cast_functions()

    def _route(self, optimizer: Any, engine: Engine) -> Callable[[], None]:
        return route_step(
            optimizer, functools.partial(self.step, optimizer), lambda: self.ended or engine.stepping(optimizer)
        )

    def _cast_functions(self) -> None:
        dtype = self.config.dtype if self.config.patch_torch_functions else None
        cache = bool(self.config.cache_casts) and cache_is_sound(self.device.type)
        outputs = self.config.cast_model_outputs if self.conversion is None else None
        for model in self.models:
            if outputs is not None:
                self._handles.append(model.register_forward_hook(functools.partial(cast_outputs, dtype=outputs)))
            enter = EnterModel(dtype, cache, self)
            self._handles += [
                model.register_forward_pre_hook(enter, prepend=True),
                model.register_forward_hook(leave_model, always_call=True),
            ]
        if dtype is not None:
            self._patches.apply()
            weakref.finalize(self, self._patches.undo).atexit = False
            ambient.add(self, self.device.type, dtype)

    def owns(self, thing: Any) -> bool:
        """Tells whether a model or an optimizer, or a wrapper that shares an optimizer's groups, is of this training.

        Args:
            thing: A model or an optimizer.
        """
        groups = getattr(thing, "param_groups", None)
        return any(thing is mine for mine in (*self.models, *self.optimizers)) or (
            groups is not None and any(groups is optimizer.param_groups for optimizer in self.optimizers)
        )

    @contextmanager
    def scaled_loss(
        self,
        loss: Tensor,
        optimizers: Sequence[Any],
        loss_id: int,
        delay_unscale: bool,
        beside: "Sequence[PlainTraining]" = (),
    ) -> Iterator[Tensor]:
        """As `Engine.scaled_loss`, by Apex's rules: the optimizers answer for the loss.

        Args:
            loss: Any shape, any floating dtype.
            optimizers: Of this training.
            loss_id: Which scale it has.
            delay_unscale: Whether the gradients keep it for now; not where there are trainings beside this one, which
                do not know of it.
            beside: Trainings whose models the loss may reach too: their gradients carry no scale either.

        Raises:
            RuntimeError: It is called inside such a block, as are `step` and `master_params`.
        """
        if self.engine is None:
            with kept_out(self.device.type):  # a backward pass is float32 where the forward pass was
                yield loss
            return
        _refuse_in_block("amp.scale_loss")
        for training in (self, *beside):
            training.shown.take_back()
            if training.engine is not None and training is not self:
                training.engine.unscale()
                self.engine.gradients.collector.in_place &= training.engine.gradients.collector.in_place
        _here.in_block = True
        try:
            with self.engine.scaled_loss(
                loss,
                loss_id=loss_id,
                delay_unscale=delay_unscale and not beside,
                hold=self._wrappers.unreduced,
                create_graph=None,
                inputs=dict.fromkeys(p for training in beside for p in training.parameters()),
                liable=optimizers,
            ) as scaled:
                yield scaled
        finally:
            _here.in_block = False

    def parameters(self) -> Iterator[Tensor]:
        """Yields the parameters of its models and optimizers; some come twice."""
        for model in self.models:
            yield from model.parameters()
        for optimizer in self.optimizers:
            yield from Gradients.of(optimizer)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """As `Engine.step`; a closure runs before, since it is what computes the gradients.

        Args:
            optimizer: Of this training.
            closure: As in `torch.optim.Optimizer.step`.
            **kwargs: For the optimizer's ``step``.
        """
        assert self.engine is not None
        _refuse_in_block("optimizer.step()")
        loss = spent = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            spent = SpentClosure(loss, optimizer)
        self.shown.take_back()
        result = self.engine.step(optimizer, spent, **kwargs)
        return loss if result is None else result

    def say(self) -> None:
        """Prints once what runs."""
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        kept = self.conversion.kept if self.conversion is not None else []
        stays = f"\n  stays float32: {', '.join(kept)}" if kept else ""
        print(f"amp: {self.config.describe()}\n  device={self.device}, num_losses={self.num_losses}{stays}")

    # Loss scales

    def loss_scale(self, loss_id: int) -> tuple[float, int]:
        """Returns a loss's scale and its clean passes in a row: one host synchronisation.

        Args:
            loss_id: Which one.
        """
        if self.engine is None:
            return 1.0, 0
        state = self.engine.scalers.get(("loss", (loss_id,))).read()
        return state.scale, int(state.clean)

    def set_loss_scale(self, loss_id: int, scale: float, clean: float) -> None:
        """Sets a loss's scale, a static one too; a level that works without one goes on without.

        Args:
            loss_id: Which one.
            scale: A dynamic one is brought between its bounds.
            clean: Its clean passes in a row.
        """
        if self.engine is None:
            return
        rule = self.config.rule
        if rule.dynamic:
            scale = min(max(scale, rule.min_scale), rule.max_scale)
        elif self.config.loss_scale == 1.0:
            scale = 1.0
        scaler = self.engine.scalers.get(("loss", (loss_id,)))
        values = scaler.read()._replace(scale=scale, inv_scale=1.0 / scale, clean=clean, lowest=scale, highest=scale)
        scaler.load_state_dict({**values._asdict(), "attempts": scaler.attempts})

    def master_params(self, optimizer: Any) -> list[Tensor]:
        """Returns what the optimizer steps, with true gradients.

        Edits of a master, its gradient or its ``grad`` are taken over when a model is called, a loss scaled, or a step
        made.

        Args:
            optimizer: Of this training.
        """
        _refuse_in_block("amp.master_params")
        if self.engine is not None:
            self.engine.unscale(optimizer)
        return self.shown.show([p for group in optimizer.param_groups for p in group["params"]])

    def on_call(self, model: nn.Module) -> None:
        """Told by a model's hook that it is called.

        Args:
            model: One of this training's.
        """
        self.shown.take_back()
        wrapper = self._wrappers.found_now(model)
        if wrapper is None:
            return
        if self.engine is not None:
            self.engine.gradients.collector.in_place &= not wrapper.gradient_as_bucket_view
            self.engine.gradients.reducing = True
        self.masters.broadcast()  # DDP brings the half weights in line, and knows of nothing else

    def end(self) -> None:
        """Leaves models, optimizers and functions as they were found, the weights in float32. Twice does nothing."""
        if self.ended:
            return
        self.ended = True
        self.shown.take_back()
        ambient.review()
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        if self.engine is not None:
            self.engine.unscale()
            self.engine.close()
        for undo in self._undo_steps:
            undo()
        if self.conversion is not None:
            self.conversion.undo()


def _refuse_in_block(what: str) -> None:
    if _here.in_block:
        raise RuntimeError(
            f"{what} was called inside a scale_loss block, where gradients carry the scale of its loss. Leave the "
            "block first: after it all gradients are true."
        )
