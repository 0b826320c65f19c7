"""The engine with real modules and optimizers, driven by the words of the stateful test."""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp.casting import Conversion
from lightning_amp.engine import Engine
from lightning_amp.master_weights import MasterWeights
from lightning_amp.opt_levels import resolve
from tests.helpers.engine_optimizers import make_torch_optimizer
from tests.helpers.engine_script import LATE, Loss, Pass, Setup, Term

NETS = 3


class BackwardError(RuntimeError):
    """What a failing backward pass raises."""


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise BackwardError("as asked")


def first_values() -> dict[str, Any]:
    """Returns every parameter's float32 start, no half number among them."""
    shapes = {f"{i}.{n}": s for i in range(NETS) for n, s in (("weight", (2, 2)), ("bias", (2,)))}
    values = {}
    for i, (name, shape) in enumerate(shapes.items()):
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        numbers = [0.1 * (i + 1) * (-1) ** j + 0.013 * j for j in range(size)]
        values[name] = torch.tensor(numbers).reshape(shape).double().numpy()
    return values


class World:
    """Three linear networks, some optimizers, and the engine.

    Args:
        setup: The training.
        values: Every parameter's float32 value, by name.
        owners: Who owns which parameter now, where that is no longer as in ``setup``.
        loaded: What `save` gave, to go on from.
        load_late: Whether the weights are loaded after the conversion.
    """

    def __init__(
        self,
        setup: Setup,
        values: dict[str, Any],
        owners: Sequence[Sequence[Sequence[str]]] | None = None,
        loaded: bytes | None = None,
        load_late: bool = False,
    ) -> None:
        self.setup = setup
        self.config = resolve(
            setup.level,
            loss_scale=setup.loss_scale,
            init_scale=setup.init_scale,
            growth_interval=setup.growth_interval,
            growth_factor=setup.growth_factor,
            hysteresis=setup.hysteresis,
            min_loss_scale=setup.min_scale,
            max_loss_scale=setup.max_scale,
            keep_fp32=None if setup.kept is None or setup.level in ("O0", "O1") else f"nets.{setup.kept}",
            cache_casts=setup.cache_casts,  # type: ignore[arg-type]
        )
        self.root = nn.Module()
        self.root.nets = nn.ModuleList(nn.Linear(2, 2) for _ in range(NETS))
        self.params = {name.removeprefix("nets."): p for name, p in self.root.named_parameters()}
        for name, value in values.items():
            self.params[name].data = torch.tensor(value, dtype=torch.float32)
        state = None if loaded is None else torch.load(io.BytesIO(loaded), weights_only=True)
        if state is not None and not load_late:
            self.root.load_state_dict(state["model"])
        self.masters = MasterWeights(self.config.master_weights)
        self.conversion = None
        if self.config.cast_model_type is not None:
            self.conversion = Conversion(self.config, self.masters)
            self.conversion.convert(self.root, root_is_model=False)
        groups = owners or [[names] for names in setup.owners]
        self.optimizers = [
            make_torch_optimizer(kind, [{"params": [self.params[n] for n in names]} for names in lists])
            for kind, lists in zip(setup.kinds, groups, strict=True)
        ]
        self.engine = Engine(
            self.config,
            self.optimizers,
            [self.root],
            masters=self.masters,
            num_losses=2,
            skip_together=[range(len(setup.kinds))] if setup.joint else (),
            max_consecutive_skips=None,
        )
        if state is not None:
            self._take_over(state, weights=load_late)

    # State

    def save(self) -> bytes:
        """Returns a checkpoint, as it would be written to a file."""
        file = io.BytesIO()
        optimizers = [o.state_dict() for o in self.optimizers]
        torch.save({"model": self.root.state_dict(), "engine": self.engine.state_dict(), "opt": optimizers}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        """Takes a checkpoint over into the objects that are there."""
        self._take_over(torch.load(io.BytesIO(saved), weights_only=True), weights=True)

    def _take_over(self, state: dict[str, Any], weights: bool) -> None:
        if weights:
            self.root.load_state_dict(state["model"])
        self.engine.load_state_dict(state["engine"])
        for optimizer, mine in zip(self.optimizers, state["opt"], strict=True):
            optimizer.load_state_dict(mine)

    def add_late(self) -> None:
        dtype = self.config.cast_model_type or torch.float32
        self.params[LATE] = nn.Parameter(torch.tensor([0.75, -1.5], dtype=dtype))

    def close(self) -> None:
        """Ends the training, as the plugin's teardown does."""
        self.engine.close()
        if self.conversion is not None:
            self.conversion.undo()

    # Forward and backward

    @contextmanager
    def region(self) -> Iterator[None]:
        """The autocast region that Lightning has around all of a manual ``training_step`` at O1."""
        with self._autocast() if self.setup.region else nullcontext():
            yield

    def _autocast(self) -> Any:
        if self.setup.level != "O1":
            return nullcontext()
        return torch.autocast("cpu", torch.float16, cache_enabled=bool(self.setup.cache_casts))

    @contextmanager
    def loss(self, loss: Loss, fails: bool = False) -> Iterator[Tensor]:
        """Gives a loss; the hooks that put its fault into it are gone after the block."""
        handles: list[Any] = []
        with self._autocast():
            total = torch.zeros(())
            for i, term in enumerate(loss.terms):
                total = total + self._term(term, loss.poison if i == 0 else None, fails and i == 0, handles)
        total = total.half() if loss.half else total
        total = total * torch.inf if loss.poison == "loss * inf" else total
        try:
            yield total + torch.nan if loss.poison == "loss + nan" else total
        finally:
            for handle in handles:
                handle.remove()

    def _term(self, term: Term, poison: str | None, fails: bool, handles: list[Any]) -> Tensor:
        if term.net == NETS:
            y: Tensor = self.params[LATE]
        else:
            x = torch.tensor([term.x])
            if poison in ("x inf", "x nan"):
                x[0, 0] = torch.inf if poison == "x inf" else torch.nan
            y = self.root.nets[term.net](x)[0]
            weight = self.params[f"{term.net}.weight"]
            if poison == "dw" and weight.requires_grad:
                handles.append(weight.register_hook(lambda g: torch.full_like(g, -torch.inf)))
            if poison == "dy" and y.requires_grad:
                handles.append(y.register_hook(lambda g: torch.cat([g[:1] * torch.inf, g[1:]])))
        y = _Fail.apply(y) if fails else y  # type: ignore[no-untyped-call]
        return (y.float() * torch.tensor(term.c)).sum()

    def backward(self, total: Tensor, loss: Loss, one: Pass, named: Sequence[int], retain_graph: bool) -> None:
        """Runs one pass over the graph of ``total``, which is ``loss``."""
        options: dict[str, Any] = {"retain_graph": True} if retain_graph else {}
        if one.create_graph:
            options["create_graph"] = True
        only = one.inputs(loss)
        if only is not None and self.params[only].requires_grad:
            options["inputs"] = [self.params[only]]
        theirs = [self.optimizers[i] for i in named] if one.how == "named" else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            self.engine.backward(total, loss_id=one.loss_id, optimizers=theirs, delay_unscale=one.delay, **options)

    # Optimizers

    @contextmanager
    def lent(self, indices: Sequence[int]) -> Iterator[None]:
        with ExitStack() as stack:
            for i in indices:
                stack.enter_context(self.engine.lent_masters(self.optimizers[i]))
            yield

    def held(self, index: int) -> list[Tensor]:
        """Returns what is in an optimizer's ``param_groups`` now."""
        return [p for group in self.optimizers[index].param_groups for p in group["params"]]
