"""Closures, tuners, overridden hooks, interruptions: whatever a loop does, as in FP32."""

from typing import Any

import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.modules import HALF_LEVELS, Batches, Scripted, amp, fit, trainer

BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]


def sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)


def loss_of(module: Any, batch: Tensor, i: int) -> Tensor:
    return module.net(batch).square().mean()


def build(step: Any = loss_of, *, automatic: bool = True, kind: type[Scripted] = Scripted) -> Scripted:
    torch.manual_seed(0)
    return kind(step, sgd, automatic=automatic, net=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def assert_alike(level: str, make: Any, **settings: Any) -> None:
    start, wanted, given = weights(make()), make(), make()
    fit(wanted, None, BATCHES, **settings)
    fit(given, amp(level), BATCHES, **settings)
    moved = (weights(wanted) - start).norm()
    assert moved > 0
    assert ((weights(given) - weights(wanted)).norm() / moved).item() < (3e-2 if level == "O3" else 3e-3)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_closure_handed_to_a_manual_step(level):
    seen: list[Any] = []

    def step(module: Any, batch: Tensor, i: int) -> None:
        optimizer = module.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(module, batch, i)
            module.manual_backward(loss)
            return loss

        seen.append(optimizer.step(closure))

    assert_alike(level, lambda: build(step, automatic=False))
    assert all(isinstance(value, Tensor) for value in seen)


class RunsTheClosureItself(Scripted):
    """Runs the closure in its own hook, looks at the gradients, then steps without it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norms: list[Tensor] = []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        self.norms.append(torch.stack([p.grad.float().norm() for p in self.parameters()]).norm())
        optimizer.step()


class WarmsUp(Scripted):
    """Changes the learning rate in its own hook."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (batch_idx + 1)
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("kind", [RunsTheClosureItself, WarmsUp])
@pytest.mark.parametrize("window", [1, 4])
def test_overridden_optimizer_steps(level, kind, window):
    made: list[Any] = []

    def make() -> Scripted:
        made.append(build(kind=kind))
        return made[-1]

    assert_alike(level, make, accumulate_grad_batches=window)
    if kind is RunsTheClosureItself:  # gradients are true already, also in the middle of a window's last batch
        wanted, given = (torch.stack(module.norms) for module in made[-2:])
        torch.testing.assert_close(given, wanted, rtol=3e-2 if level == "O3" else 5e-3, atol=1e-4)


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_batches_without_a_loss_anywhere_in_a_window(level, missing):
    def step(module: Any, batch: Tensor, i: int) -> Tensor | None:
        return None if i in missing else loss_of(module, batch, i)

    assert_alike(level, lambda: build(step), accumulate_grad_batches=3)


class Tunable(Scripted):
    """Has a learning rate and a batch size to tune."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lr, self.batch_size = 0.1, 2

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.cat(BATCHES * 8))
        return DataLoader(data, self.batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self, batch[0], batch_idx)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("what", ["lr_find", "scale_batch_size"])
def test_tuners_leave_no_trace(level, what, tmp_path):
    module = build(kind=Tunable)
    module._optimizers = lambda m: torch.optim.SGD(m.parameters(), lr=m.lr)
    before = weights(module).clone()
    plugin = amp(level)
    tuned = trainer(plugin, max_steps=30, max_epochs=-1, default_root_dir=tmp_path, enable_checkpointing=True)
    tuner = Tuner(tuned)
    if what == "lr_find":
        tuner.lr_find(module, num_training=10, update_attr=False)
    else:
        tuner.scale_batch_size(module, max_trials=2, steps_per_trial=2)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert torch.equal(weights(module), before)
    tuned.fit(module)
    assert not torch.equal(weights(module), before)


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("error", [RuntimeError("from the user"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_an_interrupted_training_leaves_fp32_weights_and_can_be_started_again(level, error):
    def step(module: Any, batch: Tensor, i: int) -> Tensor:
        if i == 3 and not getattr(module, "mended", False):
            raise error
        return loss_of(module, batch, i)

    module = build(step)
    plugin = amp(level)
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        fit(module, plugin, BATCHES)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert not module.net[0]._forward_pre_hooks
    module.mended = True
    before = weights(module).clone()
    fit(module, plugin, BATCHES)
    assert not torch.equal(weights(module), before)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_evaluation_between_fits_changes_nothing(level):
    class Evaluated(Scripted):
        def validation_step(self, batch: Any, i: int) -> None:
            assert torch.isfinite(loss_of(self, batch, i))

        test_step = validation_step

        def predict_step(self, batch: Any, i: int) -> Any:
            return self.net(batch)

    plain, looked_at = build(kind=Evaluated), build(kind=Evaluated)
    for module, looks in ((plain, False), (looked_at, True)):
        it = trainer(amp(level), max_epochs=1)
        if looks:
            it.validate(module, Batches(BATCHES), verbose=False)
            trainer(amp(level)).predict(module, Batches(BATCHES))
        it.fit(module, Batches(BATCHES))
        if looks:
            it.test(module, Batches(BATCHES), verbose=False)
    assert torch.equal(weights(plain), weights(looked_at))


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_anomaly_detection_may_be_on(level):
    assert_alike(level, build, detect_anomaly=True)
