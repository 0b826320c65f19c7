"""Monitors, clipping, reports and grids: each through a Trainer."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_amp.callbacks import (
    AmpReport,
    EMAWeights,
    GradientClipping,
    ImageGrid,
    LossScaleMonitor,
    NonFiniteReport,
)
from tests.helpers.modules import LEVELS, SCALED_LEVELS, Scripted, amp, fit

BATCHES = [torch.full((2, 4), 1.0 + i) for i in range(6)]


def gan(bad: int | None = None, observe: Any = None) -> Scripted:
    """Two networks with BatchNorm in one, two optimizers, three losses; batch ``bad`` has an infinite second loss."""

    def step(module: Any, batch: torch.Tensor, i: int) -> None:
        named = (
            hasattr(module.trainer.precision_plugin, "config") and not module.trainer.precision_plugin.config.passive
        )
        ids = [{"loss_id": k} if named else {} for k in range(3)]
        first, second = module.optimizers()
        first.zero_grad()
        module.manual_backward(module.d(batch).square().mean(), **ids[0])
        fake = module.g(batch * (torch.inf if i == bad else 1.0))
        module.manual_backward(module.d(fake.detach()).square().mean(), **ids[1])
        first.step()
        second.zero_grad()
        module.manual_backward(module.d(module.g(batch)).mean(), **ids[2])
        if observe is not None:
            observe(module)
        second.step()

    torch.manual_seed(0)
    return Scripted(
        step,
        lambda m: [torch.optim.SGD(n.parameters(), lr=0.01) for n in (m.d, m.g)],
        d=nn.Linear(4, 1),
        g=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    )


@pytest.mark.parametrize("level", SCALED_LEVELS)
def test_c92_monitor_logs_scales_skips_and_true_norms_everywhere(tmp_path, level):
    norms: list[float] = []
    module = gan(bad=2, observe=lambda m: norms.append(torch.cat([p.grad.flatten() for p in m.g.parameters()]).norm()))
    logger = CSVLogger(tmp_path)
    plugin = amp(level, num_losses=3)
    trainer = fit(module, plugin, BATCHES, logger=logger, callbacks=[LossScaleMonitor(1)], log_every_n_steps=1)
    logger.save()
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    assert [float(r["amp/scale/loss_1"]) for r in rows] == [1024.0, 1024.0] + [1024.0] * 4  # its loss was infinite
    assert [float(r["amp/overflows/loss_1"]) for r in rows] == [0, 0, 1, 1, 1, 1]
    assert [float(r["amp/skipped/optimizer_0"]) for r in rows] == [0, 0, 1, 1, 1, 1]
    assert [float(r["amp/steps/optimizer_1"]) for r in rows] == [1, 2, 3, 4, 5, 6]
    given = torch.tensor([float(r["amp/grad_norm/optimizer_1"]) for r in rows])
    torch.testing.assert_close(given, torch.stack(norms), rtol=1e-4, atol=1e-6)
    assert trainer.callback_metrics["amp/skipped/optimizer_0"] == 1
    assert {"scale", "skipped"} <= trainer.progress_bar_metrics.keys()


def test_monitor_is_silent_at_o0_and_between_its_batches(tmp_path):
    for level, expected in (("O0", 0), ("O1", 1)):
        logger = CSVLogger(tmp_path, name=level)
        fit(gan(), amp(level, num_losses=3), BATCHES, logger=logger, callbacks=[LossScaleMonitor(4)])
        logger.save()
        file = Path(logger.log_dir) / "metrics.csv"
        assert (file.read_text().count("\n") - 1 if file.exists() else 0) == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_c06_each_optimizer_is_clipped_by_its_own_bound_in_manual_optimization(level, algorithm):
    module = gan()
    start = {n: p.detach().double().clone() for n, p in module.named_parameters()}
    fit(module, amp(level, num_losses=3), BATCHES[:1], callbacks=[GradientClipping([1e-2, None], algorithm)])
    moved = torch.cat([(p.detach().double() - start[n]).flatten() for n, p in module.d.named_parameters("d")])
    bound = 0.01 * 1e-2
    size = moved.norm() if algorithm == "norm" else moved.abs().max()
    tolerance = 0.5 if level == "O3" else 1e-3  # a half weight rounds a step this small
    assert size.item() == pytest.approx(bound, rel=tolerance) or (level == "O3" and size <= bound * 2)


def test_clip_values_are_checked():
    with pytest.raises(ValueError, match="3 values for 2 optimizers"):
        fit(gan(), amp("O1", num_losses=3), BATCHES, callbacks=[GradientClipping([1.0, 1.0, 1.0])])
    with pytest.raises(ValueError, match="clip value of -1"):
        GradientClipping(-1)
    with pytest.raises(ValueError, match="'l2' is unknown"):
        GradientClipping(1.0, "l2")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Batch 2")
@pytest.mark.parametrize("level", SCALED_LEVELS)
def test_c34_c40_report_names_loss_parameter_buffers_and_module_and_leaves_no_trace(level):
    report = NonFiniteReport(locate=True, restore_buffers=True)
    module = gan(bad=2)
    plugin = amp(level, num_losses=3)
    trainer = fit(module, plugin, BATCHES, callbacks=[report])
    (text,) = report.reports
    assert "Batch 2: optimizer 0 skipped" in text
    assert "loss_1 overflowed" in text
    assert "d.weight" in text
    assert "the loss itself was non-finite" in text
    assert "Non-finite buffers: g.1.running_mean" in text
    assert re.search(r"first non-finite output came from g\.0 \(Linear\), whose input was non-finite already", text)
    assert all(torch.isfinite(b).all() for b in module.buffers())
    plain = gan(bad=2)
    fit(plain, amp(level, num_losses=3), BATCHES, callbacks=[])
    assert trainer.global_step == 12
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_image_grid_draws_and_changes_nothing(tmp_path, level):
    class Painter(nn.Sequential):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return super().forward(z).view(-1, 1, 2, 2)

    def build() -> Scripted:
        torch.manual_seed(0)
        return Scripted(
            lambda m, b, i: m.paint(b).square().mean(),
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            automatic=True,
            paint=Painter(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Tanh()),
        )

    grid = ImageGrid([4], generator="paint", folder=str(tmp_path), every_n_batches=4, count=9)
    watched = build()
    fit(watched, amp(level), BATCHES, callbacks=[EMAWeights(0.9), grid])
    plain = build()
    fit(plain, amp(level), BATCHES, callbacks=[EMAWeights(0.9)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["samples_000004.png", "samples_000006.png"]
    for (name, a), b in zip(watched.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert watched.paint.training


def test_image_grid_names_the_children_there_are():
    with pytest.raises(ValueError, match=r"generator='netX'; the module's children are d, g"):
        fit(gan(), amp("O1", num_losses=3), BATCHES, callbacks=[ImageGrid([4], generator="netX")])


@pytest.mark.parametrize("level", LEVELS)
def test_report_is_one_self_contained_page(tmp_path, level):
    file = tmp_path / "deep" / "report.html"
    bad = None if level in ("O0", "O3") else 2
    fit(gan(bad), amp(level, num_losses=3), BATCHES, callbacks=[AmpReport(str(file))])
    page = file.read_text()
    assert f"opt level {level}" in page or level == "O0"
    assert not re.search(r'(src|href)="(?!data:)', page)
    if bad is not None:
        assert "data:image/png;base64," in page
        assert re.search(r"<td>loss_1</td><td>6</td><td>1</td><td>16.67%</td><td>1</td>", page)
        assert re.search(r"<td>optimizer 0</td><td>5</td><td>1</td><td>0</td>", page)
    assert re.search(r"<td>d</td><td>Linear</td><td>float(32|16)</td>", page)
