"""Promises 5, 9 and 10: O0 is Lightning itself, the module is left as found, nothing is substituted in silence."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.modules import HALF_LEVELS, LEVELS, SCALE, Scripted, amp, fit, linear, run, same, sgd, weights

X = torch.linspace(-2.0, 2.0, 24).view(6, 4)


def network(dropout: float = 0.25) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))


# 5. O0 is bit-identical to Lightning without the plugin.


def automatic(plugin: Any, dropout: float = 0.25, **settings: Any) -> tuple[Scripted, list[Tensor]]:
    """Accumulation, a batch without a loss, clipping; besides the module, the optimizer's state."""
    torch.manual_seed(0)
    module = Scripted(
        lambda m, batch, i: None if i == 4 else F.mse_loss(m.net(batch), batch[:, :2].sin()),
        lambda m: torch.optim.AdamW(m.parameters(), 0.02, eps=1e-4, **settings),
        automatic=True,
        net=network(dropout),
    )
    batches = [torch.randn(6, 4) for _ in range(7)]
    it = fit(module, plugin, batches, max_epochs=2, accumulate_grad_batches=3, gradient_clip_val=0.1)
    states = it.optimizers[0].state_dict()["state"].values()
    return module, [value for state in states for value in state.values()]


def fused(plugin: Any, dropout: float = 0.25) -> tuple[Scripted, list[Tensor]]:
    return automatic(plugin, dropout, fused=True)


def manual(plugin: Any, dropout: float = 0.25) -> tuple[Scripted, list[Tensor]]:
    """Two optimizers, toggled, clipped, a graph used twice; besides the module, the losses."""
    torch.manual_seed(0)
    losses: list[Tensor] = []

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        for k, optimizer in enumerate(module.optimizers()):
            module.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = F.mse_loss(module.b(module.a(X)), X[:, :2].cos() * k)
            module.manual_backward(loss, retain_graph=True)
            module.manual_backward(loss * 0.5)
            module.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            module.untoggle_optimizer(optimizer)
            losses.append(loss.detach())

    optimizers = sgd("a", "b", lr=0.3, momentum=0.9)
    return run(step, optimizers, plugin, 6, a=network(dropout), b=nn.Linear(2, 2)), losses


@pytest.fixture(params=[automatic, fused, manual], ids=lambda train: train.__name__)
def train(request: pytest.FixtureRequest) -> Any:
    """A training: takes a plugin, returns the module and what else came of it."""
    return request.param


def test_promise_5_o0_is_lightning_bit_for_bit(train: Any) -> None:
    ours, plain = train(amp("O0")), train(None)
    assert same(ours[1], plain[1])
    assert same(list(ours[0].state_dict().values()), list(plain[0].state_dict().values()))


def test_promise_5_o0_adds_nothing_to_a_checkpoint(tmp_path: Path) -> None:
    keys = []
    for plugin in (amp("O0"), None):
        it = fit(Scripted(lambda *_: None, sgd("net"), net=linear(1.0)), plugin)
        it.save_checkpoint(tmp_path / "saved.ckpt")
        keys.append(set(torch.load(tmp_path / "saved.ckpt", weights_only=True)))
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("train", "level"),
    [
        (automatic, "O1"),
        (automatic, "O2"),
        (fused, "O1"),
        (fused, "O2"),
        (manual, "O1"),
        (manual, "O2"),
        (manual, "O3"),
    ],
)
def test_promise_5_a_script_that_knows_no_levels_is_right_at_all(train: Any, level: str) -> None:
    """Without dropout, whose random numbers depend on the dtype; Adam's squares are no task for O3."""
    ours, plain = (train(plugin, 0.0)[0].state_dict() for plugin in (amp(level), None))
    assert [t.dtype for t in ours.values()] == [t.dtype for t in plain.values()]
    names = [name for name, value in plain.items() if value.is_floating_point()]
    far = torch.cat([(ours[name] - plain[name]).flatten() for name in names]).norm()
    assert far <= 0.005  # the float32 ones move by more than 0.4


USES: dict[str, Callable[[Any], Tensor]] = {
    "a function on a weight": lambda m: F.linear(X, m.net.weight, m.net.bias),
    "a product with a weight": lambda m: X @ m.net.weight.t(),
}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_promise_5_a_half_weight_that_meets_float32_names_the_remedies(
    level: str, use: Callable[[Any], Tensor]
) -> None:
    def step(module: Any, *_: Any) -> None:
        module.manual_backward(use(module).sum())

    def train(**settings: Any) -> None:
        run(step, sgd("net"), amp(level, **settings), net=nn.Linear(4, 2))

    with pytest.raises(RuntimeError) as error:
        train()
    for remedy in ("call the module", "keep_fp32", "patch_torch_functions=True"):
        assert remedy in str(error.value)
    assert error.value.__cause__ is not None
    train(keep_fp32="net")
    train(patch_torch_functions=True)


def test_promise_5_other_errors_are_left_as_they_are() -> None:
    def step(module: Any, *_: Any) -> None:
        module.net(torch.ones(1, 5))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        run(step, sgd("net"), amp("O2"), net=nn.Linear(4, 2))
    assert "keep_fp32" not in str(error.value)


# 9. The module is left as it was found.


def traces(module: nn.Module) -> list[int]:
    """Counts the hooks of every kind on every module."""
    return [len(v) for m in module.modules() for k, v in sorted(vars(m).items()) if k.endswith("hooks")]


class Boom(Exception):
    """What a user's own code raises."""


def ending(where: str, error: BaseException, plugin: Any, masters: list[Tensor]) -> Any:
    """Returns a training step that raises at ``where`` on its third batch and notes the weights it has reached."""

    def fail(*_: Any) -> None:
        raise error

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        here = where if batch_idx == 2 else ""
        optimizer = module.optimizers()
        optimizer.zero_grad()
        loss = ((module.net(X) + module.free(X)) ** 2).mean()
        if here == "forward":
            fail()
        if here == "backward":
            loss.register_hook(fail)
        module.manual_backward(loss)
        if here == "step":
            optimizer.optimizer.register_step_pre_hook(fail)
        with plugin.masters(optimizer) if here == "masters" else nullcontext():
            fail() if here == "masters" else optimizer.step()
        with plugin.masters(optimizer):
            masters[:] = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    return step


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("where", ["the end", "forward", "backward", "step", "masters"])
@pytest.mark.parametrize("error", [Boom(), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
def test_promise_9_nothing_of_ours_remains(level: str, where: str, error: BaseException) -> None:
    plugin, masters = amp(level), []
    module = Scripted(
        ending(where, error, plugin, masters),
        lambda m: torch.optim.Adam(m.net.parameters(), 0.01, eps=1e-4),
        net=network(),
        free=nn.Linear(4, 2),
    )
    before, free = traces(module), weights(module.free)
    with nullcontext() if where == "the end" else pytest.raises((Boom, SystemExit)):
        fit(module, plugin, [0] * 4)
    assert {t.dtype for t in module.state_dict().values() if t.is_floating_point()} == {torch.float32}
    assert {p.grad_dtype for p in module.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} <= {torch.float32}
    assert traces(module) == before
    assert same([p.to(m.dtype) for p, m in zip(weights(module.net), masters, strict=True)], masters)
    assert same(weights(module.free), free)
    module.zero_grad()
    (module.net(X) + module.free(X)).sum().backward()  # as any float32 module


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_promise_9_the_optimizer_is_left_as_it_was_found(level: str) -> None:
    made: list[torch.optim.Optimizer] = []

    def make(module: Any) -> Any:
        made.append(torch.optim.SGD(module.net.parameters(), 0.5))
        return made

    def step(module: Any, *_: Any) -> None:
        module.manual_backward(module.net(torch.ones(1, 1)).sum())
        module.optimizers().step()

    module = run(step, make, amp(level), net=linear(2.0))
    assert not [k for k, v in vars(made[0]).items() if k.endswith("hooks") and len(v)]
    made[0].step()  # nobody minds: the training is over
    assert module.net.weight.item() == 1.0


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_promise_9_a_copy_in_mid_training_stands_alone(level: str) -> None:
    """It computes what the original does, carries no master, and is not touched by what comes after."""
    copies: list[nn.Module] = []
    as_copied: list[list[Tensor]] = []

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        module.manual_backward(module.net(X).square().mean())
        module.optimizers().step()
        if batch_idx == 0:
            pickled = pickle.dumps(module.net)
            assert b"master_weights" not in pickled
            copies.extend([copy.deepcopy(module.net), pickle.loads(pickled), copy.deepcopy(module).net])
            as_copied.extend(map(weights, copies))
            assert all(same(w, weights(module.net)) for w in as_copied)
            expected = module.net.eval()(X)
            assert all(torch.equal(c.eval()(X), expected) for c in copies)
            assert all(same(list(c.state_dict().values())[:2], w[:2]) for c, w in zip(copies, as_copied, strict=True))
            module.net.train()

    module = run(step, sgd("net", lr=0.5), amp(level), 3, net=network())
    assert not any(same([p.float() for p in w], weights(module.net)) for w in as_copied)
    assert all(same(weights(c), w) for c, w in zip(copies, as_copied, strict=True))


# 10. Nothing is substituted in silence.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_promise_10_what_was_asked_for_runs_on_the_cpu(level: str, dtype: torch.dtype) -> None:
    """The half type in the layers, the weights' dtype, the loss scale in the gradients."""
    seen: dict[str, Any] = {}
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def step(module: Any, *_: Any) -> None:
        handles = [m.register_forward_hook(lambda m, a, out: seen.update({type(m): out.dtype})) for m in net]
        out = module.net(X)
        out.register_hook(lambda grad: seen.update(scale=grad.abs().max().item()))
        module.manual_backward(out.float().sum())
        seen.update(weight=net[0].weight.dtype, norm=net[1].weight.dtype)
        for handle in handles:
            handle.remove()

    run(step, sgd("net"), amp(level, dtype=str(dtype).removeprefix("torch.")), net=net)
    half, wide = dtype, torch.float32
    assert seen[nn.Linear] is {"O0": wide, "O1": half, "O2": half, "O3": half}[level]
    assert seen["weight"] is {"O0": wide, "O1": wide, "O2": half, "O3": half}[level]
    assert seen["norm"] is {"O0": wide, "O1": wide, "O2": wide, "O3": half}[level]
    assert seen["scale"] == (SCALE if level in ("O1", "O2") and dtype is torch.float16 else 1.0)


def test_promise_10_a_static_scale_is_the_one_in_use() -> None:
    seen = []

    def step(module: Any, *_: Any) -> None:
        out = module.net(torch.ones(1, 1))
        out.register_hook(lambda grad: seen.append(grad.item()))
        module.manual_backward(out.float().sum())

    run(step, sgd("net"), amp("O3", loss_scale="128.0"), net=linear(1.0))
    assert seen == [128.0]


class Partly(Scripted):
    """Owns a parameter itself, and shares one between a module that is converted and one that is kept."""

    def __init__(self, step: Any) -> None:
        super().__init__(step, sgd("net"), net=nn.Linear(2, 2), head=nn.Linear(2, 2), tied=nn.Linear(2, 2))
        self.temperature = nn.Parameter(torch.ones(1))
        self.tied.weight = self.head.weight  # type: ignore[assignment, union-attr]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_promise_10_what_stays_float32_is_named(level: str, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    caplog.set_level(logging.INFO, "lightning.pytorch")
    stays: set[str] = set()

    def step(module: Any, *_: Any) -> None:
        stays.update(n for n, p in module.named_parameters() if p.dtype is torch.float32)

    fit(Partly(step), amp(level, keep_fp32="head"))
    (message,) = [m for m in caplog.messages if "AmpPrecision" in m]
    (line,) = [x for x in message.splitlines() if "stays float32" in x]
    assert stays == {"temperature", "head.weight", "head.bias", "tied.bias"}
    said = {name.strip() for name in line.split(":")[1].split(",")}
    assert said - {"tied.weight"} == stays  # which is head.weight by another name


@pytest.fixture
def device_mesh() -> Iterator[Any]:
    """A mesh of this one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_promise_10_weights_that_cannot_be_converted_are_refused(level: str, device_mesh: Any) -> None:
    sharded = nn.Linear(2, 1)
    sharded.weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(sharded.weight.detach(), device_mesh))
    for net, words in (
        (nn.LazyLinear(2), r"'net\.weight' is lazy.*opt_level='O1'"),
        (torch.jit.script(nn.Linear(2, 1)), r"'net' is scripted.*Script it after training"),
        (sharded, r"'net\.weight' is a DTensor.*opt_level='O1'"),
    ):
        with pytest.raises(ValueError, match=words):
            run(lambda *_: None, lambda m: None, amp(level), net=net)
