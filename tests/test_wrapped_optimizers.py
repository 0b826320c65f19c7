"""Optimizers that hold another one and keep a state apart from it, as Lookahead and SAM do."""

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from lightning_amp import amp
from tests.helpers.modules import LEVELS, run
from tests.helpers.modules import amp as plugin

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


class Lookahead(Optimizer):
    """Pulls the weights back every second step; an `Optimizer` that never runs its constructor, as most of its kind."""

    def __init__(self, base: Optimizer, hooks: Any) -> None:
        if hooks is not None:
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = hooks(), hooks()
        self.base, self.count = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        result = self.base.step(closure)
        self.count += 1
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                slow = self.base.state[p].setdefault("slow", p.detach().clone())
                if self.count % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


def trained(level: str, hooks: Any, steps: int, saved: Any = None) -> tuple[Tensor, list[Any]]:
    """Trains, from what was saved if given, and returns the weight and what could be saved after each step."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 1)
    found: list[Any] = []

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        if saved is not None and not found:
            module.net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        module.manual_backward((module.net(X) - 1.0).square().mean())
        optimizer.step()
        found.append(copy.deepcopy((module.net.state_dict(), optimizer.state_dict())))

    def made(module: Any) -> Any:
        return Lookahead(Adam(module.parameters(), lr=1e-2, eps=1e-4), hooks)

    run(step, made, plugin(level), steps=steps, net=layer)
    return layer.weight.detach(), found


@pytest.mark.parametrize("hooks", [OrderedDict, dict, None])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_wrapper_without_an_optimizers_constructor_trains_saves_and_resumes(level: str, hooks: Any) -> None:
    exact, _ = trained("O0", OrderedDict, 6)
    mine, found = trained(level, hooks, 6)
    assert torch.allclose(mine, exact, atol=2e-3)
    state = [value for entry in found[3][1]["state"].values() for value in entry.values() if isinstance(value, Tensor)]
    assert {value.dtype for value in state} == {torch.float32}
    assert torch.equal(trained(level, hooks, 2, found[3])[0], mine)


@pytest.mark.parametrize("level", LEVELS)
def test_in_a_plain_loop_the_state_apart_names_the_models_parameters(level: str) -> None:
    layer = nn.Linear(2, 1)
    optimizer = Lookahead(Adam(layer.parameters(), lr=1e-2, eps=1e-4), OrderedDict)
    amp.initialize(layer, optimizer, opt_level=level, verbosity=0, init_scale=1024.0)
    with amp.scale_loss(layer(X).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    held = set(map(id, optimizer.base.state))
    amp.deinitialize()
    assert held == set(map(id, layer.parameters()))
