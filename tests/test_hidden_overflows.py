"""Gradients that an overflow left finite numbers in, by an edit after the backward pass, are not stepped."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import Outcome
from lightning_amp.loss_scaler import LossScaler
from tests.helpers.modules import Scripted, amp, fit, linear, run, sgd

ONE = torch.ones(1, 1)
TOO_LARGE = 2.0**17
"""A scale under which the gradient of a half output of one is infinite, and one half of which is not."""

Edit = Callable[[list[Tensor]], Any]


def grads(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


EDITS: dict[str, Edit] = {
    "clip_grad_value_": lambda params: nn.utils.clip_grad_value_(params, 0.5),
    "clip_grad_norm_": lambda params: nn.utils.clip_grad_norm_(params, 0.5),
    "clamp_": lambda params: [g.clamp_(-0.5, 0.5) for g in grads(params)],
    "data.clamp_": lambda params: [g.data.clamp_(-0.5, 0.5) for g in grads(params)],
    "nan_to_num_": lambda params: [g.nan_to_num_(0.0, 0.5, -0.5) for g in grads(params)],
    "value, then norm": lambda params: (nn.utils.clip_grad_value_(params, 0.5), nn.utils.clip_grad_norm_(params, 0.1)),
}


def stepping(edit: Edit) -> Any:
    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        module.manual_backward(module.net(ONE).sum())
        edit(list(module.net.parameters()))
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("fused", [False, True])
def test_c25_what_is_clipped_by_hand_after_an_overflow_is_skipped(level: str, edit: Edit, fused: bool) -> None:
    """Three passes: the first two overflow, the third is stepped as in float32."""
    settings = {"loss_scale": "dynamic", "init_scale": TOO_LARGE} if level == "O3" else {"init_scale": TOO_LARGE}
    plugin = amp(level, **settings)
    module = run(stepping(edit), sgd("net", fused=fused), plugin, 3, net=linear(1.0))
    plain = run(stepping(edit), sgd("net"), None, 1, net=linear(1.0))
    assert plugin.real_steps(module.trainer.optimizers[0]) == 1
    assert module.net.weight.item() == pytest.approx(plain.net.weight.item(), abs=1e-3)


class ClippingByHand(Scripted):
    """Clips in one of Lightning's hooks, and never asks the plugin to."""

    where, edit = "", staticmethod(lambda params: None)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.where == "on_before_optimizer_step":
            self.edit([p for group in optimizer.param_groups for p in group["params"]])

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.where == "configure_gradient_clipping":
            self.edit(list(self.net.parameters()))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("where", ["on_before_optimizer_step", "configure_gradient_clipping"])
@pytest.mark.parametrize("window", [1, 2])
def test_c25_so_it_is_in_automatic_optimization(level: str, edit: Edit, where: str, window: int) -> None:
    def train(plugin: Any, steps: int) -> ClippingByHand:
        module = ClippingByHand(lambda m, *_: m.net(ONE).sum(), sgd("net"), automatic=True, net=linear(1.0))
        module.where, module.edit = where, edit  # type: ignore[assignment]
        fit(module, plugin, [ONE] * steps * window, accumulate_grad_batches=window)
        return module

    plugin = amp(level, init_scale=TOO_LARGE * window)
    stepped = 2 if (level, window) == ("O2", 2) else 1  # where each pass of a window moves the scale
    module, plain = train(plugin, 3), train(None, stepped)
    assert plugin.real_steps(module.trainer.optimizers[0]) == stepped
    assert module.net.weight.item() == pytest.approx(plain.net.weight.item(), abs=1e-3)


def overflow_in(module: Any, name: str) -> Tensor:
    """Returns a loss into both networks, in whose backward pass the gradient of one of them is infinite."""
    out = {n: getattr(module, n)(ONE) for n in "ab"}
    out[name].register_hook(lambda g: g * torch.inf)
    return out["a"].float().sum() + out["b"].float().sum()


BETWEEN: dict[str, tuple[Callable[[Any], Any], tuple[str, str]]] = {
    "nothing": (lambda m: None, ("skipped", "stepped")),
    "the plugin's clip of both": (
        lambda m: [m.clip_gradients(o, 0.5, "value") for o in m.optimizers()],
        ("skipped", "stepped"),
    ),
    "torch's clip of both": (lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.5), ("skipped", "skipped")),
    "torch's norm of both": (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5), ("skipped", "skipped")),
    "torch's clip of the infinite one": (
        lambda m: nn.utils.clip_grad_value_(m.a.parameters(), 0.5),
        ("skipped", "stepped"),
    ),
    "both clips of the infinite one": (
        lambda m: (nn.utils.clip_grad_value_(m.a.parameters(), 0.5), m.clip_gradients(m.optimizers()[0], 0.1, "norm")),
        ("skipped", "stepped"),
    ),
    "gradients of the user's own": (
        lambda m: [setattr(p, "grad", torch.ones_like(p, dtype=p.grad.dtype)) for p in m.parameters()],
        ("stepped", "stepped"),
    ),
    "zeroed and filled anew": (
        lambda m: (m.zero_grad(), m.manual_backward(m.a(ONE).sum() + m.b(ONE).sum())),
        ("stepped", "stepped"),
    ),
    "zeroed in place and filled anew": (
        lambda m: (
            [o.zero_grad(set_to_none=False) for o in m.optimizers()],
            m.manual_backward(m.a(ONE).sum() + m.b(ONE).sum()),
        ),
        ("stepped", "stepped"),
    ),
    "clipped, and a clean pass added": (
        lambda m: (
            nn.utils.clip_grad_value_(m.a.parameters(), 0.5),
            m.manual_backward(m.a(ONE).sum() + m.b(ONE).sum()),
        ),
        ("skipped", "stepped"),
    ),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(("between", "expected"), BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("waits", [False, True], ids=["host", "device"])
def test_c13_optimizers_of_one_loss_stay_independent_unless_both_were_edited(
    level: str, between: Callable[[Any], Any], expected: tuple[str, str], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a pass gave two optimizers gradients, an edit in place leaves nothing to tell which of them overflowed.

    The same where the host does not know what a pass found, as on a GPU, so that clean passes are noted, too.
    """
    if waits:
        monkeypatch.setattr(LossScaler, "known_clean", property(lambda _: False, lambda *_: None), raising=False)
    plugin = amp(level, init_scale=8.0)

    def step(module: Any, *_: Any) -> None:
        module.manual_backward(overflow_in(module, "a"))
        between(module)
        for optimizer in module.optimizers():
            optimizer.step()

    module = run(step, sgd("a", "b"), plugin, a=linear(2.0), b=linear(2.0))
    assert tuple(plugin.outcome(o).value for o in module.trainer.optimizers) == expected
    assert [(net.weight.item() != 2.0) for net in (module.a, module.b)] == [e == "stepped" for e in expected]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_c13_a_partner_hears_of_an_overflow_that_a_clip_hid(level: str, order: tuple[int, int]) -> None:
    plugin = amp(level, skip_together=[[0, 1]])

    def step(module: Any, *_: Any) -> None:
        optimizers = module.optimizers()
        for net, finite in ((module.a, False), (module.b, True)):
            out = net(ONE)
            out.register_hook(lambda g, factor=1.0 if finite else torch.inf: g * factor)
            module.manual_backward(out.float().sum())
            nn.utils.clip_grad_value_(net.parameters(), 0.5)
        for i in order:
            optimizers[i].step()

    module = run(step, sgd("a", "b"), plugin, a=linear(2.0), b=linear(2.0))
    assert [plugin.outcome(o) for o in module.trainer.optimizers] == [Outcome.SKIPPED] * 2


def test_nothing_is_kept_alive_by_what_an_optimizer_answers_for() -> None:
    """Gradients of an overflow that were cleared take no memory until the next pass."""
    alive: list[Any] = []

    def step(module: Any, *_: Any) -> None:
        module.manual_backward(overflow_in(module, "a"))
        alive[:] = [weakref.ref(p.grad) for p in module.parameters()]
        module.zero_grad()
        alive[:] = [ref for ref in alive if ref() is not None]

    run(step, sgd("a", "b"), amp("O1", init_scale=8.0), a=linear(2.0), b=linear(2.0))
    assert alive == []
