"""Cases from the field through the plugin at every level, in manual and in automatic optimization."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from lightning_amp import Outcome
from tests.helpers.modules import HALF_LEVELS, SCALE, Scripted, amp, fit, linear, run, sgd, weights

ONE = torch.ones(1, 1)
BATCHES = [torch.randn(6, 8, generator=torch.Generator().manual_seed(i)) for i in range(8)]
MODES = pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])


def tolerance(level: str) -> float:
    return 2e-2 if level == "O3" else 3e-3


def training(loss: Callable[..., Tensor], automatic: bool, optimizers: Any = None, **networks: nn.Module) -> Scripted:
    """Returns a module that steps its first optimizer, and scheduler, once a batch."""

    def step(module: Any, batch: Any, index: int) -> Any:
        if automatic:
            return loss(module, batch, index)
        optimizer, scheduler = module.optimizers(), module.lr_schedulers()
        optimizer.zero_grad()
        module.manual_backward(loss(module, batch, index))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return None

    return Scripted(
        step, optimizers or (lambda m: torch.optim.SGD(m.parameters(), 0.1)), automatic=automatic, **networks
    )


def move(build: Callable[[], Scripted], plugin: Any, **settings: Any) -> Tensor:
    """Trains a fresh module and returns how far its weights moved."""
    torch.manual_seed(0)
    module = build()
    before = weights(module)
    fit(module, plugin, BATCHES, **settings)
    return torch.cat([(a - b).flatten() for a, b in zip(weights(module), before, strict=True)])


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("grad", [1.0, torch.inf])
def test_c16_the_optimizers_own_step_is_refused_and_moves_nothing(level: str, grad: float) -> None:
    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        module.manual_backward(module.net(ONE).sum())
        optimizer.step()
        module.net.weight.grad.fill_(grad)
        before = weights(module)
        with pytest.raises(RuntimeError, match=r"called directly.*self\.optimizers\(\)"):
            optimizer.optimizer.step()
        assert torch.equal(weights(module)[0], before[0])

    assert run(step, sgd("net"), amp(level), net=linear(4.0)).net.weight.item() == 3.0


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("delay", [False, True])
def test_c19_three_passes_over_one_graph_at_three_scales(level: str, delay: bool) -> None:
    """Real, fake and penalty: each divided by its own scale; ``retain_graph`` reaches autograd as it is."""
    plugin = amp(level, num_losses=3, loss_scale="dynamic", init_scale=8.0, growth_interval=1)

    def step(module: Any, batch: Any, index: int) -> None:
        optimizer = module.optimizers()
        for k in range(3):
            for _ in range(2 * k):  # loss k has grown to 8 * 4 ** k
                module.manual_backward(module.net(ONE).sum(), loss_id=k)
        optimizer.zero_grad()
        out = module.net(ONE)
        for k in range(3):
            module.manual_backward((k + 1) * out.sum(), loss_id=k, retain_graph=k < 2, delay_unscale=delay and k < 2)
        with pytest.raises(RuntimeError, match="second time"):
            module.manual_backward(out.sum(), loss_id=0)
        assert module.net.weight.grad.item() == 6.0
        optimizer.step()

    assert run(step, sgd("net"), plugin, net=linear(8.0)).net.weight.item() == 2.0
    assert len(set(plugin.loss_scales().values())) == 3


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c23_a_sum_that_overflows_is_skipped_and_no_scale_is_to_blame(level: str) -> None:
    plugin = amp(level, loss_scale=1.0)
    each = 4e4 if level == "O3" else 3e38

    def step(module: Any, *_: Any) -> None:
        for _ in range(2):
            module.net.weight.grad = torch.full_like(
                module.net.weight, each, dtype=torch.float16 if level == "O3" else torch.float32
            ) + (0 if module.net.weight.grad is None else module.net.weight.grad)
        module.optimizers().step()
        assert plugin.outcome(module.optimizers()) is Outcome.SKIPPED

    assert run(step, sgd("net"), plugin, net=linear(8.0)).net.weight.item() == 8.0
    assert set(plugin.loss_scales().values()) <= {1.0}


@MODES
@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("fused", [False, True])
def test_c27_a_scheduler_moves_with_the_weights_alone(level: str, automatic: bool, fused: bool) -> None:
    def loss(module: Any, batch: Tensor, index: int) -> Tensor:
        return module.net(batch).float().square().mean() * (torch.inf if index in (1, 3) else 1.0)

    def optimizers(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), 0.5, fused=fused)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}]

    module = training(loss, automatic, optimizers, net=nn.Linear(8, 1))
    trainer = fit(module, amp(level), BATCHES)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5**6


FAULTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "NaN in the batch": lambda module, batch: module.net(batch * torch.nan).float().square().mean(),
    "forward overflow": lambda module, batch: (module.net(batch * 6e4) * 6e4).half().float().square().mean(),
    "log of zero": lambda module, batch: (module.net(batch).float() * 0.0).log().mean(),
}


@MODES
@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scale", [1.0, SCALE])
def test_c34_what_no_scale_can_cure_lowers_none_and_is_told(
    level: str, automatic: bool, fault: str, scale: float
) -> None:
    plugin = amp(level, loss_scale="dynamic", init_scale=scale)

    def loss(module: Any, batch: Tensor, index: int) -> Tensor:
        return FAULTS[fault](module, batch) if index == 2 else module.net(batch).float().square().mean()

    module = training(loss, automatic, net=nn.Linear(8, 1))
    trainer = fit(module, plugin, BATCHES)
    account = plugin.accounts()["optimizer_0"]
    assert (account.scale, account.overflows, account.nonfinite_losses) == (scale, 1, 1)
    assert plugin.engine.counts(trainer.optimizers[0])[Outcome.SKIPPED] == 1
    assert all(torch.isfinite(p).all() for p in module.parameters())


@MODES
@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c36_gradients_of_zero_raise_a_scale_to_its_bound_and_no_further(level: str, automatic: bool) -> None:
    plugin = amp(level, loss_scale="dynamic", init_scale=2.0**22, growth_interval=1)
    module = training(lambda m, batch, i: m.net(batch).float().mean() * 0.0, automatic, net=nn.Linear(8, 1))
    fit(module, plugin, BATCHES)
    assert plugin.loss_scales() == {"optimizer_0": 2.0**24}
    other = amp(level, loss_scale="dynamic", growth_interval=1, max_loss_scale=2.0**10)
    other.load_state_dict(plugin.state_dict())
    again = training(lambda m, batch, i: m.net(batch).float().mean() * 0.0, automatic, net=nn.Linear(8, 1))
    with pytest.warns(UserWarning, match="is outside 6.10352e-05 to 1024, it goes on from 1024"):
        fit(again, other, BATCHES)
    assert other.loss_scales() == {"optimizer_0": 2.0**10}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_c38_anomaly_mode_raises_at_a_first_overflow_and_not_at_a_low_scale(level: str) -> None:
    def module() -> Scripted:
        return training(lambda m, batch, i: m.net(batch).float().square().mean(), True, net=nn.Linear(8, 1))

    fit(module(), amp(level, init_scale=1.0), BATCHES, detect_anomaly=True)
    overflows = training(lambda m, batch, i: (m.net(m.net(batch)) * 64).square().mean(), True, net=nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match="returned nan values"):
        fit(overflows, amp(level, init_scale=2.0**24), BATCHES, detect_anomaly=True)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c45_an_adaptive_weight_of_tiny_gradients_is_that_of_float32(level: str) -> None:
    """The ratio of two norms on a last layer, each near 1e-7, where half has two digits or none."""

    def weight(plugin: Any) -> float:
        torch.manual_seed(0)
        found: list[float] = []

        def step(module: Any, batch: Tensor, *_: Any) -> None:
            out = module.net(batch)
            grad = torch.autograd.grad if plugin is None else plugin.grad
            losses = out.float().square().mean() * 3e-6, module.d(out).float().mean() * 1e-6
            norms = [grad(loss, module.net[2].weight, retain_graph=True)[0].norm() for loss in losses]
            found.append((norms[0] / norms[1]).item())
            module.manual_backward(losses[0] + found[0] * losses[1])

        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        module = Scripted(step, sgd("net"), net=net, d=nn.Linear(8, 1))
        fit(module, plugin, BATCHES[:1])
        return found[0]

    plugin = amp(level, loss_scale="dynamic")
    assert weight(plugin) == pytest.approx(weight(None), rel=2e-2 if level == "O3" else 5e-3)


class Normed(nn.Module):
    """Norms as modules, and one called as a function with a weight of the network's own."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = {"layer": nn.LayerNorm(8), "group": nn.GroupNorm(2, 8), "batch": nn.BatchNorm1d(8)}[norm]
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.last(nn.functional.layer_norm(x.to(self.scale.dtype), (8,), self.scale))


@MODES
@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("norm", ["layer", "group", "batch"])
def test_c53_norms_of_every_kind_train_as_in_float32(level: str, automatic: bool, norm: str) -> None:
    def build() -> Scripted:
        return training(lambda m, batch, i: (m.net(batch).float() - 1).square().mean(), automatic, net=Normed(norm))

    wanted, given = move(build, None), move(build, amp(level))
    assert (given - wanted).norm() <= 2 * tolerance(level) * wanted.norm()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_c59_a_norms_weight_moves_in_steps_too_small_for_half_at_o2(kind: Any) -> None:
    """Thousand steps of 1e-4 on a weight of one."""

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        for _ in range(1000):
            optimizer.zero_grad()
            module.manual_backward(module.net(ONE).sum())
            optimizer.step()

    def optimizers(module: Any) -> Any:
        return kind(module.parameters(), 1e-4, weight_decay=0.0)

    assert run(step, optimizers, amp("O2"), net=linear(1.0)).net.weight.item() == pytest.approx(0.9, abs=1e-3)
    if kind is torch.optim.SGD:
        assert run(step, optimizers, amp("O3"), net=linear(1.0)).net.weight.item() == 1.0


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("what", ["the module", "the networks"])
def test_c84_compiled_modules_are_toggled_and_trained_as_in_float32(level: str, what: str) -> None:
    def step(module: Any, batch: Tensor, index: int) -> None:
        for k, optimizer in enumerate(module.optimizers()):
            module.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            module.manual_backward((module.d(module.g(batch)).float() - k).square().mean())
            optimizer.step()
            module.untoggle_optimizer(optimizer)

    def train(plugin: Any) -> Tensor:
        torch.manual_seed(0)
        networks: dict[str, Any] = {
            "g": nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(True),
            "d": nn.Linear(8, 1),
        }
        networks["g"][0].requires_grad_(False)
        if what == "the networks":
            networks = {name: torch.compile(net, backend="eager") for name, net in networks.items()}
        module: Any = Scripted(step, sgd("g", "d", lr=0.05), **networks)
        before = weights(module)
        fit(torch.compile(module, backend="eager") if what == "the module" else module, plugin, BATCHES[:4])
        assert torch.equal(before[0], weights(module)[0]), "what was frozen for good"
        assert [p.requires_grad for p in module.parameters()][:2] == [False, False]
        assert plugin is None or not callable(vars(plugin).get("backward")), "as it was"
        return torch.cat([(a - b).flatten() for a, b in zip(weights(module), before, strict=True)])

    wanted, given = train(None), train(amp(level))
    assert (given - wanted).norm() <= tolerance(level) * wanted.norm()
