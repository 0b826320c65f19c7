"""A training's ends and repetitions: evaluation around fit, checkpoints, several fits with one plugin."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.helpers.modules import (
    HALF_LEVELS,
    LEVELS,
    Batches,
    Scripted,
    amp,
    fit,
    linear,
    run,
    same,
    sgd,
    trainer,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no .val_dataloader")

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)


class Evaluated(Scripted):
    """Trains automatically; notes the dtypes it meets in every kind of evaluation."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        super().__init__(lambda m, *_: mse_loss(m.net(X), X[:, :2]), adam, automatic=True, net=net)
        self.met: list[tuple[str, torch.dtype, torch.dtype]] = []

    def note(self, kind: str) -> Tensor:
        inner: list[torch.dtype] = []
        handle = self.net[0].register_forward_hook(lambda m, args, out: inner.append(out.dtype))
        out = self.net(X)
        handle.remove()
        self.met.append((kind, self.net[0].weight.dtype, inner[0]))
        return out

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validate")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.note("predict").float()


def adam(module: Any) -> Any:
    return torch.optim.Adam(module.parameters(), 0.05, eps=1e-4)


def float_state(module: nn.Module) -> list[Tensor]:
    return [v.clone() for v in module.state_dict().values() if v.is_floating_point()]


@pytest.mark.parametrize("level", LEVELS)
def test_evaluation_before_and_after_fit_runs_at_the_level(level: str) -> None:
    """One Trainer, one plugin: each run converts the module for itself and gives it back unchanged, in float32."""
    module, it, one = Evaluated(), trainer(amp(level)), Batches([0])
    start = float_state(module)
    for evaluate in (it.validate, it.test, it.predict):
        evaluate(module, one)
        assert same(float_state(module), start)
    it.fit(module, Batches([0] * 3), one)
    trained = float_state(module)
    assert {t.dtype for t in trained} == {torch.float32}
    assert not same(trained, start)
    for evaluate in (it.validate, it.test, it.predict):
        evaluate(module, one)
        assert same(float_state(module), trained)
    half, wide = torch.float16, torch.float32
    expected = {"O0": (wide, wide), "O1": (wide, half), "O2": (half, half), "O3": (half, half)}[level]
    assert {(weight, out) for _, weight, out in module.met} == {expected}
    assert [kind for kind, *_ in module.met].count("validate") == 4  # the sanity check and the epoch's are two of them


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_evaluation_results_are_near_float32(level: str) -> None:
    torch.manual_seed(0)
    module = Evaluated()
    (ours,), (plain,) = (trainer(p).predict(module, Batches([0])) for p in (amp(level), None))  # type: ignore[misc]
    assert (ours - plain).norm() <= 0.01 * plain.norm()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("trainers", [1, 2])
def test_fit_twice_is_fit_for_longer(level: str, trainers: int) -> None:
    """Plain SGD has no state to lose: two fits of three batches end where one of six does, to the last master bit."""

    def module() -> Scripted:
        torch.manual_seed(0)
        return Scripted(
            lambda m, *_: mse_loss(m.net(X), X[:, :2]), sgd("net", lr=0.5), automatic=True, net=nn.Linear(4, 2)
        )

    once, twice = module(), module()
    fit(once, amp(level), [0] * 6)
    plugin = amp(level)
    it = trainer(plugin)
    it.fit(twice, Batches([0] * 3))
    if trainers == 1:
        it.fit_loop.max_epochs = 2
    else:
        it = trainer(plugin)
    it.fit(twice, Batches([0] * 3))
    if level == "O3":  # without masters the second fit starts from rounded weights
        assert all((a - b).abs().max() < 2e-3 for a, b in zip(weights(once), weights(twice), strict=True))
    else:
        assert same(weights(once), weights(twice))


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_scales_and_outcomes_outlive_a_fit(level: str) -> None:
    plugin = amp(level, loss_scale="dynamic", growth_interval=3)
    module = Evaluated()
    it = fit(module, plugin, [0] * 4)
    assert plugin.loss_scales() == {"optimizer_0": 2048.0}
    it.fit_loop.max_epochs = 2
    it.fit(module, Batches([0] * 4))
    assert plugin.loss_scales() == {"optimizer_0": 4096.0}


@pytest.mark.parametrize("first", LEVELS)
@pytest.mark.parametrize("second", LEVELS)
def test_a_fit_at_one_level_then_at_another(first: str, second: str) -> None:
    """The second fit finds a plain float32 module, Adam's state and gradients in the dtype that its level asks for."""
    module = Evaluated()
    fit(module, amp(first), [0] * 2)
    it = fit(module, amp(second), [0] * 2)
    states = [v for state in it.optimizers[0].state.values() for v in state.values() if v.dim()]
    assert {v.dtype for v in states} == {torch.float16 if second == "O3" else torch.float32}
    assert {t.dtype for t in float_state(module)} == {torch.float32}


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_one_plugin_another_module(level: str) -> None:
    def step(module: Any, *_: Any) -> None:
        module.manual_backward(module.net(torch.ones(1, 1)).sum())
        module.optimizers().step()

    plugin = amp(level)
    for start in (4.0, 16.0):
        assert run(step, sgd("net"), plugin, net=linear(start)).net.weight.item() == start - 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoints_are_float32_at_every_moment(level: str, weights_only: bool, tmp_path: Path) -> None:
    """Saved by hand between steps, by a callback, and by hand after fit; each opens without this package."""
    module = Evaluated()
    plain = Evaluated()
    module.on_train_batch_end = lambda *_: module.trainer.save_checkpoint(  # type: ignore[method-assign]
        tmp_path / "step.ckpt", weights_only=weights_only
    )
    callback = ModelCheckpoint(tmp_path, "end", save_weights_only=weights_only, save_on_train_epoch_end=True)
    it = trainer(amp(level), enable_checkpointing=True, callbacks=[callback])
    it.fit(module, Batches([0] * 3))
    it.save_checkpoint(tmp_path / "after.ckpt", weights_only=weights_only)
    for name in ("step", "end", "after"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert {v.dtype for v in saved["state_dict"].values() if v.is_floating_point()} == {torch.float32}
        plain.load_state_dict(saved["state_dict"], strict=True)
        if level != "O3":
            assert same(float_state(plain), float_state(module)), name
        assert ("optimizer_states" in saved) is not weights_only


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_saved_o2_weight_is_the_master_and_not_its_rounding(level: str) -> None:
    plugin = amp(level)
    saved: list[Tensor] = []

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        module.manual_backward(module.net(torch.ones(1, 1)).sum())
        optimizer.step()
        with plugin.masters(optimizer):
            saved.append(optimizer.param_groups[0]["params"][0].detach().clone())
        saved.append(module.state_dict()["net.weight"])
        saved.append(module.net.state_dict()["weight"])

    run(step, sgd("net", lr=2.0**-14), plugin, net=linear(1.0))
    assert [t.item() for t in saved] == [1 - 2.0**-14] * 3
