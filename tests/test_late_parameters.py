"""Parameters and modules that join a model during training get true gradients at once, whoever owns them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from tests.helpers.modules import HALF_LEVELS, SCALED_LEVELS, Scripted, amp, fit, linear, run, sgd

ONE = torch.ones(1, 1)


class Holder(nn.Module):
    """A network with room for more."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear(1.0)
        self.inner = nn.Sequential()
        self.more = nn.ParameterList()
        self.table = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(self.net(x))
        for name, p in self.named_parameters(recurse=False):
            out = out * p.to(out.dtype) if name == "late" else out
        for p in self.more:
            out = out * p.to(out.dtype)
        for module in self.table.values():
            out = module(out)
        return out


JOINS: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda m: setattr(m.holder, "late", nn.Parameter(torch.tensor(3.0))),
    "a registered parameter": lambda m: m.holder.register_parameter("late", nn.Parameter(torch.tensor(3.0))),
    "in a list": lambda m: m.holder.more.append(nn.Parameter(torch.tensor(3.0))),
    "beside the network": lambda m: m.add_module("late", linear(3.0)),
    "a parameter beside the network": lambda m: setattr(m, "scale", nn.Parameter(torch.tensor(3.0))),
}


def late_of(module: Any) -> list[nn.Parameter]:
    known = {id(module.holder.net.weight)}
    return [p for p in module.parameters() if id(p) not in known]


def output(module: Any) -> Tensor:
    out = module.holder(ONE)
    out = module.late(out) if hasattr(module, "late") else out
    return out * module.scale if hasattr(module, "scale") else out


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
@pytest.mark.parametrize("named", [False, True], ids=["walk", "named"])
def test_a_parameter_that_no_optimizer_owns_has_a_true_gradient_from_its_first_pass_on(
    level: str, join: Callable[[Any], Any], named: bool
) -> None:
    seen: list[list[float]] = []

    def step(module: Any, batch: Any, index: int) -> None:
        if index == 1:
            join(module)
        loss = output(module).float().sum()
        module.manual_backward(loss, **({"loss_id": 0} if named else {}))
        seen.append([p.grad.item() for p in late_of(module)])

    run(step, sgd("holder"), amp(level, loss_scale=1024.0), 3, holder=Holder())
    assert seen == [[], [1.0], [2.0]]


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize("join", [*JOINS.values()], ids=JOINS)
def test_c79_what_joins_and_is_given_to_the_optimizer_trains_as_in_float32(
    level: str, automatic: bool, join: Callable[[Any], Any]
) -> None:
    def step(module: Any, batch: Any, index: int) -> Any:
        if index == 1:
            join(module)
            module.trainer.optimizers[0].add_param_group({"params": late_of(module), "lr": 0.02})
        loss = output(module).float().square().sum()
        if automatic:
            return loss
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(loss)
        optimizer.step()
        return None

    def train(plugin: Any) -> Scripted:
        module = Scripted(step, sgd("holder", lr=0.01), automatic=automatic, holder=Holder())
        fit(module, plugin, [ONE] * 4)
        return module

    ours, plain = train(amp(level)), train(None)
    assert late_of(plain)[0].item() != 3.0
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.dtype is torch.float32
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-2 if level == "O3" else 3e-3)


@pytest.mark.parametrize("level", SCALED_LEVELS)
def test_no_hook_on_registrations_is_left(level: str) -> None:
    hooks = (torch_modules._global_module_registration_hooks, torch_modules._global_parameter_registration_hooks)
    before = [dict(h) for h in hooks]
    during: list[int] = []

    def step(module: Any, *_: Any) -> None:
        during[:] = [len(h) for h in hooks]
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        run(step, sgd("net"), amp(level), net=linear(1.0))
    assert all(now > len(b) for now, b in zip(during, before, strict=True))
    assert [dict(h) for h in hooks] == before
