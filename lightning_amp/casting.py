"""Module conversion: which parameters become half, and the hooks that cast what goes in and what comes out.

Hooks are module-level functions with at most a dtype bound to them, so that a module can be copied and pickled at any
time; none counts calls, because activation checkpointing runs inner modules a second time.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_amp.batches import Names, cast, cast_call
from lightning_amp.fp32_state_dicts import LoadFp32, SaveFp32
from lightning_amp.late_modules import LateModules
from lightning_amp.master_weights import MasterWeights
from lightning_amp.opt_levels import AmpConfig, KeepFp32


def _cast_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dtype: torch.dtype, uncast: Names = ()
) -> Any:
    if args and type(args[0]) is Tensor and not args[1:] and not kwargs:
        # Few calls, since this runs for every module that owns weights.
        it = args[0]
        return None if it.dtype is dtype or not it.dtype.is_floating_point else ((it.to(dtype),), kwargs)
    return cast_call(args, kwargs, dtype, uncast=uncast)


def cast_outputs(module: nn.Module, args: Any, output: Any, *, dtype: torch.dtype) -> Any:
    """A forward hook, with ``dtype`` bound to it, that casts what a module returns."""
    if type(output) is Tensor:
        return output.to(dtype) if output.dtype.is_floating_point else output
    return cast(output, dtype)


def _drop_copied_hooks(module: nn.Module) -> bool:
    """Removes the hooks of this file that a deep copy of a module has from its original; tells whether it had any."""
    dropped = False
    for hooks in (module._forward_pre_hooks, module._forward_hooks):  # a copy has no handles: there is no public way
        for key, hook in list(hooks.items()):
            if isinstance(hook, partial) and hook.func in (_cast_inputs, cast_outputs):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                dropped = True
    return dropped


class _Own(NamedTuple):
    """The tensors that set a module's dtype: its own, and those that other modules hold for it."""

    params: list[Tensor]
    buffers: list[tuple[nn.Module, str]]


def _holders(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that merely hold tensors for ``module``: its parametrizations and parameter lists."""
    lists: list[nn.Module] = [
        child for child in module.children() if isinstance(child, (nn.ParameterList, nn.ParameterDict))
    ]
    parametrizations = module.get_submodule("parametrizations").modules() if parametrize.is_parametrized(module) else ()
    return [*lists, *parametrizations]


def _own_tensors(module: nn.Module) -> _Own:
    owners = [module, *_holders(module)]
    return _Own(
        [p for owner in owners for p in owner.parameters(recurse=False) if p.is_floating_point()],
        [(o, n) for o in owners for n, b in o.named_buffers(recurse=False) if b.dtype is torch.float32],
    )


def _is_orthogonal(module: nn.Module) -> bool:
    """Tells whether a weight is kept orthogonal: by functions that know no half, or are wrong in it (`matrix_exp`)."""
    if not parametrize.is_parametrized(module):
        return False
    # The class has no public name; its instances are what `nn.utils.parametrizations.orthogonal` adds.
    return any(type(part).__name__ == "_Orthogonal" for part in module.get_submodule("parametrizations").modules())


def matches(entry: KeepFp32, module: nn.Module, name: str) -> bool:
    """Tells whether an entry of ``keep_fp32`` is meant for a module.

    Args:
        entry: A module type, its name or a name pattern, or a predicate.
        module: The module.
        name: Its name in the model, empty for the model itself.
    """
    if isinstance(entry, str):
        return any(c.__name__ == entry for c in type(module).__mro__) or fnmatchcase(name, entry)
    if isinstance(entry, type):
        return isinstance(module, entry)
    return bool(entry(module, name))


def models_below(module: nn.Module) -> list[nn.Module]:
    """Returns the direct children of ``module``, with ModuleList and ModuleDict looked through.

    Args:
        module: A LightningModule, say.
    """
    models: list[nn.Module] = []
    for child in module.children():
        models += models_below(child) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else [child]
    return list(dict.fromkeys(models))


def _refuse_unconvertible(names: Mapping[nn.Module, str]) -> None:
    for module, name in names.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"Module {name!r} is scripted: its weights cannot be converted. Script it after training.")
    own = ((f"{name}.{n}" if name else n, p) for m, name in names.items() for n, p in m.named_parameters(recurse=False))
    for name, param in own:
        if is_lazy(param):
            raise ValueError(
                f"Parameter {name!r} is lazy: it has no values to convert yet. Run the module once on an example batch "
                "before training, or use opt_level='O1'."
            )
        if hasattr(param, "device_mesh"):
            raise ValueError(
                f"Parameter {name!r} is a DTensor: sharded weights cannot be converted. Use opt_level='O1'."
            )


class Conversion:
    """Modules whose weights are half for the time being, and whose outputs are cast.

    Args:
        config: The level and its settings.
        masters: Where the float32 originals go.
    """

    def __init__(self, config: AmpConfig, masters: MasterWeights) -> None:
        self._config = config
        self._half = config.cast_model_type or config.dtype
        self._masters = masters
        self._handles: list[Any] = []
        self._fp32: set[int] = set()
        self._kept: set[nn.Module] = set()
        self._hooks: dict[nn.Module, Callable[..., Any]] = {}  # these three: which modules have which kind already
        self._models: set[nn.Module] = set()
        self._saved: set[nn.Module] = set()
        self._late: list[LateModules] = []
        self.kept: list[str] = []
        """Names of the parameters that stayed float32, BatchNorm's aside."""

    def convert(self, root: nn.Module, *, root_is_model: bool) -> None:
        """Converts what is below ``root``, in place; only casts outputs where the config leaves weights float32.

        Args:
            root: The module to start from.
            root_is_model: Whether ``root`` itself is a model to cast around. Else its direct children are, and the
                parameters that it owns itself stay float32, as in a LightningModule.

        Raises:
            ValueError: A parameter is lazy or distributed, or a module is scripted.
        """
        models = [root] if root_is_model else models_below(root)
        if self._config.cast_model_type is None:
            for model in models:
                if any(p.is_floating_point() for p in model.parameters()):
                    self._cast_outputs_of(model)
            return
        owner = None if root_is_model else root
        names = {module: name for name, module in root.named_modules()}
        self._convert(names, models, owner)
        self._note_kept(root)
        self._late.append(LateModules(names, owner, self._convert))

    def _convert(
        self, names: Mapping[nn.Module, str], models: Iterable[nn.Module], owner: nn.Module | None = None
    ) -> Callable[..., Any]:
        """Converts modules, ``owner`` excepted; returns what casts the inputs of a call of one that is under way."""
        _refuse_unconvertible(names)
        for module in names:
            if module not in self._hooks:
                self._adopt_copy(module)
        units = {module: _own_tensors(module) for module in names}
        self._find_fp32(names, units.values(), owner)
        dtypes: dict[nn.Module, torch.dtype] = {}
        for module, own in units.items():
            dtype = self._convert_own(own)
            takes_any = module is owner or isinstance(module, _BatchNorm)
            if dtype is self._half or (dtype is torch.float32 and not takes_any):
                dtypes[module] = dtype
        for model in models:
            if any(p.dtype is self._half for p in model.parameters()):
                dtypes.setdefault(model, self._half)
                self._cast_outputs_of(model)
        for module, dtype in dtypes.items():
            if module not in self._hooks:
                hook = partial(_cast_inputs, dtype=dtype, uncast=self._config.uncast_inputs)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
                self._hooks[module] = hook
        self._keep_state_dicts_fp32(names)
        return lambda module, *args: self._hooks[module](module, *args) if module in self._hooks else None

    def _adopt_copy(self, module: nn.Module) -> None:
        """Takes a deep copy of a converted module, made during training, for one of the module as it was before."""
        if _drop_copied_hooks(module):
            for param in module.parameters(recurse=False):
                if param.dtype is self._half and self._masters.of(param) is None:
                    param.data = param.data.float()
            for buffer in module.buffers(recurse=False):
                if buffer.dtype is self._half:
                    buffer.data = buffer.data.float()

    def _convert_own(self, own: _Own) -> torch.dtype | None:
        """Converts what a module owns and returns the dtype it computes in, None where its weights do not tell."""
        halves = [p for p in own.params if id(p) not in self._fp32 and p.dtype in (torch.float32, self._half)]
        for param in halves:
            if param.dtype is torch.float32:
                self._masters.convert(param, self._half)
        for owner, buffer in own.buffers if halves else ():
            self._masters.convert_buffer(owner, buffer, self._half)
        if halves:
            return self._half
        return torch.float32 if any(p.dtype is torch.float32 for p in own.params) else None

    def _find_fp32(self, names: Mapping[nn.Module, str], units: Collection[_Own], owner: nn.Module | None) -> None:
        """Finds out which parameters stay float32."""
        for module, name in names.items():
            if module in self._kept or self._is_kept(module, name):
                self._kept.update(module.modules())
        fp32 = self._fp32
        fp32 |= {id(p) for module in names if module in self._kept for p in module.parameters(recurse=False)}
        if owner is not None:
            fp32 |= {id(p) for p in _own_tensors(owner).params}
        while True:  # a module has one dtype, also where it shares a parameter with a module that is kept float32
            grown = {id(p) for own in units if any(id(p) in fp32 for p in own.params) for p in own.params}
            if grown <= fp32:
                return
            fp32 |= grown

    def _is_kept(self, module: nn.Module, name: str) -> bool:
        if (self._config.keep_batchnorm_fp32 and isinstance(module, _BatchNorm)) or _is_orthogonal(module):
            return True
        return any(matches(entry, module, name) for entry in self._config.keep_fp32)

    def _cast_outputs_of(self, model: nn.Module) -> None:
        if self._config.cast_model_outputs is not None and model not in self._models:
            self._models.add(model)
            hook = partial(cast_outputs, dtype=self._config.cast_model_outputs)
            self._handles.append(model.register_forward_hook(hook))

    def _note_kept(self, root: nn.Module) -> None:
        norms = {id(p) for m in root.modules() if isinstance(m, _BatchNorm) for p in m.parameters()}
        named = root.named_parameters(remove_duplicate=False)
        self.kept += [name for name, p in named if p.dtype is torch.float32 and id(p) not in norms]

    def _keep_state_dicts_fp32(self, modules: Iterable[nn.Module]) -> None:
        save, load = SaveFp32(self._masters), LoadFp32(self._masters)
        for module in modules:
            tensors = (*module.parameters(False), *module.buffers(False))
            if module not in self._saved and any(t.dtype is self._half for t in tensors):
                self._saved.add(module)
                self._handles += [
                    module.register_state_dict_post_hook(save),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(load),  # type: ignore[no-untyped-call]
                ]

    def undo(self) -> None:
        """Makes everything float32 again and removes every hook. A second call does nothing."""
        for late in self._late:
            late.close()
        self._masters.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
