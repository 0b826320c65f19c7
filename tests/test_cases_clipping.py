"""Cases C-01, C-03, C-04 and C-07: clipping and gradient norms act on true gradients, whatever the scale."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.modules import HALF_LEVELS, Scripted, amp, fit, run, sgd, watch_steps, weights

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)


def moved(train: Callable[[Any, nn.Module], Any], plugin: Any) -> Tensor:
    """Returns how far the weights of a fresh ``Linear(4, 1)`` move in a training."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    start = weights(net)
    train(plugin, net)
    return torch.cat([(a - b).flatten() for a, b in zip(weights(net), start, strict=True)])


def manually(factor: float, value: float, algorithm: str) -> Callable[[Any, nn.Module], Any]:
    """A training of one step in manual optimization that clips."""

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        module.manual_backward(module.net(X).float().mean() * factor)
        module.clip_gradients(optimizer, value, algorithm)
        optimizer.step()

    return lambda plugin, net: run(step, sgd("net"), plugin, net=net)


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize(("factor", "value"), [(0.01, 1.0), (8.0, 0.125)], ids=["idle", "biting"])
def test_c01_a_manual_clip_acts_on_true_gradients(level: str, algorithm: str, factor: float, value: float) -> None:
    """At a scale of 65536 the update is as in float32, where the clip bites and where it does not."""
    train = manually(factor, value, algorithm)
    # The half weights of O3 resolve 2^-12 at this size, and its gradients are half without a scale.
    scale = 2.0**16 if level != "O3" and factor < 1 else 2.0**10
    ours, plain = moved(train, amp(level, loss_scale=scale)), moved(train, None)
    assert (ours - plain).norm() <= (0.05 if level == "O3" else 0.002) * plain.norm()
    assert ours.norm() > 0.01


def automatically(make: Callable[[Any], Any], **settings: Any) -> Callable[[Any, nn.Module], Any]:
    """A training of five steps in automatic optimization."""

    def train(plugin: Any, net: nn.Module) -> None:
        module = Scripted(lambda m, *_: 8 * (m.net(X) - 2.0).square().mean(), make, automatic=True, net=net)
        fit(module, plugin, range(5), **settings)

    return train


def adamw(fused: bool) -> Callable[[Any], Any]:
    return lambda module: torch.optim.AdamW(module.parameters(), 0.05, fused=fused)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_c03_a_fused_optimizer_and_clipping_go_together(level: str, dtype: str, algorithm: str) -> None:
    """Same as unfused, and as float32 to the half type's tolerance; bfloat16 needs no scaler and is not refused."""
    clip = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": algorithm}
    fused, unfused = (moved(automatically(adamw(f), **clip), amp(level, dtype=dtype)) for f in (True, False))
    plain = moved(automatically(adamw(False), **clip), None)
    assert (fused - unfused).norm() <= 1e-5 * unfused.norm()
    assert (fused - plain).norm() <= {"float16": 0.002, "bfloat16": 0.02}[dtype] * plain.norm()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_c03_the_fused_kernel_gets_true_gradients_and_no_scale(level: str, momentum: float) -> None:
    """From the second step on the kernel itself decides on a skip: told of an overflow, and of no scale."""
    seen: list[tuple[Any, Any]] = []
    made: list[Any] = []

    def note(optimizer: Any, *_: Any) -> None:
        found = getattr(optimizer, "found_inf", None)
        seen.append((getattr(optimizer, "grad_scale", "absent"), None if found is None else found.item()))

    def make(module: Any) -> Any:
        made.append(torch.optim.SGD(module.parameters(), 0.05, momentum=momentum, fused=True))
        made[0].register_step_pre_hook(note)
        return made

    moved(automatically(make, gradient_clip_val=1.0), amp(level))
    assert seen == [("absent", None)] + [(None, 0.0)] * 4
    assert not hasattr(made[0], "grad_scale")
    assert not hasattr(made[0], "found_inf")


CLIPS: dict[str, Callable[[Any, Any, Any], None]] = {
    "the Trainer's": lambda module, optimizer, plugin: module.clip_gradients(optimizer, 0.1, "norm"),
    "the module's parameters": lambda module, *_: torch.nn.utils.clip_grad_norm_(module.net.parameters(), 0.1),
    "the master parameters": lambda module, optimizer, plugin: clip_masters(optimizer, plugin),
}


def clip_masters(optimizer: Any, plugin: Any) -> None:
    with plugin.masters(optimizer):
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_c04_every_way_to_clip_reaches_the_masters_gradients(clip: Callable[[Any, Any, Any], None]) -> None:
    plugin, lr = amp("O2", loss_scale=8.0), 0.5
    norms: list[Tensor] = []

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        module.manual_backward(module.net(X).mean() * 1e3)
        clip(module, optimizer, plugin)
        with plugin.masters(optimizer):
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            assert {g.dtype for g in grads} == {torch.float32}
            norms.append(torch.stack([g.norm() for g in grads]).norm())
        optimizer.step()

    ours = moved(lambda plugin, net: run(step, sgd("net", lr=lr), plugin, net=net), plugin)
    assert norms[0] == pytest.approx(0.1, rel=1e-3)
    assert ours.norm() == pytest.approx(lr * 0.1, rel=1e-3)


def test_c04_the_trainers_own_flag_reaches_them_too() -> None:
    train = automatically(sgd("net", lr=0.5), gradient_clip_val=0.1)
    assert moved(train, amp("O2", loss_scale=8.0)).norm() == pytest.approx(5 * 0.5 * 0.1, rel=0.01)


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("scale", [2.0, 65536.0])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_c07_norms_in_on_before_optimizer_step_carry_no_scale(
    level: str, scale: float, fused: bool, automatic: bool
) -> None:
    """Gradients of 1/64: small enough for the half type at the larger scale. The step itself sees the same ones."""
    plugin = amp(level, loss_scale=scale)
    hook: list[Tensor] = []
    asked: list[Tensor] = []
    used: list[Any] = []

    def step(module: Any, *_: Any) -> Any:
        loss = module.net(torch.ones(1, 3)).float().sum() / 64
        if automatic:
            return loss
        module.manual_backward(loss)
        asked.append(plugin.grad_norm(module.optimizers()))
        module.optimizers().step()

    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.net.parameters(), 1.0, fused=fused)
        used.append(watch_steps(optimizer))
        return optimizer

    module = Scripted(step, make, automatic=automatic, net=nn.Linear(3, 1))
    module.on_before_optimizer_step = lambda _: hook.append(  # type: ignore[method-assign]
        torch.cat([p.grad.flatten() for p in module.net.parameters()])
    )
    fit(module, plugin)
    assert hook[0].tolist() == [1 / 64] * 4
    assert torch.cat([g.flatten() for g in used[0][0]]).tolist() == [1 / 64] * 4
    assert [norm.item() for norm in asked] == ([] if automatic else [1 / 32])


def test_c07_one_call_gives_the_true_norm_of_each_optimizer() -> None:
    """Of the masters' gradients under O2, without disturbing a step or asking for one; zero where there are none."""
    plugin = amp("O2", num_losses=2)
    norms: list[list[float]] = []

    def step(module: Any, *_: Any) -> None:
        a, b = module.optimizers()
        norms.append([plugin.grad_norm(o).item() for o in (a, b)])
        module.manual_backward(3 * module.a(torch.ones(1, 3)).sum(), loss_id=1)
        norms.append([plugin.grad_norm(o).item() for o in (a, b)])

    run(step, sgd("a", "b"), plugin, a=nn.Linear(3, 1), b=nn.Linear(3, 1))
    assert norms == [[0.0, 0.0], [6.0, 0.0]]
