"""Processes that the Trainer starts from this one: what they trained comes back to the module that was given."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.clean_process import in_clean_process
from tests.helpers.modules import amp, fit

STEPS = 4


class Actors(pl.LightningModule):
    """Two networks, two optimizers, one loss into both; each rank says in a file what it ends with.

    Args:
        folder: Where the files go.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.critic = nn.Linear(4, 1)
        self.folder = folder

    def training_step(self, _: Tensor, index: int) -> None:
        source = torch.Generator().manual_seed(10 * index + self.global_rank)
        bad = torch.inf if index == 1 and self.global_rank == 1 else 1.0
        self.manual_backward((self.critic(self.actor(torch.randn(4, 4, generator=source))) - 1).square().mean() * bad)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), 1e-2, eps=1e-4) for net in (self.actor, self.critic)]

    def on_train_end(self) -> None:
        plugin = self.trainer.precision_plugin
        report = {
            "weights": [w.clone() for w in plugin.fp32_values(list(self.parameters()))],
            "mean": self.actor[1].running_mean.float().clone(),
            "scales": plugin.loss_scales(),
            "outcomes": [dict(plugin.engine.counts(o)) for o in self.trainer.optimizers],
        }
        torch.save(report, self.folder / f"{self.global_rank}.pt")


def fit_two(folder: Path, strategy: str, level: str) -> None:
    module, plugin = Actors(folder), amp(level)
    fit(module, plugin, [torch.zeros(1)] * STEPS, devices=2, strategy=strategy)
    assert plugin.loss_scales() == {}, "the training was elsewhere, and nothing of it is left in this process"
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    torch.save(state, folder / "given.pt")


@pytest.mark.parametrize(
    ("strategy", "level"), [("ddp_spawn", "O2"), ("ddp_fork", "O1"), ("ddp_fork", "O2"), ("ddp_fork", "O3")]
)
def test_c86_what_other_processes_trained_comes_back_in_fp32(tmp_path: Path, strategy: str, level: str) -> None:
    in_clean_process(fit_two, tmp_path, strategy, level)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    assert {k: first[k] for k in ("scales", "outcomes")} == {k: second[k] for k in ("scales", "outcomes")}
    assert first["outcomes"] == [{"stepped": 3, "skipped": 1, "idle": 0}] * 2

    given: dict[str, Any] = torch.load(tmp_path / "given.pt", weights_only=True)
    names = [name for name, _ in Actors(tmp_path).named_parameters()]
    assert {v.dtype for v in given.values()} == {torch.float32, torch.int64}
    assert all(torch.equal(given[n], w) for n, w in zip(names, first["weights"], strict=True))
    assert torch.equal(given["actor.1.running_mean"], first["mean"])
    untrained = Actors(tmp_path).state_dict()
    assert not any(torch.equal(given[n], untrained[n]) for n in names)
