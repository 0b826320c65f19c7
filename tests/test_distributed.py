"""Two processes over gloo: gradients, scales, outcomes and masters agree with one FP32 process, and with each other."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from tests.helpers.clean_process import in_clean_process
from tests.helpers.modules import amp, fit

STEPS = 8
LEVELS = ["O1", "O2"]


def batch(rank: int, index: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * rank + index))


class Pair(pl.LightningModule):
    """Two networks and two optimizers; each rank reports its weights, scales and outcomes when training ends.

    Args:
        folder: Where the reports go.
        settings: ``window`` (backward passes a step), ``untoggled``, ``seed`` (a seed for each rank), ``bad`` (a step
            whose loss is infinite on the last rank).
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__()
        self.automatic_optimization = settings.get("automatic", False)
        torch.manual_seed(0)
        self.d = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.folder, self.settings = folder, settings

    def setup(self, stage: str) -> None:
        if self.settings.get("seed"):
            torch.manual_seed(self.global_rank)
            nn.init.normal_(self.d[0].weight)
            nn.init.normal_(self.g[0].weight)

    def losses(self, index: int) -> tuple[Tensor, Tensor]:
        rank, x = self.global_rank, batch(self.global_rank, index)
        bad = torch.inf if index == self.settings.get("bad") and rank == 1 else 1.0
        d = self.d(x).square().mean() * bad
        g = (self.d(self.g(x)) - 1).square().mean()
        return d, g

    def training_step(self, _: Any, index: int) -> Any:
        if self.automatic_optimization:
            return sum(self.losses(index))
        window = self.settings.get("window", 1)
        last = (index + 1) % window == 0
        for optimizer, which in zip(self.optimizers(), (0, 1), strict=True):
            if not self.settings.get("untoggled"):
                self.toggle_optimizer(optimizer)
            wrapped = self.trainer.strategy.model
            if hasattr(wrapped, "require_backward_grad_sync"):
                wrapped.require_backward_grad_sync = last
            self.manual_backward(self.losses(index)[which] / window)
            if not self.settings.get("untoggled"):
                self.untoggle_optimizer(optimizer)
            if last:
                self.clip_gradients(optimizer, 0.5)
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (self.d, self.g)]

    def on_train_end(self) -> None:
        plugin = self.trainer.precision_plugin
        report: dict[str, Any] = {"weights": [p.detach().float().clone() for p in self.parameters()]}
        if hasattr(plugin, "fp32_values"):
            report |= {
                "weights": [w.clone() for w in plugin.fp32_values(list(self.parameters()))],
                "scales": plugin.loss_scales(),
                "outcomes": [plugin.engine.counts(o) for o in self.trainer.optimizers],
            }
        torch.save(report, self.folder / f"{self.global_rank}.pt")


def fit_two(folder: Path, level: str | None, settings: dict[str, Any]) -> None:
    plugin = None if level is None else amp(level)
    unused = settings.get("untoggled") or not settings.get("automatic")
    strategy = DDPStrategy(
        start_method="fork",
        find_unused_parameters=bool(unused),
        gradient_as_bucket_view=settings.pop("bucket_view", False),
    )
    window = settings.pop("accumulate", 1)
    batches = [torch.zeros(1)] * STEPS
    fit(Pair(folder, **settings), plugin, batches, accumulate_grad_batches=window, devices=2, strategy=strategy)


def train(folder: Path, level: str | None, **settings: Any) -> list[dict[str, Any]]:
    """Trains on two processes, without the plugin if there is no level, and returns their reports."""
    in_clean_process(fit_two, folder, level, settings)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a["weights"], b["weights"], strict=True))
    assert {k: v for k, v in a.items() if k != "weights"} == {k: v for k, v in b.items() if k != "weights"}


def assert_near(a: dict[str, Any], b: dict[str, Any], tolerance: float = 4e-3) -> None:
    for x, y in zip(a["weights"], b["weights"], strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 4},
        {"window": 4, "bucket_view": True},
        {"window": 2, "untoggled": True},
        {"automatic": True, "accumulate": 3, "bucket_view": True},
    ],
    ids=lambda s: "-".join(s) or "plain",
)
def test_c86_c87_two_processes_train_as_one_in_fp32(tmp_path, level, settings):
    first, second = train(tmp_path, level, **settings)
    assert_same(first, second)
    # BatchNorm sees other batches in two processes than in one, so that FP32 trains on two as well.
    (tmp_path / "fp32").mkdir()
    reference, _ = train(tmp_path / "fp32", None, **settings)
    assert_near(first, reference)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("window", [1, 2])
def test_c86_an_overflow_on_one_rank_is_everybodys(tmp_path, level, window):
    first, second = train(tmp_path, level, bad=3, window=window)
    assert_same(first, second)
    assert [outcome["skipped"] for outcome in first["outcomes"]] == [1, 0]
    assert sorted(first["scales"].values()) == [512.0, 1024.0]


def test_c86_masters_of_differently_seeded_ranks_are_brought_in_line(tmp_path):
    first, second = train(tmp_path, "O2", seed=True)
    assert_same(first, second)
