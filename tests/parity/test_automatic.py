"""Automatic optimization at every level against plain Lightning: windows of every kind, clipping, fused and not."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.helpers.modules import SCALE, Scripted, amp, fit, same, watch_steps, weights

BATCHES = 11
NONES = {
    "none": (),
    "first of a window": (4, 8),
    "middle": (1, 6),
    "last": (3, 10),
    "two in a row": (3, 4),
    "all": (4, 5, 6, 7),
}
GRADIENT = {"float16": 0.01, "bfloat16": 0.05}
"""How far, relative to its norm, the gradient of a raw step may be from plain Lightning's."""


@cache
def batches() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, generator=random) for _ in range(BATCHES)]


def train(
    plugin: Any, nones: tuple[int, ...] = (), fused: bool = False, **settings: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Trains two epochs; returns the whole gradient of every raw step that had one, and the final weights."""
    seen: list[list[list[Tensor | None]]] = []

    def step(module: Any, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx in nones else 4 * mse_loss(module.net(batch), batch[:, :2].sin())

    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.5, fused=fused)
        seen.append(watch_steps(optimizer))
        return optimizer

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    fit(Scripted(step, make, automatic=True, net=net), plugin, batches(), max_epochs=2, **settings)
    whole = [torch.cat([g.flatten() for g in grads if g is not None]) for grads in seen[0] if grads[0] is not None]
    return whole, weights(net)


def assert_parity(plugin: Any, dtype: str = "float16", **how: Any) -> None:
    ours, plain = train(plugin, **how), train(None, **how)
    assert len(ours[0]) == len(plain[0])
    for a, b in zip(ours[0], plain[0], strict=True):
        assert (a - b).norm() <= GRADIENT[dtype] * b.norm()
    for a, b in zip(ours[1], plain[1], strict=True):
        assert a.dtype is torch.float32
        assert (a - b).norm() <= GRADIENT[dtype] * b.norm()


LEVELS = [("O1", "float16"), ("O2", "float16"), ("O3", "float16"), ("O1", "bfloat16"), ("O2", "bfloat16")]


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("nones", NONES.values(), ids=NONES)
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_windows_of_four_with_a_short_last_one(level: str, dtype: str, nones: tuple[int, ...], fused: bool) -> None:
    """Eleven batches: 4 + 4 + 3. A batch without a loss counts in its window, wherever it stands."""
    plugin = amp(level, dtype=dtype, loss_scale=SCALE)
    assert_parity(plugin, dtype, nones=nones, fused=fused, accumulate_grad_batches=4)


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.25), ("value", 0.05), ("norm", 100.0)])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("window", [1, 4])
def test_gradient_clip_val(level: str, dtype: str, algorithm: str, value: float, fused: bool, window: int) -> None:
    clip = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    plugin = amp(level, dtype=dtype, loss_scale=SCALE)
    assert_parity(plugin, dtype, fused=fused, accumulate_grad_batches=window, **clip)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_growing_scale_changes_nothing_in_a_window(level: str) -> None:
    """It grows with every pass, or every window; powers of two leave the half values as they are."""
    plugin = amp(level, growth_interval=1, init_scale=2.0, max_loss_scale=SCALE)
    grows, stays = (
        train(plugin, accumulate_grad_batches=4),
        train(amp(level, loss_scale=SCALE), accumulate_grad_batches=4),
    )
    assert set(plugin.loss_scales().values()) == {2.0 * 2.0 ** (6 if level == "O1" else 9)}
    for a, b in zip(grows[0] + grows[1], stays[0] + stays[1], strict=True):
        assert (a - b).norm() <= 0.005 * b.norm()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("where", [0, 1, 3], ids=["first", "middle", "last"])
def test_a_bad_micro_batch_loses_its_window_alone(level: str, where: int) -> None:
    """Which is then as if that window had not been there; the next one is whole."""
    plugin = amp(level, loss_scale=SCALE)
    clean = [torch.ones(6, 4) * k for k in (1.0, 2.0, 3.0, 4.0)]
    bad = list(clean)
    bad[where] = torch.full((6, 4), torch.inf)

    def train_on(data: list[Tensor], plugin: Any) -> list[Tensor]:
        torch.manual_seed(0)
        module = Scripted(
            lambda m, batch, i: m.net(batch).float().square().mean() / 64,
            lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.5),
            automatic=True,
            net=nn.Linear(4, 1),
        )
        fit(module, plugin, data, accumulate_grad_batches=4)
        return weights(module)

    assert same(train_on(bad + clean, plugin), train_on(clean, amp(level, loss_scale=SCALE)))
