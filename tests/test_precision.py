"""The plugin as the Trainer and its user meet it: construction, what it calls itself, what it says, what it refuses."""

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import AsyncCheckpointIO, HalfPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_amp import AmpConfigError, AmpPrecision, trainer_kwargs
from tests.helpers.modules import HALF_LEVELS, LEVELS, SCALE, Batches, Scripted, amp, fit, linear, run, sgd, trainer


def mean_step(module: Scripted, batch: Any, _: int) -> None:
    """One backward pass and one step of the first optimizer, on the child ``net``."""
    optimizers = module.optimizers()
    optimizer = optimizers[0] if isinstance(optimizers, list) else optimizers
    optimizer.zero_grad()
    module.manual_backward(module.net(torch.ones(2, 3)).mean())
    optimizer.step()


def mean_module(**networks: nn.Module) -> Scripted:
    return Scripted(mean_step, sgd("net"), **{"net": linear(1.0, 2.0, 3.0), **networks})


# What it calls itself


@pytest.mark.parametrize(
    ("level", "dtype", "name"),
    [
        ("O0", "float16", "32-true"),
        ("O1", "float16", "16-mixed"),
        ("O1", "bfloat16", "bf16-mixed"),
        ("O2", "float16", "16-true"),
        ("O3", "bfloat16", "bf16-true"),
    ],
)
def test_trainer_precision_reads_sensibly(level: str, dtype: str, name: str) -> None:
    assert trainer(amp(level, dtype=dtype)).precision == name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_model_summary_does_not_warn(level: str, dtype: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(mean_module(), amp(level, dtype=dtype), enable_model_summary=True)
    assert not [w.message for w in caught if "model summary" in str(w.message)]


@pytest.mark.parametrize("plugins", [lambda p: p, lambda p: [p], lambda p: (p,)], ids=["alone", "list", "tuple"])
def test_the_trainer_takes_it_alone_or_in_a_sequence(plugins: Any) -> None:
    plugin = amp("O2")
    assert pl.Trainer(accelerator="cpu", plugins=plugins(plugin), logger=False).precision_plugin is plugin


# What it says at start


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Returns what the plugin has said so far."""
    # Without handlers on the root logger Lightning keeps its records to itself.
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    caplog.set_level(logging.INFO, "lightning.pytorch")
    return lambda: [m for m in caplog.messages if "AmpPrecision" in m]


def test_what_runs_is_said_once_in_a_fit(said: Callable[[], list[str]]) -> None:
    module = mean_module(body=nn.Linear(3, 3), norm=nn.LayerNorm(3), batchnorm=nn.BatchNorm1d(3))
    module.validation_step = lambda batch: None
    plugin = amp("O2", num_losses=3, keep_fp32="LayerNorm", min_loss_scale=1)
    trainer(plugin).fit(module, Batches([0, 1]), Batches([0, 1]))
    (message,) = said()
    for part in ("opt level O2", "float16", "device=cpu", "num_losses=3"):
        assert part in message
    assert "dynamic, from 1024, doubling every 2000 clean passes, 1 to 1.67772e+07" in message
    level, replaced, kept = (next(x for x in message.splitlines() if w in x) for w in ("level:", "replaced:", "stays"))
    assert "master_weights=True" in level
    assert "keep_batchnorm_fp32=True" in level
    assert "keep_fp32=('LayerNorm',)" in replaced
    assert "min_scale=1.0" in replaced
    assert "norm.weight" in kept
    assert "body" not in kept


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_says_where_it_runs(level: str, said: Callable[[], list[str]]) -> None:
    fit(mean_module(), amp(level))
    (message,) = said()
    assert f"opt level {level}" in message
    assert "device=cpu" in message


def test_rank_one_says_nothing(said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    fit(mean_module(), amp("O1"))
    assert said() == []


# What it refuses when it is made


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"opt_level": "O4"}, ["'O4'", "'O0', 'O1', 'O2', 'O3'"]),
        ({"opt_level": "02"}, ["'02'", "Did you mean 'O2'", "digit zero"]),
        ({"opt_level": "o1"}, ["'o1'", "'O1'"]),
        ({"dtype": "float8"}, ["dtype='float8'", "'float16', 'bfloat16'"]),
        ({"opt_level": "O1", "cast_model_type": "float16"}, ["cast_model_type", "'O1'", "'O2'"]),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, ["keep_batchnorm_fp32", "'O1'", "'O2'"]),
        ({"opt_level": "O1", "master_weights": True}, ["master_weights", "'O1'", "'O2'"]),
        ({"opt_level": "O0", "patch_torch_functions": True}, ["patch_torch_functions", "'O0'", "'O1'"]),
        ({"opt_level": "O2", "cast_model_type": "float32"}, ["master_weights", "cast_model_type", "'O1'"]),
        ({"opt_level": "O2", "cast_model_type": "bfloat16"}, ["cast_model_type", "dtype", "bfloat16", "float16"]),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, ["min_loss_scale=8", "max_loss_scale=4"]),
        ({"init_scale": 2.0**30}, ["init_scale", "max_loss_scale"]),
        ({"loss_scale": "fast"}, ["loss_scale='fast'", "'dynamic'", "positive"]),
        ({"loss_scale": -1.0}, ["loss_scale=-1.0", "'dynamic'", "positive"]),
        ({"cache_casts": "epoch"}, ["cache_casts='epoch'", "'step'"]),
        ({"keep_fp32": 3}, ["keep_fp32", "3", "name patterns"]),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(AmpConfigError) as refusal:
        AmpPrecision(**settings)
    assert not [word for word in words if word not in str(refusal.value)], str(refusal.value)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "3"])
def test_num_losses_is_a_whole_number(count: Any) -> None:
    with pytest.raises(ValueError, match=r"num_losses=.* at least 1"):
        AmpPrecision(num_losses=count)


@pytest.mark.parametrize("limit", [0, -5, 2.5, True, "100"])
def test_c37_a_limit_of_skips_is_a_whole_number_or_none(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"max_consecutive_skips=.* at least 1, or None"):
        AmpPrecision(max_consecutive_skips=limit)
    AmpPrecision(max_consecutive_skips=None)


@pytest.mark.parametrize("groups", [[0, 1], "01", [["a", "b"]], [[0.0, 1.0]], 3, {0: 1}])
def test_c37_what_skips_together_is_lists_of_indices(groups: Any) -> None:
    with pytest.raises(ValueError, match=r"skip_together=.* cannot be used. Use lists"):
        AmpPrecision(skip_together=groups)


@pytest.mark.parametrize("name", ["hold_schedulers", "count_skipped_steps"])
@pytest.mark.parametrize("value", ["False", "no", 0, None])
def test_c37_a_flag_is_no_string(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.* cannot be used. Use True or False"):
        AmpPrecision(**{name: value})


@pytest.mark.parametrize("level", LEVELS)
def test_weights_are_edited_among_the_masters_at_each_level(level: str) -> None:
    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        with module.trainer.precision_plugin.masters(optimizer), torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                assert p.dtype is (torch.float16 if level == "O3" else torch.float32)
                p.mul_(0.5)

    module = run(step, sgd("net"), amp(level), net=linear(1.0))
    assert module.net.weight.item() == 0.5


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_c89_precision_beside_the_plugin_is_refused(precision: str) -> None:
    with pytest.raises(ValueError, match=rf"precision={precision}.*AmpPrecision.*used without precision=.*Choose one"):
        trainer(amp("O1"), precision=precision)


def test_c89_one_knob_sets_a_trainer_up() -> None:
    other = AsyncCheckpointIO()
    arguments = trainer_kwargs("O2", num_losses=3, dtype="bfloat16", plugins=other)
    it = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **arguments)
    assert it.precision == "bf16-true"
    assert it.precision_plugin is arguments["plugins"][0]
    assert it.strategy.checkpoint_io is other
    assert isinstance(it.precision_plugin, AmpPrecision)
    assert it.precision_plugin.config.opt_level == "O2"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "16-mixed"}, "precision='16-mixed' .* opt_level='O1'.* Delete precision="),
        ({"plugins": [HalfPrecision()]}, "HalfPrecision sets the precision, and so does opt_level='O1'.*Delete one"),
        ({"plugins": amp("O2")}, "AmpPrecision sets the precision"),
    ],
    ids=["precision", "plugin", "ours"],
)
def test_c89_a_second_knob_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trainer_kwargs("O1", **settings)


# What it refuses in a training


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("loss_id", [2, -1, True])
def test_loss_id_out_of_range(level: str, loss_id: int) -> None:
    def step(module: Any, *_: Any) -> None:
        module.manual_backward(module.net(torch.ones(1, 1)).mean(), loss_id=loss_id)

    with pytest.raises(ValueError, match=rf"loss_id={loss_id} .*num_losses=2 allows 0 to 1.*Raise num_losses"):
        run(step, sgd("net"), amp(level, num_losses=2), net=linear(1.0))


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("use", ["backward", "clip", "outcome", "masters"])
def test_an_optimizer_that_is_not_the_trainers(level: str, use: str) -> None:
    plugin = amp(level)

    def step(module: Any, *_: Any) -> None:
        foreign = torch.optim.Adam(module.net.parameters())
        loss = module.net(torch.ones(1, 1)).mean()
        if use == "backward":
            module.manual_backward(loss, optimizers=[foreign])
        module.manual_backward(loss)
        if use == "clip":
            module.clip_gradients(foreign, 1.0, "norm")
        getattr(plugin, use)(foreign)

    with pytest.raises(ValueError, match=r"Adam is not one of the 1 optimizers.*self\.optimizers\(\)"):
        run(step, sgd("net"), plugin, net=linear(1.0))


def lbfgs_module() -> Scripted:
    def make(module: Any) -> Any:
        return torch.optim.LBFGS(module.net.parameters(), lr=0.1)

    return Scripted(lambda m, *_: (m.net(torch.ones(1, 1)) ** 2).mean(), make, automatic=True, net=linear(1.0))


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_lbfgs_is_refused_above_o0(level: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"LBFGS.*opt_level='{level}'.*Use opt_level='O0'"):
        fit(lbfgs_module(), amp(level))


def test_lbfgs_works_at_o0() -> None:
    ours, plain = lbfgs_module(), lbfgs_module()
    fit(ours, amp("O0"), [0] * 3)
    fit(plain, None, [0] * 3)
    assert torch.equal(ours.net.weight, plain.net.weight)
    assert ours.net.weight.abs() < 0.5


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_module_is_refused_where_weights_are_float32(level: str, dtype: torch.dtype) -> None:
    module = mean_module(head=nn.Linear(3, 1).to(dtype))
    with pytest.raises(
        MisconfigurationException, match=rf"'head.weight' is {dtype} .*opt_level='{level}'.*\.float\(\).*'O2'"
    ):
        fit(module, amp(level))


@pytest.fixture
def _no_process_group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.usefixtures("_no_process_group")
def test_a_model_parallel_strategy_is_refused(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "configure_model", lambda self: None)  # the strategy asks for it
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1, process_group_backend="gloo")
    with pytest.raises(MisconfigurationException, match=r"ModelParallelStrategy cannot be used.*Use a single device"):
        fit(mean_module(), amp(level), strategy=strategy, devices=1)


@pytest.mark.parametrize("level", LEVELS)
def test_deepspeed_is_refused(level: str) -> None:
    """By its name, although it derives from a strategy that is supported: so does this stand-in (no DeepSpeed here)."""
    assert issubclass(DeepSpeedStrategy, DDPStrategy)
    stand_in = type("DeepSpeedStrategy", (SingleDeviceStrategy,), {})
    with pytest.raises(MisconfigurationException, match=r"DeepSpeedStrategy cannot be used.*'ddp'"):
        fit(mean_module(), amp(level), strategy=stand_in(device="cpu"))


def test_c90_a_device_without_autocast_is_refused_where_functions_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device_type: False)
    with pytest.raises(MisconfigurationException, match=r"opt_level='O1' casts functions.* on 'cpu'.*opt_level='O2'"):
        fit(mean_module(), amp("O1"))
    fit(mean_module(), amp("O2"))


def test_a_strategy_derived_from_a_supported_one_is_taken() -> None:
    derived = type("MyStrategy", (SingleDeviceStrategy,), {})
    module = mean_module()
    fit(module, amp("O2"), strategy=derived(device="cpu"))
    assert module.net.weight.tolist() == [[0.0, 1.0, 2.0]]


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_step_behind_the_plugins_back_is_refused(level: str) -> None:
    def step(module: Any, *_: Any) -> None:
        module.manual_backward(module.net(torch.ones(1, 1)).mean())
        module.optimizers().optimizer.step()

    with pytest.raises(RuntimeError, match=r"step\(\) of optimizer 0 was called directly.*self\.optimizers\(\)"):
        run(step, sgd("net"), amp(level), net=linear(1.0))


# From YAML and the command line


class Configured(Scripted):
    """A module that the command line can make."""

    def __init__(self, features: int = 3) -> None:
        super().__init__(mean_step, sgd("net"), net=nn.Linear(features, 1))


def configured(*arguments: str) -> AmpPrecision:
    """Returns the plugin of the Trainer that LightningCLI builds from these arguments."""
    quiet = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LightningCLI's own, of arguments given in Python and of a newer jsonargparse
        cli = LightningCLI(Configured, run=False, args=[*quiet, *arguments], save_config_callback=None)
    plugin = cli.trainer.precision_plugin
    assert isinstance(plugin, AmpPrecision)
    return plugin


YAML = """
trainer:
  plugins:
    - class_path: lightning_amp.AmpPrecision
      init_args:
        opt_level: O2
        loss_scale: dynamic
        num_losses: 3
        keep_batchnorm_fp32: true
        keep_fp32: [LayerNorm, "*.head"]
        cache_casts: step
        init_scale: 256
        growth_interval: 10
        min_loss_scale: 0.5
        hysteresis: 2
"""


def test_c89_every_setting_comes_through_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    config = configured(f"--config={path}").config
    assert (config.opt_level, config.loss_scale, config.init_scale) == ("O2", "dynamic", 256.0)
    assert (config.keep_fp32, config.cache_casts) == (("LayerNorm", "*.head"), "step")
    assert (config.rule.growth_interval, config.rule.min_scale, config.rule.hysteresis) == (10, 0.5, 2)


def test_a_word_on_the_command_line_replaces_the_files_level(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {plugins: {class_path: lightning_amp.AmpPrecision, init_args: {opt_level: O2}}}")
    assert configured(f"--config={path}", "--trainer.plugins.opt_level=O1").config.opt_level == "O1"


@pytest.mark.parametrize("name", ["lightning_amp.AmpPrecision", "AmpPrecision"])
def test_the_command_line_alone_will_do(name: str) -> None:
    plugin = configured(f"--trainer.plugins={name}", "--trainer.plugins.loss_scale=128")
    assert plugin.config.loss_scale == 128.0


@pytest.mark.parametrize("setting", ["opt_level=02", "loss_scale=fast", "num_losses=many", "dtype=float8"])
def test_the_command_line_refuses_what_the_constructor_does(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        configured("--trainer.plugins=lightning_amp.AmpPrecision", f"--trainer.plugins.{setting}")
    name, value = setting.split("=")
    assert f'Parser key "{name}"' in (message := capsys.readouterr().err)
    assert value in message


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_c90_the_half_type_that_was_asked_for_runs_on_the_cpu(level: str, dtype: str) -> None:
    seen: list[torch.dtype] = []
    plugin = amp(level, dtype=dtype)

    def step(module: Any, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return module.net(batch).float().mean()

    module = Scripted(step, sgd("net"), automatic=True, net=nn.Sequential(linear(1.0, 1.0), nn.Identity()))
    module.net[0].register_forward_hook(lambda m, args, output: seen.append(output.dtype))
    fit(module, plugin, [torch.ones(2, 2)])
    assert seen == [getattr(torch, dtype)]
    assert set(plugin.loss_scales().values()) == ({SCALE} if dtype == "float16" and level != "O3" else {1.0})
