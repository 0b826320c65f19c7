"""Monitors, clipping, reports and grids: each through a Trainer."""

import csv
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_amp.callbacks import (
    AmpReport,
    EMAWeights,
    GradientClipping,
    ImageGrid,
    LossScaleMonitor,
    NonFiniteReport,
)
from tests.helpers.modules import LEVELS, SCALED_LEVELS, Batches, Scripted, amp, fit, trainer

BATCHES = [torch.full((2, 4), 1.0 + i) for i in range(6)]


class Noting(Callback):
    """Calls a function after each batch."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._function(trainer)


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


class Reads(TorchDispatchMode):  # type: ignore[misc]
    """Counts the host's reads: of single values, and of whole lists."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.lists = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.items += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", SCALED_LEVELS)
def test_monitor_reads_once_in_a_logged_batch_and_never_between(level, monkeypatch):
    reads, tolist = Reads(), torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        reads.lists += 1
        return tolist(tensor)

    class Watched(LossScaleMonitor):
        def on_before_optimizer_step(self, *args: Any) -> None:
            with reads:
                super().on_before_optimizer_step(*args)

        def on_train_batch_end(self, *args: Any) -> None:
            with reads, pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", counted)
                super().on_train_batch_end(*args)

    fit(gan(), amp(level, num_losses=3), BATCHES, callbacks=[Watched(3)])
    assert (reads.items, reads.lists) == (0, 2)


def test_monitor_goes_by_batches_of_the_whole_training(tmp_path):
    """Also after resuming: every fourth batch, wherever a checkpoint cut in."""
    logged: list[int] = []

    class Noted(LossScaleMonitor):
        def _send(self, trainer: Any, *args: Any) -> None:
            logged.append(trainer.fit_loop.total_batch_idx + 1)

    first = fit(gan(), amp("O1", num_losses=3), BATCHES, callbacks=[Noted(4)])
    first.save_checkpoint(tmp_path / "x.ckpt")
    second = trainer(amp("O1", num_losses=3), max_epochs=3, callbacks=[Noted(4)])
    second.fit(gan(), Batches(BATCHES), ckpt_path=tmp_path / "x.ckpt")
    assert logged == [4, 8, 12, 16]


@pytest.mark.parametrize("level", [*LEVELS, None])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_c06_each_optimizer_is_clipped_by_its_own_bound_in_manual_optimization(level, algorithm):
    module = gan()
    start = {n: p.detach().double().clone() for n, p in module.named_parameters()}
    plugin = None if level is None else amp(level, num_losses=3)
    fit(module, plugin, BATCHES[:1], callbacks=[GradientClipping([1e-2, None], algorithm)])
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
    with pytest.raises(ValueError, match=r"clip value of '1\.0'"):
        GradientClipping("1.0")  # type: ignore[arg-type]
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


@pytest.mark.filterwarnings("ignore:Batch")
@pytest.mark.parametrize("level", SCALED_LEVELS)
def test_report_runs_the_batch_again_with_the_same_random_numbers_and_spends_none(level):
    def train(callbacks: list[Any]) -> list[float]:
        drawn: list[float] = []

        def step(module: Any, batch: torch.Tensor) -> torch.Tensor:  # Lightning allows a step without the index
            drawn.append(torch.rand(()).item())
            return module.d(batch * (torch.inf if len(drawn) == 3 else 1.0)).mean()

        module = Scripted(
            lambda *_: None, lambda m: torch.optim.SGD(m.parameters(), 0.1), automatic=True, d=nn.Linear(4, 1)
        )
        module.training_step = lambda batch: step(module, batch)  # type: ignore[method-assign]
        torch.manual_seed(5)
        fit(module, amp(level), BATCHES, callbacks=[Noting(lambda _: torch.rand(())), *callbacks])
        return drawn

    drawn, plain = train([NonFiniteReport(locate=True)]), train([])
    assert drawn == [*plain[:3], plain[2], *plain[3:]]


@pytest.mark.filterwarnings("ignore:Batch")
def test_reports_end_at_the_limit_and_the_last_says_so():
    report = NonFiniteReport(limit=2)
    module = Scripted(
        lambda m, b, i: (m.d(b) * torch.inf).mean(),
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        automatic=True,
        d=nn.Linear(4, 1),
    )
    fit(module, amp("O1"), BATCHES, callbacks=[report])
    first, second = report.reports
    assert "limit" not in first
    assert "A few of these are normal while a dynamic scale settles." in first
    assert "are normal" not in second
    assert "report 2 of limit=2; later skips are only counted" in second


@pytest.mark.filterwarnings("ignore:Batch")
@pytest.mark.parametrize("level", SCALED_LEVELS)
def test_a_finite_forward_pass_is_told_from_an_overflow_in_the_backward_pass(level):
    report = NonFiniteReport(locate=True)
    fit(gan(), amp(level, num_losses=3, init_scale=2.0**24), BATCHES[:1], callbacks=[report])
    assert "every module's output was finite: the overflow is in the backward pass." in report.reports[0]


def painter() -> Scripted:
    """A generator of 2x2 images from four numbers, trained by Lightning itself."""
    torch.manual_seed(0)
    layers = (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Tanh(), nn.Unflatten(1, (1, 2, 2)))
    return Scripted(
        lambda m, b, i: m.paint(b).square().mean(),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
        automatic=True,
        paint=nn.Sequential(*layers),
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("averaged", [False, True])
def test_image_grid_shows_the_averages_where_there_are_some(tmp_path, level, averaged):
    module, ema = painter(), EMAWeights(0.9)
    grid = ImageGrid([4], generator="paint", folder=str(tmp_path), count=1, file="last.png", seed=3)
    fit(module, amp(level), torch.randn(6, 4, 4), callbacks=[*([ema] if averaged else []), grid])
    if averaged:
        assert not torch.equal(ema.averages()["paint.0.weight"], module.paint[0].weight)
        module.load_state_dict({**module.state_dict(), **ema.averages()})
    with torch.no_grad():
        image = module.paint.eval()(torch.randn(1, 4, generator=torch.Generator().manual_seed(3)))
    drawn = torch.tensor(list(Image.open(tmp_path / "last.png").convert("L").tobytes()))
    expected = ((image[0, 0] + 1) * 127.5).flatten()
    assert expected.max() - expected.min() > 20
    assert (drawn - expected).abs().max() < 1.5


def test_image_grid_takes_the_noise_from_the_example_and_shows_the_first_batch(tmp_path):
    module = painter()
    module.example_input_array = torch.zeros(1, 4)
    grid = ImageGrid(generator="paint", folder="pictures", count=4, file="{name}_{epoch}.png", real="real")
    images = [batch.view(2, 1, 2, 2) / 10 for batch in BATCHES]
    module._step = lambda m, b, i: m.paint(b.flatten(1)).square().mean()
    fit(module, amp("O2"), images, callbacks=[grid], max_epochs=2, default_root_dir=tmp_path)
    assert sorted(p.name for p in (tmp_path / "pictures").iterdir()) == ["real.png", "samples_0.png", "samples_1.png"]
    real = torch.tensor(list(Image.open(tmp_path / "pictures" / "real.png").convert("L").tobytes()))
    assert (real.view(6, 10)[2:4, 2:4] - (0.1 + 1) * 127.5).abs().max() < 1.5


def test_image_grid_says_what_it_cannot_use(monkeypatch):
    with pytest.raises(ValueError, match=r"In braces may stand name, batch and epoch"):
        ImageGrid([4], file="{step}.png")
    with pytest.raises(ValueError, match=r"no noise_shape, and the module's example_input_array is no tensor"):
        fit(painter(), amp("O1"), BATCHES, callbacks=[ImageGrid(generator="paint")])


@pytest.mark.parametrize(
    ("package", "callback"), [("torchvision", ImageGrid([4], generator="paint")), ("matplotlib", AmpReport())]
)
def test_a_missing_package_is_named_before_training(package, callback, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"draws with {package}, which is not installed. Try pip install"):
        fit(painter(), amp("O1"), BATCHES, callbacks=[callback])


@pytest.mark.parametrize("level", LEVELS)
def test_image_grid_draws_and_changes_nothing(tmp_path, level):
    grid = ImageGrid([4], generator="paint", folder=str(tmp_path), every_n_batches=4, count=9)
    watched = painter()
    fit(watched, amp(level), BATCHES, callbacks=[EMAWeights(0.9), grid])
    plain = painter()
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
    assert f"opt level {level}" in page
    assert f"<b>{level if level == 'O0' else f'{level} float16'}</b><span>level</span>" in page
    assert "<b>6</b><span>batches</span>" in page
    assert re.search(r"<b>[\d.]+ ms</b><span>median batch time</span>", page)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("data:image/png;base64,") == (1 if level == "O0" else 2)
    if bad is not None:
        assert re.search(r"<td>loss_1</td><td>6</td><td>1</td><td>16.67%</td><td>1</td><td>2¹⁰</td>", page)
        assert re.search(r"<td>optimizer 0 \(d\)</td><td>5</td><td>1</td><td>0</td>", page)


@pytest.mark.parametrize(
    ("level", "rows"),
    [
        ("O0", ["Linear float32 float32 float32 2 d, g.0", "BatchNorm1d float32 float32 float32 1 g.1"]),
        ("O1", ["Linear float32 float32 float16 2 d, g.0", "BatchNorm1d float32 float16 float16 1 g.1"]),
        ("O2", ["Linear float16 float16 float32 1 d", "BatchNorm1d float32 float16 float16 1 g.1"]),
        ("O3", ["Linear float16 float16 float16 1 g.0", "BatchNorm1d float16 float16 float16 1 g.1"]),
    ],
)
def test_report_says_what_ran_in_which_dtype(tmp_path, level, rows):
    fit(gan(), amp(level, num_losses=3), BATCHES, callbacks=[AmpReport(str(tmp_path / "report.html"))])
    page = (tmp_path / "report.html").read_text()
    for row in rows:
        *cells, which = row.split(" ", 5)
        assert "".join(f"<td>{cell}</td>" for cell in [*cells, which]) in page


def test_report_notes_where_scales_changed_and_passes_overflowed(tmp_path):
    """From 2^20 on in float16, whose largest number is below 2^16: overflows until the scale fits, then growth."""
    report = AmpReport(str(tmp_path / "report.html"))
    plugin = amp("O1", init_scale=2.0**20, growth_interval=3)
    module = Scripted(
        lambda m, b, i: m.d(b).mean(), lambda m: torch.optim.SGD(m.parameters(), 0.0), automatic=True, d=nn.Linear(4, 1)
    )
    seen: list[float] = []
    scales = Noting(lambda trainer: seen.append(next(iter(plugin.loss_scales().values()))))
    fit(module, plugin, [torch.ones(2, 4)] * 12, callbacks=[report, scales])
    ((name, points),) = report._record.scales.items()
    before = [2.0**20, *seen]
    assert points == [(0, 2.0**20)] + [(i + 1, s) for i, s in enumerate(seen) if s != before[i]]
    falls = [(i + 1, before[i]) for i, s in enumerate(seen) if s < before[i]]
    assert report._record.overflows[name] == falls
    assert len(falls) > 3
    assert max(seen[len(falls) :]) > min(seen)


def test_report_of_a_resumed_training_counts_on(tmp_path):
    first = fit(gan(), amp("O1", num_losses=3), BATCHES, callbacks=[])
    first.save_checkpoint(tmp_path / "x.ckpt")
    report = AmpReport(str(tmp_path / "report.html"))
    second = trainer(amp("O1", num_losses=3), max_epochs=2, callbacks=[report])
    second.fit(gan(), Batches(BATCHES), ckpt_path=tmp_path / "x.ckpt")
    assert report._record.scales["loss_0"] == [(7, 1024.0)]
    assert report._record.batches == 12
    page = (tmp_path / "report.html").read_text()
    assert "<b>6</b><span>batches</span>" in page
    assert "<td>loss_0</td><td>12</td><td>0</td>" in page


def test_report_samples_the_share_of_zero_gradients(tmp_path):
    report = AmpReport(str(tmp_path / "report.html"))
    module = Scripted(
        lambda m, b, i: m.d(torch.tensor([[1.0, 2.0, 3.0, 0.0]])).mean(),
        lambda m: torch.optim.SGD(m.parameters(), 0.1),
        automatic=True,
        d=nn.Linear(4, 1),
    )
    fit(module, amp("O0"), [torch.ones(1)] * 21, callbacks=[report])
    assert report._record.zeros == {"optimizer 0 (d)": [(1, 0.2), (21, 0.2)]}


def test_report_that_sees_no_batch_writes_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fit(gan(observe=lambda m: 1 / 0), amp("O1", num_losses=3), BATCHES, callbacks=[AmpReport(str(tmp_path / "r"))])
    assert not (tmp_path / "r").exists()
