"""The Lightning front end: `AmpPrecision`, a precision plugin for the Trainer. It only translates; the engine acts."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp import open_window, saved_window
from lightning_amp.autocast import cache_is_sound
from lightning_amp.casting import Conversion
from lightning_amp.checkpoint import grad_scaler_state
from lightning_amp.cpu_casts import listed_casts
from lightning_amp.dtype_errors import explained_dtype_errors
from lightning_amp.engine import Engine
from lightning_amp.engine_checks import refuse_skip_settings
from lightning_amp.function_patches import FunctionPatches
from lightning_amp.loss_scaler import LossScalers, name_of
from lightning_amp.master_weights import MasterWeights
from lightning_amp.notices import notices
from lightning_amp.opt_levels import resolve
from lightning_amp.outcomes import Outcome
from lightning_amp.precision_answers import Answers
from lightning_amp.precision_checks import refuse_device, refuse_half, refuse_lbfgs, refuse_strategy
from lightning_amp.saved_state import GRAD_SCALER_ENTRIES, Saved, find, read
from lightning_amp.schedulers import SkipAwareScheduler
from lightning_amp.spent_closure import SpentClosure
from lightning_amp.windows import Windows

_NAMES = {torch.float16: "16", torch.bfloat16: "bf16"}
_CALLED_IN_STEPS = ("backward", "optimizer_step", "clip_gradients", "grad", "outcome", "real_steps", "grad_norm")
"""What a training step calls: nothing for `torch.compile` to trace where it compiles the whole step."""


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class AmpPrecision(Answers, Precision):
    """Mixed precision for any number of optimizers and losses: ``Trainer(plugins=[AmpPrecision("O1")])``.

    Args:
        opt_level: ``"O0"``: float32. ``"O1"``: float32 weights, autocast. ``"O2"``: half weights, float32 masters and
            BatchNorm. ``"O3"``: half throughout.
        dtype: The half type.
        loss_scale: ``"dynamic"``, a static number, or None for what the level sets.
        num_losses: How many losses may be told apart with ``manual_backward(loss, loss_id=…)``; each has a scale of its
            own. Without loss ids there is a scale for each set of optimizers that a loss reaches.
        cast_model_type: Replaces the level's dtype of the weights.
        patch_torch_functions: Replaces whether forward passes run under autocast.
        keep_batchnorm_fp32: Replaces whether BatchNorm stays float32.
        master_weights: Replaces whether float32 masters are kept.
        cast_model_outputs: The dtype that models' outputs are cast to: float32 at O2 and O3, no cast at O0 and O1.
        keep_fp32: Modules that stay float32 at O2 and O3: class names, name patterns (``"*.head"``), types or
            predicates ``(module, name) -> bool``.
        uncast_inputs: Names of inputs that O2 and O3 do not cast: keys of a mapping, fields of a dataclass or a named
            tuple, keywords, or patterns of them (``"*_time"``). A layer that is given such a tensor alone casts it.
        half_functions: Dotted names of functions to run in half under O1 (``"my_package.ops.fused"``), besides those
            that `register_half_function` was given.
        float_functions: Likewise, to run in float32.
        promote_functions: Likewise, to run in the widest dtype they are given.
        cache_casts: How long autocast keeps a weight's half copy: True, until the next backward pass or step;
            ``"step"``, until the next step; False, not at all.
        init_scale: Where a dynamic scale starts.
        growth_factor: Multiplies a dynamic scale after ``growth_interval`` clean backward passes in a row.
        backoff_factor: Multiplies it on an overflow.
        growth_interval: See ``growth_factor``.
        min_loss_scale: A dynamic scale never goes below this (2^-14 if None).
        max_loss_scale: Nor above this.
        hysteresis: It is lowered only on this many overflows without a growth between them.
        skip_together: Groups of optimizers, by index: none of a group steps while one of them holds a non-finite
            gradient. None: each on its own.
        max_consecutive_skips: Steps that an optimizer may skip in a row before `TrainingDivergedError` tells why; None
            for any number.
        hold_schedulers: Whether a learning-rate scheduler stays put when its optimizer was stepped in vain.
        count_skipped_steps: Whether ``trainer.global_step`` counts skipped steps, as it does without this plugin. False
            costs a host synchronisation a step with fused optimizers.

    Raises:
        AmpConfigError: A value is unknown or two settings contradict each other.
        ValueError: Another setting is none that can be used.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> plugin = AmpPrecision(opt_level="O1", num_losses=3)
        >>> Trainer(accelerator="cpu", plugins=[plugin], logger=False, enable_checkpointing=False).precision
        '16-mixed'
    """

    def __init__(
        self,
        opt_level: Literal["O0", "O1", "O2", "O3"] = "O1",
        dtype: Literal["float16", "bfloat16"] = "float16",
        loss_scale: float | Literal["dynamic"] | None = None,
        num_losses: int = 1,
        cast_model_type: Literal["float16", "bfloat16", "float32"] | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | None = None,
        master_weights: bool | None = None,
        cast_model_outputs: Literal["float16", "bfloat16", "float32"] | None = None,
        keep_fp32: Any = None,
        uncast_inputs: list[str] | None = None,
        half_functions: list[str] | None = None,
        float_functions: list[str] | None = None,
        promote_functions: list[str] | None = None,
        cache_casts: bool | Literal["step"] = True,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        hysteresis: int = 1,
        skip_together: list[list[int]] | None = None,
        max_consecutive_skips: int | None = 100,
        hold_schedulers: bool = True,
        count_skipped_steps: bool = True,
    ) -> None:
        super().__init__()
        own = ("num_losses", "skip_together", "max_consecutive_skips", "hold_schedulers", "count_skipped_steps")
        named = ("half_functions", "float_functions", "promote_functions")
        settings = {k: v for k, v in locals().items() if k not in (*own, *named, "own", "named", "self", "__class__")}
        functions = [half_functions or (), float_functions or (), promote_functions or ()]
        if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
            raise ValueError(f"num_losses={num_losses!r} cannot be used. Use a whole number of at least 1.")
        refuse_skip_settings(max_consecutive_skips, skip_together)
        for name, value in (("hold_schedulers", hold_schedulers), ("count_skipped_steps", count_skipped_steps)):
            if not isinstance(value, bool):  # a string would count as True, whatever it says
                raise ValueError(f"{name}={value!r} cannot be used. Use True or False.")
        self.config = resolve(**settings)
        if any(functions) and not self.config.patch_torch_functions:
            raise ValueError(
                f"Functions to cast were named, and opt_level={opt_level!r} casts none. Use opt_level='O1', or "
                "patch_torch_functions=True."
            )
        self._functions = FunctionPatches(*functions)
        self._listed = ExitStack()
        self._num_losses = num_losses
        self._skip_together = skip_together or []
        self._max_consecutive_skips = max_consecutive_skips
        self._hold_schedulers = hold_schedulers
        self._count_skipped_steps = count_skipped_steps
        half = _NAMES[self.config.dtype]
        # One of the names that Lightning knows, so that `trainer.precision` reads sensibly and the model summary can
        # tell a weight's size.
        self.precision = {"O0": "32-true", "O1": f"{half}-mixed", "O2": f"{half}-true", "O3": f"{half}-true"}[  # type: ignore[assignment]
            self.config.opt_level
        ]
        self._masters = MasterWeights(self.config.master_weights)
        self._conversion: Conversion | None = None
        self._scalers: LossScalers | None = None
        self._engine: Engine | None = None
        self._ddp: DistributedDataParallel | None = None
        self._held: list[SkipAwareScheduler] = []
        self._optimizers: list[Optimizer] = []
        self._windows = Windows([], nn.Module())
        self._passes_before = 0
        self._trainer: pl.Trainer | None = None
        self._loaded_window: saved_window.SavedWindow | None = None
        self._loaded: tuple[str, Any] | None = None
        self._stage: TrainerFn | None = None
        self._device_type = "cpu"
        self._cache = False
        self._said = False
        self.rehearsing = False
        """Whether a training step is run for its forward passes alone: nothing is differentiated or stepped."""

    def __repr__(self) -> str:
        # Lightning shows this where a Trainer is given both, and says to choose one.
        dtype = str(self.config.dtype).removeprefix("torch.")
        name = type(self).__name__
        return f"<{name}(opt_level={self.config.opt_level!r}, dtype={dtype!r}), used without precision=>"

    # Set-up and tear-down

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.config.cast_model_type is None:
            if not self.config.passive or self.config.opt_level == "O0":
                refuse_half(module, self.config)
            if self.config.cast_model_outputs is None:
                return module
        if self._conversion is None:
            self._conversion = Conversion(self.config, self._masters)
            self._conversion.convert(module, root_is_model=False)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
        strategy: Any = inner.trainer.strategy
        refuse_strategy(strategy)
        # Lightning's summary counts 32 bits a weight where it does not know the name, and warns: here that is right.
        warnings.filterwarnings("ignore", rf"Precision {self.precision} is not supported by the model summary")
        device = strategy.root_device
        refuse_device(device, self.config)
        self._stage = inner.trainer.state.fn
        self._optimizers, self._trainer = optimizers, inner.trainer
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._windows, self._loaded_window = Windows(optimizers, inner, self._ddp), None
        if self.config.patch_torch_functions:
            self._functions.apply()
            self._listed.close()
            self._listed.enter_context(listed_casts(device.type))
        if self.config.passive:
            self._take_loaded()
            self._say(device, inner)
            return model, optimizers, lr_schedulers
        refuse_lbfgs(optimizers, self.config)
        self._device_type = device.type
        self._cache = bool(self.config.cache_casts) and cache_is_sound(device.type)
        before = self._engine
        if before is not None:
            before.close()
        if self._scalers is None:
            self._scalers = LossScalers(self.config.for_processes(inner.trainer.world_size), device)
        self._engine = Engine(
            self.config,
            optimizers,
            [inner],
            masters=self._masters,
            scalers=self._scalers,
            num_losses=self._num_losses,
            device=device,
            distributed=inner.trainer.world_size > 1,
            skip_together=self._skip_together if optimizers else (),
            max_consecutive_skips=self._max_consecutive_skips,
        )
        if inner._compiler_ctx is not None:  # Lightning's mark of a compiled LightningModule; there is no public one
            for name in set(_CALLED_IN_STEPS) - vars(self).keys():
                disabled: Any = torch.compiler.disable(getattr(self, name))  # type: ignore[no-untyped-call]
                setattr(self, name, disabled)
        if self._ddp is not None:
            self._engine.gradients.collector.in_place = not self._ddp.gradient_as_bucket_view
            self._masters.broadcast()  # DDP brings the half weights in line, and knows of nothing else
        if optimizers and before is not None and list(map(id, before.optimizers)) == list(map(id, optimizers)):
            self._engine.load_state_dict(before.state_dict())  # an evaluation after `fit` forgets nothing
        self._held = []
        if self._hold_schedulers:
            for config in lr_schedulers:
                self._hold(config)
        self._take_loaded()
        self._say(device, inner)
        return model, optimizers, lr_schedulers

    def _take_loaded(self) -> None:
        if self._loaded is not None and self._stage is TrainerFn.FITTING:
            loaded, self._loaded = self._loaded, None
            self._resume(*loaded)

    def _hold(self, config: Any) -> None:
        optimizer = getattr(config.scheduler, "optimizer", None)
        if not any(optimizer is mine for mine in self.engine.optimizers):
            return
        if type(config.scheduler) is not SkipAwareScheduler:  # it is where an evaluation follows a training
            record = self.engine.record(optimizer)
            config.scheduler = SkipAwareScheduler(config.scheduler, lambda: record.progress)
        self._held.append(config.scheduler)

    def _say(self, device: torch.device, module: nn.Module) -> None:
        if self._said:
            return
        self._said = True
        where = f"\n  device={device}, num_losses={self._num_losses}"
        kept = self._conversion.kept if self._conversion is not None else []
        stays = f"\n  stays float32: {', '.join(kept)}" if kept else ""
        rank_zero_info(f"AmpPrecision: {self.config.describe()}{where}{stays}")
        for notice in notices(self.config, [module], self._optimizers):
            rank_zero_warn(notice)

    @override
    def teardown(self) -> None:
        for name in _CALLED_IN_STEPS:
            self.__dict__.pop(name, None)
        if self._engine is not None:
            self._engine.close()
        self._ddp = self._windows.wrapper = None
        if self._conversion is not None:
            self._conversion.undo()
            self._conversion = None
        self._functions.undo()
        self._listed.close()
        self._said = False
        self._stage = None

    @override
    def forward_context(self) -> AbstractContextManager[None]:
        config = self.config
        if not config.patch_torch_functions:
            return nullcontext() if config.cast_model_type is None else explained_dtype_errors()
        region = torch.autocast(self._device_type, config.dtype, cache_enabled=self._cache)
        return region if config.cast_model_type is None else _both(explained_dtype_errors(), region)

    # Training

    @override
    def convert_input(self, data: Any) -> Any:
        """Leaves a batch as it is: modules cast what they are given. It comes before any hook that sees a batch."""
        if self._loaded_window is not None and not torch.is_inference_mode_enabled():  # as in a validation
            self._reopen_window()
        return data

    def _reopen_window(self) -> None:
        """Puts back what a checkpoint held; no sooner, since the Trainer clears all gradients after loading it."""
        window, self._loaded_window = self._loaded_window, None
        if window is not None:
            open_window.load(window, self._windows, self._live_engine)

    @property
    def _live_engine(self) -> Engine | None:
        return None if self.config.passive else self.engine

    @override
    def train_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        if self._loaded_window is not None:  # with data of Lightning's own iterator, nothing was handed to us before
            self._reopen_window()
        self._passes_before = self._windows.passes
        return self.forward_context()

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: "pl.LightningModule",
        optimizer: Any,
        *args: Any,
        loss_id: int | None = None,
        optimizers: Any = None,
        delay_unscale: bool = False,
        **kwargs: Any,
    ) -> None:
        if self.rehearsing:
            return
        unreduced = self._windows.passed()
        if self.config.passive:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        if model.automatic_optimization and self._inside_window(model) and not self._looked_at(model):
            delay_unscale = True
        assert self._engine is not None
        self._engine.backward(
            tensor,
            run=(lambda scaled, **rest: model.backward(scaled, *args, **rest)) if args else model.backward,
            loss_id=loss_id,
            optimizers=optimizers,
            delay_unscale=delay_unscale,
            hold=unreduced,
            **kwargs,
        )

    @staticmethod
    def _inside_window(model: "pl.LightningModule") -> bool:
        """Tells whether automatic optimization, which is on, will run another micro-batch before it steps."""
        if model.trainer.accumulate_grad_batches == 1:
            return False
        # Short last windows, and schedules that change the window, are known to Lightning's loop alone.
        return model.trainer.fit_loop.epoch_loop._should_accumulate()

    @staticmethod
    def _looked_at(model: "pl.LightningModule") -> bool:
        """Tells whether there is a hook that is to see the gradients of each micro-batch."""
        hooked = (model, *model.trainer.callbacks)  # type: ignore[attr-defined]
        return any(is_overridden("on_after_backward", it) for it in hooked)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.config.passive:
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
            self._windows.stepped(optimizer)
            return result
        result = closure()
        if self.rehearsing:
            return result
        self._windows.stepped(optimizer)
        engine = self._engine
        assert engine is not None
        if engine.gradients.pending:
            engine.unscale(optimizer)
        self._after_closure(model, optimizer)
        # Without a closure of the user's, manual optimization hands over one that does nothing.
        spent = None if closure is do_nothing_closure else SpentClosure(result, optimizer)
        stepped = engine.step(optimizer, spent, **kwargs)
        if not self._count_skipped_steps and self.outcome(optimizer) is Outcome.SKIPPED:
            self._uncount_step(model)
        return result if stepped is None else stepped

    @staticmethod
    def _uncount_step(model: "pl.LightningModule") -> None:
        """Takes back what Lightning's loop counts for this step, before and after it; nothing public does."""
        loop = model.trainer.fit_loop.epoch_loop
        if model.automatic_optimization:
            progress = loop.automatic_optimization.optim_progress.optimizer.step
        else:
            progress = loop.manual_optimization.optim_step_progress
        for counts in (progress.total, progress.current):
            counts.ready -= 1
            counts.completed -= 1

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if self.config.passive:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif clip_val > 0 and not self.rehearsing:
            self.engine.clip(optimizer, clip_val, GradClipAlgorithmType(gradient_clip_algorithm).value)

    # State

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._engine is None:
            return {}
        state = self._engine.state_dict()  # first, since it settles what the schedulers look at
        return state | {"schedulers": [scheduler.since_last_call for scheduler in self._held]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a saved state, with the training under way or, outside `fit`, with the next.

        Args:
            state_dict: From `state_dict`, Apex's ``amp.state_dict()`` or a `torch.amp.GradScaler`. What does not fit
                is told in one warning.

        Raises:
            CheckpointError: It is damaged or of no known format; nothing is taken over.
        """
        self._resume(type(self).__qualname__, state_dict)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the gradients of an open window, and what Lightning's own mixed precision would go on with."""
        if self._loaded_window is not None:  # nothing has happened to it yet
            checkpoint[saved_window.ENTRY] = self._loaded_window.entry
        elif any(self._windows.open) and self._stage in (None, TrainerFn.FITTING):
            self._save_window(checkpoint)
        state = grad_scaler_state(self._scalers or (), self.config.rule)
        if state:
            checkpoint.setdefault(GRAD_SCALER_ENTRIES[0], state)

    def _save_window(self, checkpoint: dict[str, Any]) -> None:
        assert self._trainer is not None
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.started > progress.processed and self._windows.passes > self._passes_before:
            why = "it was saved within a training step, whose place no checkpoint holds. Save between batches"
        elif any(self._windows.unreduced) and (sys.exc_info()[1] is not None or not distributed.is_initialized()):
            why = "each process has others, and on an exception they cannot wait for each other. Save between batches"
        else:
            length = self._trainer.accumulate_grad_batches
            entry = open_window.write(self._windows, self._live_engine, length)
            checkpoint |= {saved_window.ENTRY: entry} if entry else {}
            return
        rank_zero_warn(f"This checkpoint lacks the gradients that no step has used yet: {why} to go on from them.")

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Looks for a state under other names than this class's; Lightning itself hands over that one."""
        if self._stage is TrainerFn.FITTING and saved_window.ENTRY in checkpoint:
            self._loaded_window = saved_window.read(checkpoint[saved_window.ENTRY])
        if type(self).__qualname__ not in checkpoint:
            self._resume(*find(checkpoint, type(self).__qualname__))

    def _resume(self, name: str, state: Any) -> None:
        if self._stage not in (None, TrainerFn.FITTING):  # evaluation has no use for it, and fit may go on afterwards
            return
        saved = read(state, name)
        if self._stage is None:
            self._loaded = (name, state)
            return
        left_out: list[str] = []
        if self.config.passive:
            moved = [key for key, scaler in saved.scalers.items() if scaler.values["scale"] != 1.0]
            left_out = [f"the scale of {name_of(key)}: dropped, there is none at O0" for key in moved]
        elif saved != Saved() or not list(self.engine.scalers):  # else one was handed over before `fit`
            left_out = self.engine.load_state_dict(state, name)
            for scheduler, since in zip(self._held, saved.schedulers, strict=False):
                scheduler.go_on(*since)
        if self._loaded_window is not None and self._trainer is not None:
            length = self._trainer.accumulate_grad_batches
            self._loaded_window, misfits = self._loaded_window.fitted(self._windows, length)
            left_out += misfits
        if left_out:
            lines = "".join(f"\n  {line}" for line in left_out)
            rank_zero_warn(f"AmpPrecision went on from a checkpoint that does not fit in full:{lines}")
