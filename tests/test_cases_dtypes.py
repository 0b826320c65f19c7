"""Cases C-48, C-54 and C-60: stale half weights, FP32 tensors at any module's door, half parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.modules import HALF_LEVELS, LEVELS, Scripted, amp, fit, linear, run, sgd, trainer

ONE = torch.ones(1, 1)

# C-48. A forward after a weight changed, inside one autocast region, uses the new weight.


@pytest.mark.parametrize("cache", [True, "step", False])
@pytest.mark.parametrize("level", LEVELS)
def test_c48_a_generator_step_sees_the_discriminator_after_its_step(level: str, cache: Any) -> None:
    seen: list[float] = []

    def step(module: Any, *_: Any) -> None:
        d, g = module.optimizers()
        for optimizer in (d, g):
            out = module.d(module.g(ONE))
            seen.append(out.item())
            module.manual_backward(out.sum())
            optimizer.step()
            module.zero_grad()
        seen.append(module.d(module.g(ONE)).item())

    run(step, sgd("d", "g"), amp(level, cache_casts=cache), d=linear(2.0), g=linear(4.0))
    assert seen == [8.0, -8.0, -12.0]  # d: 2 - 4 = -2; g: 4 + 2 = 6


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda net: torch.no_grad()(net.weight.fill_)(5.0),
    "load_state_dict": lambda net: net.load_state_dict({"weight": torch.full((1, 1), 5.0)}),
    "data": lambda net: setattr(net.weight, "data", torch.full_like(net.weight, 5.0)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("level", LEVELS)
def test_c48_a_swapped_weight_is_used_after_the_next_backward_or_step(level: str, write: Callable[[Any], Any]) -> None:
    """An EMA swap, a target copy: between a backward pass and the next forward, in the same region."""
    seen: list[float] = []

    def step(module: Any, *_: Any) -> None:
        seen.append(module.net(ONE).item())
        module.manual_backward(module.net(ONE).sum())
        write(module.net)
        seen.append(module.net(ONE).item())

    run(step, sgd("net"), amp(level), net=linear(2.0))
    assert seen == [2.0, 5.0]


@pytest.mark.parametrize("level", LEVELS)
def test_c48_a_target_copy_under_no_grad_is_seen(level: str) -> None:
    """The target ran, was overwritten after a step, and runs again: both times without gradients."""
    seen: list[float] = []

    def target(module: Any) -> Tensor:
        with torch.no_grad():
            out: Tensor = module.target(ONE)
        seen.append(out.item())
        return out.float()

    def step(module: Any, *_: Any) -> None:
        module.manual_backward((module.net(ONE) - target(module)).sum())
        module.optimizers().step()
        with torch.no_grad():
            module.target.weight.copy_(module.net.weight)
        target(module)

    run(step, sgd("net"), amp(level), net=linear(4.0), target=linear(2.0))
    assert seen == [2.0, 3.0]


# C-54. Works at O1, works at O2: float32 tensors reach half weights through any module that is called.


class Blocks(nn.Module):
    """A discriminator-like network whose parts are called from outside, by attribute, method and key."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.LeakyReLU(0.2))
        self.heads = nn.ModuleDict({"real": nn.Linear(4, 1), "kind": nn.ModuleDict({"deep": nn.Linear(4, 3)})})
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["real"](self.pooled(x))

    def pooled(self, x: Tensor) -> Tensor:
        return self.features(x).mean(-1)


NOISE = torch.linspace(-1.0, 1.0, 20).view(4, 1, 5)

USES: dict[str, Callable[[Any], Tensor]] = {
    "forward on noise made in the step": lambda m: m.net(torch.randn(4, 1, 5)),
    "a child": lambda m: m.net.features(NOISE),
    "a method other than forward": lambda m: m.net.pooled(NOISE),
    "a nested dict's child": lambda m: m.net.heads["kind"]["deep"](torch.randn(4, 4)),
    "a keyword": lambda m: m.net(x=NOISE),
    "a list of modules": lambda m: m.many[1](torch.randn(2, 4)),
    "a child's output into another": lambda m: m.many[0](m.net.pooled(NOISE)),
    "a recurrent child with its state": lambda m: m.net.rnn(torch.randn(4, 2, 4), torch.zeros(1, 4, 4))[0],
    "a lone norm": lambda m: m.norm(torch.randn(2, 4)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c54_float32_tensors_reach_half_weights(level: str, use: str) -> None:
    """And give the same gradients as in float32, to half tolerance."""
    results: list[Tensor] = []

    def step(module: Any, *_: Any) -> None:
        torch.manual_seed(1)
        module.manual_backward(USES[use](module).float().square().mean())
        results.append(torch.cat([p.grad.float().flatten() for p in module.parameters() if p.grad is not None]))

    for plugin in (amp(level, loss_scale=8.0), None):
        torch.manual_seed(0)
        many = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        run(step, sgd("net", "many"), plugin, net=Blocks(), many=many, norm=nn.LayerNorm(4))
    ours, plain = results
    assert (ours - plain).norm() <= 0.01 * plain.norm()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_c54_a_float64_batch_and_a_forward_outside_training(level: str) -> None:
    """A rollout in a data loader knows no precision context; NumPy gives float64."""
    outputs: list[Tensor] = []

    class Rollout:
        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Any:
            outputs.append(module.net(ONE))
            yield torch.full((1, 1), 3.0, dtype=torch.float64)

    module = Scripted(lambda m, batch, i: m.net(batch).sum(), sgd("net"), automatic=True, net=linear(4.0))
    trainer(amp(level)).fit(module, Rollout())
    assert (module.net.weight.item(), outputs[0].item(), outputs[0].dtype) == (1.0, 4.0, torch.float32)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_c54_outputs_are_float32_and_targets_stay_as_they_are(level: str) -> None:
    """A target of 70,000 is infinite in half precision; losses and metrics see it whole."""
    target = torch.tensor([[70000.0]])
    seen: list[Tensor] = []

    class Loss(nn.Module):
        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            seen.extend([out, target])
            return (out - target).abs().mean()

    module = Scripted(
        lambda m, batch, i: m.loss(m.net(ONE), batch), sgd("net"), automatic=True, net=linear(1.0), loss=Loss()
    )
    fit(module, amp(level), [target])
    assert [t.dtype for t in seen] == [torch.float32, torch.float32]
    assert torch.equal(seen[1], target)


# C-60. Half gradients are handled where weights are half, and refused by name where they are not.


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_c60_a_module_that_is_half_already_trains(level: str) -> None:
    """O2 makes masters of the half weights and leaves those, float32; O3 leaves it half."""
    net = linear(1.0, 2.0).half()

    def step(module: Any, *_: Any) -> None:
        module.manual_backward(module.net(torch.ones(1, 2)).sum())
        module.optimizers().step()

    run(step, sgd("net", lr=2.0**-11), amp(level), net=net)
    assert net.weight.dtype is (torch.float32 if level == "O2" else torch.float16)
    assert net.weight.tolist() == [[1 - 2.0**-11, 2 - 2.0**-11 if level == "O2" else 2.0]]


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_c60_one_half_parameter_among_float32_ones_is_named(level: str) -> None:
    module = Scripted(lambda *_: None, sgd("net"), net=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).half()))
    with pytest.raises(Exception, match=r"'net\.1\.weight' is torch\.float16 already.*\.float\(\)"):
        fit(module, amp(level))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_c60_a_half_parameter_that_joins_later_trains(level: str) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            module.late = linear(8.0).half()
            module.optimizers().add_param_group({"params": list(module.late.parameters())})
        loss = module.net(ONE).sum()
        if batch_idx >= 1:
            loss = loss + module.late(ONE.half()).float().sum()
        module.manual_backward(loss)
        module.optimizers().step()
        module.zero_grad()

    module = run(step, sgd("net"), amp(level), 3, net=linear(8.0))
    assert (module.net.weight.item(), module.late.weight.item()) == (5.0, 6.0)
