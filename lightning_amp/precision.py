"""The Lightning front end: `AmpPrecision`, a precision plugin for the Trainer. It only translates; the engine acts."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_amp.autocast import cache_is_sound
from lightning_amp.casting import Conversion, explained_dtype_errors
from lightning_amp.engine import Engine
from lightning_amp.kernels.reference import HALF_DTYPES
from lightning_amp.loss_scaler import LossScalers
from lightning_amp.master_weights import MasterWeights
from lightning_amp.opt_levels import resolve
from lightning_amp.outcomes import Outcome

_SUPPORTED_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
_UNSUPPORTED_STRATEGIES = {"DeepSpeedStrategy", "ModelParallelStrategy"}  # the first derives from DDPStrategy
_NAMES = {torch.float16: "16", torch.bfloat16: "bf16"}


class AmpPrecision(Precision):
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
        cast_model_outputs: Replaces the dtype that a model's outputs are cast to at O2 and O3.
        keep_fp32: Modules that stay float32 at O2 and O3: class names, name patterns (``"*.head"``), types or
            predicates ``(module, name) -> bool``.
        cache_casts: How long autocast keeps a weight's half copy: True, until the next backward pass or step;
            ``"step"``, until the next step; False, not at all.
        init_scale: Where a dynamic scale starts.
        growth_factor: Multiplies a dynamic scale after ``growth_interval`` clean backward passes in a row.
        backoff_factor: Multiplies it on an overflow.
        growth_interval: See ``growth_factor``.
        min_loss_scale: A dynamic scale never goes below this (2^-14 if None).
        max_loss_scale: Nor above this.
        hysteresis: It is lowered only on this many overflows without a growth between them.

    Raises:
        AmpConfigError: A value is unknown or two settings contradict each other.

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
        cache_casts: bool | Literal["step"] = True,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        hysteresis: int = 1,
    ) -> None:
        super().__init__()
        settings = {k: v for k, v in locals().items() if k not in ("self", "num_losses", "__class__")}
        if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 1:
            raise ValueError(f"num_losses={num_losses!r} cannot be used. Use a whole number of at least 1.")
        self.config = resolve(**settings)
        self._num_losses = num_losses
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
        self._loaded: dict[str, Any] = {}
        self._device_type = "cpu"
        self._cache = False
        self._said = False

    # Set-up and tear-down

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.config.cast_model_type is None:
            if not self.config.passive or self.config.opt_level == "O0":
                self._refuse_half(module)
            return module
        if self._conversion is None:
            self._conversion = Conversion(self.config, self._masters)
            self._conversion.convert(module, root_is_model=False)
        return module

    def _refuse_half(self, module: nn.Module) -> None:
        for name, param in module.named_parameters():
            if param.dtype in HALF_DTYPES:
                raise MisconfigurationException(
                    f"Parameter {name!r} is {param.dtype} already, and opt_level={self.config.opt_level!r} trains "
                    "float32 weights. Convert it with .float(), or use opt_level='O2' or 'O3', which train half weights."
                )

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
        strategy: Any = inner.trainer.strategy
        self._refuse_strategy(strategy)
        device = strategy.root_device
        if self.config.passive:
            self._say(device)
            return model, optimizers, lr_schedulers
        self._refuse_lbfgs(optimizers)
        self._device_type = device.type
        self._cache = bool(self.config.cache_casts) and cache_is_sound(device.type)
        if self._engine is not None:
            self._engine.close()
        if self._scalers is None:
            self._scalers = LossScalers(self.config, device)
        self._engine = Engine(
            self.config,
            optimizers,
            [inner],
            masters=self._masters,
            scalers=self._scalers,
            num_losses=self._num_losses,
            device=device,
            distributed=inner.trainer.world_size > 1,
        )
        if isinstance(model, DistributedDataParallel):
            self._engine.gradients.in_place = not model.gradient_as_bucket_view
        if optimizers and self._loaded:
            self._engine.load_state_dict(self._loaded)
            self._loaded = {}
        self._say(device)
        return model, optimizers, lr_schedulers

    def _refuse_strategy(self, strategy: Any) -> None:
        names = {c.__name__ for c in type(strategy).__mro__}
        if names & _UNSUPPORTED_STRATEGIES or not names & _SUPPORTED_STRATEGIES:
            raise MisconfigurationException(
                f"{type(strategy).__name__} cannot be used with AmpPrecision, which would not see its gradients as "
                "they are. Use a single device, 'ddp', 'ddp_spawn' or 'ddp_fork', or that strategy's own precision."
            )

    def _refuse_lbfgs(self, optimizers: list[Optimizer]) -> None:
        if any(isinstance(o, LBFGS) for o in optimizers):
            raise MisconfigurationException(
                f"LBFGS cannot be used at opt_level={self.config.opt_level!r}: it runs the backward pass inside its "
                "step, where a scale cannot be taken out. Use opt_level='O0', or another optimizer."
            )

    def _say(self, device: torch.device) -> None:
        if self._said:
            return
        self._said = True
        where = f"\n  device={device}, num_losses={self._num_losses}"
        kept = self._conversion.kept if self._conversion is not None else []
        stays = f"\n  stays float32: {', '.join(kept)}" if kept else ""
        rank_zero_info(f"AmpPrecision: {self.config.describe()}{where}{stays}")

    @override
    def teardown(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._conversion is not None:
            self._conversion.undo()
            self._conversion = None
        self._said = False

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with ExitStack() as stack:
            if self.config.patch_torch_functions:
                stack.enter_context(torch.autocast(self._device_type, self.config.dtype, cache_enabled=self._cache))
            if self.config.cast_model_type is not None:
                stack.enter_context(explained_dtype_errors())
            yield

    # Training

    @property
    def engine(self) -> Engine:
        """The engine of the training under way.

        Raises:
            RuntimeError: There is none: before `fit`, or at plain O0.
        """
        if self._engine is None:
            raise RuntimeError(
                "There is no engine: it exists from fit on, at O1, O2 and O3 (O0 leaves all to Lightning)."
            )
        return self._engine

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
        if self.config.passive:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        self.engine.backward(
            tensor,
            run=lambda scaled, **rest: model.backward(scaled, *args, **rest),
            loss_id=loss_id,
            optimizers=optimizers,
            delay_unscale=delay_unscale or self._inside_window(model),
            hold=self._unreduced(model),
            **kwargs,
        )

    @staticmethod
    def _inside_window(model: "pl.LightningModule") -> bool:
        """Tells whether automatic optimization will run another micro-batch before it steps."""
        trainer = model.trainer
        if not model.automatic_optimization or trainer.accumulate_grad_batches == 1:
            return False
        # Short last windows, and schedules that change the window, are known to Lightning's loop alone.
        return trainer.fit_loop.epoch_loop._should_accumulate()

    @staticmethod
    def _unreduced(model: "pl.LightningModule") -> bool:
        wrapped = model.trainer.strategy.model
        return isinstance(wrapped, DistributedDataParallel) and not wrapped.require_backward_grad_sync

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.config.passive:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        self.engine.unscale(optimizer)
        self._after_closure(model, optimizer)
        stepped = self.engine.step(optimizer, **kwargs)
        return result if stepped is None else stepped

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if self.config.passive:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif clip_val > 0:
            self.engine.clip(optimizer, clip_val, GradClipAlgorithmType(gradient_clip_algorithm).value)

    # What the user may ask

    def masters(self, optimizer: Any) -> AbstractContextManager[None]:
        """Has ``optimizer`` hold its float32 masters inside the block, to read or to edit them.

        Args:
            optimizer: One of the trainer's, wrapped by Lightning or not.
        """
        return self.engine.lent_masters(optimizer)

    def outcome(self, optimizer: Any) -> Outcome | None:
        """Returns what the latest ``step()`` of ``optimizer`` did; waits for the device where it alone knows.

        Args:
            optimizer: One of the trainer's, wrapped by Lightning or not.
        """
        return self.engine.outcome(optimizer)

    def grad_norm(self, optimizer: Any) -> Tensor:
        """Returns the total 2-norm of the true gradients of ``optimizer``: 0-dim float32, no host synchronisation.

        Args:
            optimizer: One of the trainer's, wrapped by Lightning or not.
        """
        return self.engine.norm(optimizer)

    def loss_scales(self) -> dict[str, float]:
        """Returns each scaler's present scale by name; one host synchronisation each. Empty at O0."""
        return {} if self._scalers is None else {s.name: s.read().scale for s in self._scalers}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._engine is None else {"version": 1, **self._engine.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._engine is not None and self._engine.optimizers:
            self._engine.load_state_dict(state_dict)
        else:
            self._loaded = state_dict
