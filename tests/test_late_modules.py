"""Layers that are added to a converted network during training, and copies of it, work as they do in float32."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import amp as plain_amp
from tests.helpers.engines import converted, masters_of
from tests.helpers.modules import HALF_LEVELS, Scripted, amp, fit, linear, sgd

BATCHES = [torch.randn(6, 8, generator=torch.Generator().manual_seed(i)) for i in range(8)]


class Growing(nn.Module):
    """A network that gains a block now and then, as a progressively grown generator does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 8)

    def grow(self) -> None:
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.blocks.append(block)
        nn.init.orthogonal_(block[0].weight)  # there is no orthogonalisation of half matrices
        self.fade = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x * self.fade if hasattr(self, "fade") else x)
        return self.out(x)


def grow_and_train(module: Any, batch: Tensor, index: int) -> Any:
    if index in (2, 4):
        torch.manual_seed(index)
        known = {id(p) for p in module.parameters()}
        module.net.grow()
        if index == 4:
            module.head = nn.Sequential(nn.Linear(8, 8))
        late = [p for p in module.parameters() if id(p) not in known]
        module.trainer.optimizers[0].add_param_group({"params": late, "lr": 0.05})
    out = module.net(batch)
    out = module.head(out) if hasattr(module, "head") else out
    loss = (out - 1).square().mean()
    if module.automatic_optimization:
        return loss
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()
    return None


def grown(plugin: Any, automatic: bool) -> Scripted:
    torch.manual_seed(0)
    module = Scripted(grow_and_train, sgd("net", lr=0.1), automatic=automatic, net=Growing())
    fit(module, plugin, BATCHES)
    return module


def hooks_of(module: nn.Module) -> list[Any]:
    return [h for m in module.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_c79_a_network_that_grows_trains_as_in_float32(level: str, automatic: bool) -> None:
    ours, plain = grown(amp(level), automatic), grown(None, automatic)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02 if level == "O3" else 0.004)
    assert not hooks_of(ours)


@pytest.mark.parametrize(("level", "keep"), [("O2", None), ("O2", "net.blocks.*"), ("O2", "Linear"), ("O3", "net")])
def test_late_layers_are_half_unless_named_and_saved_in_float32(level: str, keep: str | None) -> None:
    seen: dict[str, Any] = {}

    def step(module: Any, batch: Tensor, index: int) -> None:
        grow_and_train(module, batch, index)
        if index == 5:
            seen.update({name: p.dtype for name, p in module.named_parameters()})
            seen["saved"] = {value.dtype for value in module.state_dict().values() if value.is_floating_point()}

    module = Scripted(step, sgd("net", lr=0.1), net=Growing())
    fit(module, amp(level, keep_fp32=keep), BATCHES[:6])
    half = {
        "net.blocks.1.0.weight": keep is None,
        "net.blocks.2.0.weight": keep is None,
        "net.blocks.1.1.weight": False,  # BatchNorm at O2
        "net.fade": keep not in ("net",),
        "head.0.weight": keep != "Linear",
    }
    assert {name: seen[name] is torch.float16 for name in half} == half
    assert seen["saved"] == {torch.float32}
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_late_layer_keeps_its_float32_values_as_masters() -> None:
    model = nn.ModuleDict({"net": nn.Sequential(linear(0.1))})
    conversion = converted(model, inside=True)
    late = linear(0.1)
    model["net"].append(late)
    assert late.weight.dtype is torch.float32, "until it is called"
    assert model["net"](torch.ones(1, 1)).dtype is torch.float32
    assert late.weight.dtype is torch.float16
    master = masters_of(conversion).of(late.weight)
    assert master is not None
    assert master.item() == torch.tensor(0.1).item()
    conversion.undo()
    assert late.weight.item() == torch.tensor(0.1).item()
    assert not hooks_of(model)
    model["net"].append(linear(1.0))
    assert not hooks_of(model), "nothing is watched any more"


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_hooks_do_not_pile_up_where_a_parameter_is_replaced_again_and_again(level: str) -> None:
    counts: list[int] = []

    def step(module: Any, batch: Tensor, index: int) -> None:
        module.net.weight = nn.Parameter(torch.full((1, 8), 0.5))
        module.optimizers().param_groups[0]["params"][:] = [module.net.weight]
        module.manual_backward(module.net(batch).mean())
        module.optimizers().step()
        counts.append(len(hooks_of(module)) + len(module.net._state_dict_hooks))

    module = Scripted(step, sgd("net", lr=0.0), net=nn.Linear(8, 1, bias=False))
    fit(module, amp(level), BATCHES)
    assert set(counts[1:]) == {counts[1]}
    assert module.net.weight.dtype is torch.float32


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_copy_made_during_training_is_a_network_like_any_other(level: str) -> None:
    """A teacher copied from its student when training starts, or anew each epoch."""
    seen: list[Any] = []

    class Distilled(Scripted):
        def on_train_start(self) -> None:
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def step(module: Any, batch: Tensor, index: int) -> None:
        with torch.no_grad():
            target = module.teacher(batch)
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward((module.net(batch) - target - 1).square().mean())
        optimizer.step()
        with torch.no_grad():
            for theirs, mine in zip(module.teacher.parameters(), module.net.parameters(), strict=True):
                theirs.lerp_(mine, 0.5)
        seen.append({value.dtype for name, value in module.state_dict().items() if name.endswith("weight")})

    def train(plugin: Any) -> Distilled:
        torch.manual_seed(0)
        module = Distilled(step, sgd("net", lr=0.05), net=Growing())
        fit(module, plugin, BATCHES)
        return module

    ours, plain = train(amp(level)), train(None)
    assert all(dtypes == {torch.float32} for dtypes in seen)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.01)
    assert not hooks_of(ours)
    assert torch.isfinite(ours.teacher(BATCHES[0])).all(), "after training, too"


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_c79_a_model_of_the_plain_front_end_may_grow(level: str) -> None:
    def train(level: str) -> nn.Module:
        torch.manual_seed(0)
        net = Growing()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net, optimizer = plain_amp.initialize(net, optimizer, opt_level=level, init_scale=128.0, verbosity=0)
        for index, batch in enumerate(BATCHES):
            if index == 3:
                net.grow()
                optimizer.add_param_group({"params": [*net.blocks[1].parameters(), net.fade]})
            optimizer.zero_grad()
            with plain_amp.scale_loss((net(batch).float() - 1).square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        plain_amp.deinitialize()
        return net

    ours, plain = train(level), train("O0")
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02 if level == "O3" else 0.004)
