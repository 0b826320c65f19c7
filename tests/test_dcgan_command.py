"""The DCGAN example's command: flags, YAML, Ctrl-C, and what it says."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.dcgan import __main__ as command
from examples.dcgan import flags, outputs
from examples.dcgan.module import DCGAN
from lightning_amp import AmpPrecision
from lightning_amp.callbacks import GradientClipping

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs" / "dcgan").glob("*.yaml"))
SMALL = ["--imageSize=16", "--ngf=2", "--ndf=2", "--nz=4", "--workers=0", "--niter=1"]
SMALL_FIT = ["--data.image_size=16", "--model.ngf=2", "--model.ndf=2", "--model.nz=4", "--data.workers=0"]
ONE_STEP = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.log_every_n_steps=1"]

Run = Callable[..., None]

pytestmark = pytest.mark.filterwarnings("ignore:Batch .* skipped a step")  # a scale that finds its height


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process."""

    def in_process(*args: str | Path) -> None:
        monkeypatch.setattr(sys, "argv", ["dcgan", *map(str, args)])
        command.main()

    return in_process


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[Trainer]:
    """Collects each trainer that fits."""
    seen: list[Trainer] = []
    fit = Trainer.fit

    @wraps(fit)
    def noted(self: Trainer, *args: Any, **kwargs: Any) -> None:
        seen.append(self)
        fit(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "fit", noted)
    return seen


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of 200 PNG files in two classes."""
    for i in range(200):
        file = tmp_path / "images" / f"class{i % 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24, 20), 30 + i).save(file)
    return tmp_path / "images"


@pytest.fixture
def _interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C in the third batch. A shell has it ignored by what it starts in the background, this test run say."""
    handler, step = signal.signal(signal.SIGINT, signal.default_int_handler), DCGAN.training_step

    def stopping(self: DCGAN, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            signal.raise_signal(signal.SIGINT)
        step(self, batch, batch_idx)

    monkeypatch.setattr(DCGAN, "training_step", stopping)
    yield
    signal.signal(signal.SIGINT, handler)


def plugin_of(trainer: Trainer) -> AmpPrecision:
    assert isinstance(trainer.precision_plugin, AmpPrecision)
    return trainer.precision_plugin


# Flags


def test_flags_have_the_names_and_defaults_of_the_script() -> None:
    defaults = {name: parameter.default for name, parameter in signature(flags.train).parameters.items()}
    assert defaults == {
        "dataset": "digits",
        "dataroot": "./",
        "workers": 2,
        "batchSize": 64,
        "imageSize": 64,
        "nz": 100,
        "ngf": 64,
        "ndf": 64,
        "niter": 25,
        "lr": 0.0002,
        "beta1": 0.5,
        "ngpu": 1,
        "netG": None,
        "netD": None,
        "outf": ".",
        "manualSeed": 2809,
        "classes": "bedroom",
        "opt_level": "O1",
        "loss_scale": None,
        "ckpt_path": None,
        "minutes": None,
    }


@pytest.mark.parametrize(
    ("given", "scale"), [([], None), (["--loss-scale", "128.0"], 128.0), (["--loss_scale=dynamic"], "dynamic")]
)
def test_flags_reach_the_training(given: list[str], scale: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(flags, "train", wraps(flags.train)(lambda **all_of_them: seen.update(all_of_them)))
    run("--batchSize", "8", "--opt_level", "O2", *given)
    assert (seen["batchSize"], seen["opt_level"], seen["loss_scale"]) == (8, "O2", scale)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_folder_of_pngs_trains_at_every_level(
    level: str, images: Path, tmp_path: Path, run: Run, trainers: list[Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    """One word switches the level; every file the closing lines name is there."""
    out = tmp_path / "out"
    run("--dataset", "folder", "--dataroot", images, "--batchSize", "16", "--outf", out, "--opt_level", level, *SMALL)
    assert plugin_of(trainers[0]).config.opt_level == level
    named = [Path(word) for word in re.findall(rf"{re.escape(str(out))}\S+", capsys.readouterr().out)]
    pictures = {"amp_fake_samples_epoch_000.png", "real_samples.png", "amp_report.html"}
    assert {path.name for path in named} >= {*pictures, "metrics.csv", "netG_epoch_0.pth", "last.ckpt"}
    assert all(path.exists() for path in named)
    assert (out / "netD_epoch_0.pth").exists()
    losses = {"d_real", "d_fake", "g"}
    scales = set() if level == "O0" else {"amp/scale/loss_2", "amp/skipped/optimizer_0", "amp/grad_norm/optimizer_1"}
    header, *rows = (out / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    assert losses | scales <= set(header.split(","))
    assert not re.search(r"\bnan\b", "".join(rows))
    (events,) = out.glob("tensorboard/*")
    board = EventAccumulator(str(events)).Reload()
    assert losses | scales <= set(board.Tags()["scalars"])
    assert {"amp_fake_samples", "real_samples"} <= set(board.Tags()["images"])


def test_static_scale_is_used(tmp_path: Path, run: Run, trainers: list[Trainer]) -> None:
    run("--loss-scale", "128", "--outf", tmp_path, *SMALL)
    assert plugin_of(trainers[0]).loss_scales() == {"loss_0": 128.0, "loss_1": 128.0, "loss_2": 128.0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--opt_level", "02"], "O2"),
        (["--dataset", "svhn"], "digits"),
        (["--imageSize", "40"], "image_size=40 .* Try 32 or 64"),
        (["--dataset", "folder", "--dataroot", "/gone"], "no folder '/gone'"),
        (["--netG", "/gone.pth"], "no file '/gone.pth'"),
    ],
)
def test_mistakes_get_a_sentence(
    given: list[str], words: str, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error or as the exit's text, with a failing status and no checkpoint of nothing."""
    with pytest.raises(SystemExit) as stop:
        run("--outf", tmp_path, *SMALL, *given)
    assert stop.value.code not in (0, None)
    assert re.search(words, str(stop.value.code) + capsys.readouterr().err)
    assert not (tmp_path / "checkpoints").exists()


def test_goes_on_from_weights_and_from_a_checkpoint(tmp_path: Path, run: Run, trainers: list[Trainer]) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    run("--outf", first, "--opt_level", "O2", *SMALL)
    networks = ["--netG", first / "netG_epoch_0.pth", "--netD", first / "netD_epoch_0.pth"]
    run("--outf", second, *networks, *SMALL, "--lr", "0")
    for name in ("netG", "netD"):
        saved, same = (torch.load(folder / f"{name}_epoch_0.pth", weights_only=True) for folder in (first, second))
        assert torch.equal(saved["main.0.weight"], same["main.0.weight"])
    run("--outf", third, "--ckpt_path", first / "checkpoints" / "last.ckpt", *SMALL, "--niter", "2")
    assert trainers[2].current_epoch == 2
    assert sorted(path.name for path in third.glob("netG*")) == ["netG_epoch_1.pth"]


@pytest.mark.usefixtures("_interrupted")
def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(
    tmp_path: Path, run: Run, trainers: list[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        run("--outf", tmp_path, "--opt_level", "O2", *SMALL)
    checkpoint = tmp_path / "checkpoints" / "interrupted.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4  # two optimizers, two batches
    assert "<b>2</b><span>batches</span>" in (tmp_path / "amp_report.html").read_text()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", [])
    done = flags.train(
        imageSize=16,
        ngf=2,
        ndf=2,
        nz=4,
        workers=0,
        niter=1,
        outf=str(tmp_path),
        opt_level="O2",
        ckpt_path=str(checkpoint),
    )
    assert done.global_step == 2 * 29


def test_minutes_end_a_training(tmp_path: Path, run: Run, trainers: list[Trainer]) -> None:
    run("--outf", tmp_path, *SMALL, "--niter", "100000", "--minutes", "0.02")
    assert 0 < trainers[0].global_step < 100000
    assert (tmp_path / "netG_epoch_0.pth").exists()


# YAML


def settings(config: Path) -> dict[str, Any]:
    """Returns what the file says of the plugin."""
    arguments: dict[str, Any] = yaml.safe_load(config.read_text())["trainer"]["plugins"]["init_args"]
    return arguments


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.stem != "ddp"], ids=lambda path: path.stem)
def test_every_config_trains_a_step(config: Path, tmp_path: Path, run: Run, trainers: list[Trainer]) -> None:
    run("fit", "--config", config, "--outf", tmp_path, *SMALL_FIT, *ONE_STEP)
    given, made = settings(config), plugin_of(trainers[0]).config
    assert made.opt_level == given["opt_level"]
    assert made.dtype == getattr(torch, given.get("dtype", "float16"))
    assert trainers[0].fit_loop.total_batch_idx == 1
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"netG_epoch_0.pth", "real_samples.png", "amp_fake_samples_epoch_000.png", "amp_report.html"}


def test_flags_and_configs_show_the_same(tmp_path: Path, run: Run, trainers: list[Trainer]) -> None:
    """What `outputs.views` makes is what the base names, argument for argument."""
    run("fit", "--outf", tmp_path, *SMALL_FIT, *ONE_STEP)
    by_config = trainers[0].callbacks[: len(outputs.views())]  # type: ignore[attr-defined]
    for made, named in zip(outputs.views(), by_config, strict=True):
        assert type(made) is type(named)
        options = [name for name in signature(type(made)).parameters if hasattr(made, name)]
        assert options
        assert {n: getattr(made, n) for n in options} == {n: getattr(named, n) for n in options}


def test_clipping_config_clips_each_network(tmp_path: Path, run: Run, trainers: list[Trainer]) -> None:
    """It adds to the base's callbacks, and leaves them."""
    run("fit", "--config", ROOT / "configs/dcgan/clipping.yaml", "--outf", tmp_path, *SMALL_FIT, *ONE_STEP)
    kinds = [type(callback) for callback in trainers[0].callbacks]  # type: ignore[attr-defined]
    clipping = trainers[0].callbacks[kinds.index(GradientClipping)]  # type: ignore[attr-defined]
    assert clipping.values == [1.0, 5.0]
    assert {type(callback) for callback in outputs.views()} < set(kinds)


def test_ddp_config_trains_a_step_in_two_processes(tmp_path: Path) -> None:
    """As a user starts it: the strategy starts the second process by running the same command."""
    config = ["--config", "configs/dcgan/ddp.yaml", "--trainer.accelerator=cpu", "--outf", str(tmp_path)]
    args = [sys.executable, "-m", "examples.dcgan", "fit", *config, *SMALL_FIT, *ONE_STEP]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "MEMBER: 2/2" in done.stderr
    assert done.stdout.count("Done: 1 epochs") == 1
    assert (tmp_path / "netG_epoch_0.pth").exists()


def test_no_experiment_is_missing() -> None:
    assert [config.stem for config in CONFIGS] == [
        "accumulation",
        "base",
        "clipping",
        "ddp",
        "o0",
        "o1",
        "o1_bf16",
        "o2",
        "o3",
        "scaler_for_all",
        "scaler_per_loss",
        "scaler_per_optimizer",
        "static_scale",
    ]


@pytest.mark.parametrize(
    ("name", "scales"), [("scaler_for_all", 1), ("scaler_per_optimizer", 2), ("scaler_per_loss", 3)]
)
def test_scalers_are_as_many_as_the_config_says(
    name: str, scales: int, tmp_path: Path, run: Run, trainers: list[Trainer]
) -> None:
    run("fit", "--config", f"{ROOT}/configs/dcgan/{name}.yaml", "--outf", tmp_path, *SMALL_FIT, *ONE_STEP)
    assert len(plugin_of(trainers[0]).loss_scales()) == scales


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_one_word_switches_the_level_of_a_config(level: str, tmp_path: Path, run: Run, trainers: list[Trainer]) -> None:
    config = ROOT / "configs" / "dcgan" / "o1.yaml"
    run("fit", "--config", config, "--opt_level", level, "--outf", tmp_path, *SMALL_FIT, *ONE_STEP)
    assert plugin_of(trainers[0]).config.opt_level == level


def test_level_without_the_plugin_is_refused(tmp_path: Path, run: Run) -> None:
    with pytest.raises(SystemExit, match=r"--opt_level O2 needs AmpPrecision among trainer.plugins"):
        run("fit", "--opt_level=O2", "--trainer.plugins=null", "--outf", tmp_path, *SMALL_FIT, *ONE_STEP)


def test_config_goes_on_from_a_checkpoint(tmp_path: Path, run: Run, trainers: list[Trainer]) -> None:
    fit = ["fit", "--config", ROOT / "configs" / "dcgan" / "o2.yaml", "--outf", tmp_path, *SMALL_FIT]
    run(*fit, *ONE_STEP)
    more = ["--trainer.max_epochs=2", "--trainer.limit_train_batches=2", "--trainer.log_every_n_steps=1"]
    run(*fit, *more, "--ckpt_path", tmp_path / "checkpoints" / "last.ckpt")
    assert trainers[1].global_step == 8
