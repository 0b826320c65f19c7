"""The recipes O0 to O3, what an override replaces, and the sentences that refuse a setting or a pair of settings."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp.opt_levels import SCALE_RANGE, AmpConfig, AmpConfigError, resolve

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def table_row(config: AmpConfig) -> tuple[Any, ...]:
    """The columns of the table of levels: weights, autocast, BatchNorm, masters, loss scale, outputs."""
    return (
        config.cast_model_type,
        config.patch_torch_functions,
        config.keep_batchnorm_fp32,
        config.master_weights,
        config.loss_scale,
        config.cast_model_outputs,
    )


@pytest.mark.parametrize(
    ("level", "dtype", "row"),
    [
        ("O0", F16, (None, False, False, False, 1.0, None)),
        ("O1", F16, (None, True, False, False, "dynamic", None)),
        ("O2", F16, (F16, False, True, True, "dynamic", F32)),
        ("O3", F16, (F16, False, False, False, 1.0, F32)),
        ("O0", BF16, (None, False, False, False, 1.0, None)),
        ("O1", BF16, (None, True, False, False, 1.0, None)),
        ("O2", BF16, (BF16, False, True, True, 1.0, F32)),
        ("O3", BF16, (BF16, False, False, False, 1.0, F32)),
    ],
)
def test_a_level_fills_the_config(level: str, dtype: torch.dtype, row: tuple[Any, ...]) -> None:
    for spelling in (dtype, str(dtype), str(dtype).removeprefix("torch.")):
        assert table_row(resolve(level, dtype=spelling)) == row


def test_the_scaler_settings_have_the_documented_defaults() -> None:
    config = resolve("O1")
    rule = config.rule
    assert (config.init_scale, rule.growth_factor, rule.backoff_factor, rule.growth_interval) == (2**16, 2, 0.5, 2000)
    assert (rule.min_scale, rule.max_scale, rule.hysteresis, rule.dynamic) == (2**-14, 2**24, 1, True)


@pytest.mark.parametrize(
    ("level", "given", "field", "value"),
    [
        ("O2", {"loss_scale": 128}, "loss_scale", 128.0),
        ("O2", {"loss_scale": "128.0"}, "loss_scale", 128.0),
        ("O3", {"loss_scale": "dynamic"}, "loss_scale", "dynamic"),
        ("O2", {"loss_scale": 1}, "loss_scale", 1.0),
        ("O2", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32", False),
        ("O3", {"keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32", True),
        ("O2", {"master_weights": False}, "master_weights", False),
        ("O3", {"master_weights": True}, "master_weights", True),
        ("O2", {"patch_torch_functions": True}, "patch_torch_functions", True),
        ("O2", {"cast_model_outputs": "float16"}, "cast_model_outputs", F16),
        ("O3", {"cast_model_type": F16}, "cast_model_type", F16),
        ("O1", {"cast_model_type": False}, "cast_model_type", None),
        ("O1", {"cast_model_type": F32}, "cast_model_type", None),
        ("O0", {"cast_model_type": "float32"}, "cast_model_type", None),
        ("O1", {"init_scale": 4}, "init_scale", 4.0),
        ("O1", {"cache_casts": "step"}, "cache_casts", "step"),
        ("O2", {"keep_fp32": "*.head"}, "keep_fp32", ("*.head",)),
        ("O2", {"keep_fp32": nn.LayerNorm}, "keep_fp32", (nn.LayerNorm,)),
        ("O2", {"keep_fp32": {nn.LayerNorm}}, "keep_fp32", (nn.LayerNorm,)),
        ("O2", {"keep_fp32": ["head", nn.LayerNorm]}, "keep_fp32", ("head", nn.LayerNorm)),
    ],
)
def test_an_override_replaces_its_field_alone(level: str, given: dict[str, Any], field: str, value: Any) -> None:
    config, standard = resolve(level, **given), resolve(level)
    assert getattr(config, field) == value
    assert type(getattr(config, field)) is type(value)
    others = {name for name in vars(config) if getattr(config, name) != getattr(standard, name)} - {field}
    assert others <= {"rule"}
    assert config.rule.dynamic is (config.loss_scale == "dynamic")


@pytest.mark.parametrize("value", [True, False, "True", "False"])
@pytest.mark.parametrize("name", ["keep_batchnorm_fp32", "master_weights"])
def test_what_is_float32_anyway_may_be_told_to_stay_so(name: str, value: Any) -> None:
    """A script that takes its level from a flag gives the same settings at each."""
    assert resolve("O0", **{name: value}) == resolve("O0")


def test_rule_settings_reach_the_rule() -> None:
    rule = resolve(
        "O1",
        growth_factor=4,
        backoff_factor=0.25,
        growth_interval=3,
        min_loss_scale=2,
        max_loss_scale=1e6,
        hysteresis=2,
    ).rule
    assert (rule.growth_factor, rule.backoff_factor, rule.growth_interval) == (4.0, 0.25, 3)
    assert (rule.min_scale, rule.max_scale, rule.hysteresis) == (2.0, 1e6, 2)


BAD_VALUES = [
    ({"loss_scale": value}, "loss_scale")
    for value in (0, -1.0, True, "fast", "nan", float("nan"), float("inf"), "1e40", 1e-40, [8])
]
BAD_VALUES += [
    ({name: value}, name)
    for name in ("init_scale", "max_loss_scale", "min_loss_scale")
    for value in (0, -2.0, True, "1024", float("nan"), float("inf"), 1e39, 1e-39)
]
BAD_VALUES += [({"growth_factor": value}, "growth_factor") for value in (1.0, 0.5, True, "2", float("inf"))]
BAD_VALUES += [({"backoff_factor": value}, "backoff_factor") for value in (0.0, 1.0, 2, False, "0.5")]
BAD_VALUES += [({name: v}, name) for name in ("growth_interval", "hysteresis") for v in (0, 2.5, True, "3")]
BAD_VALUES += [({name: v}, name) for name in ("keep_batchnorm_fp32", "master_weights") for v in ("yes", 1, 0)]
BAD_VALUES += [({"dtype": v}, "dtype") for v in ("half", "float32", F32, False, None)]
BAD_VALUES += [({"cast_model_outputs": v}, "cast_model_outputs") for v in ("float64", torch.int8, 16)]
BAD_VALUES += [({"cache_casts": v}, "cache_casts") for v in ("always", None, 2)]
BAD_VALUES += [({"keep_fp32": v}, "keep_fp32") for v in (3, [None], nn.Linear(1, 1), [nn.Linear(1, 1)])]


@pytest.mark.parametrize(("given", "name"), BAD_VALUES, ids=lambda v: repr(v).replace("\n", "") if v else None)
def test_a_bad_value_is_refused_by_name_with_what_is_allowed(given: dict[str, Any], name: str) -> None:
    with pytest.raises(AmpConfigError, match=rf"{name}\b.*Use ") as error:
        resolve("O2", **given)
    shown = repr(given[name]).strip("[]")
    assert shown in str(error.value)


def test_c36_a_scale_and_its_inverse_are_normal_float32() -> None:
    low, high = (torch.tensor(bound, dtype=torch.float32) for bound in SCALE_RANGE)
    tiny = torch.finfo(torch.float32).tiny
    assert low.item() >= tiny
    assert (1 / high).item() >= tiny
    assert torch.isfinite(torch.stack([high, 1 / low])).all()


@pytest.mark.parametrize(
    ("level", "hint"),
    [("02", "O2"), ("o1", "O1"), ("01", "O1"), ("00", "O0"), ("3", "O3"), (2, "O2"), ("O4", None), ("fp16", None)],
)
def test_c91_an_unknown_level_is_refused_with_a_hint(level: Any, hint: str | None) -> None:
    with pytest.raises(AmpConfigError, match=r"opt_level=.*Use one of 'O0', 'O1', 'O2', 'O3'") as error:
        resolve(level)
    assert repr(level) in str(error.value)
    assert ("Did you mean" in str(error.value)) is (hint is not None)
    assert hint is None or f"'{hint}', with the capital letter O" in str(error.value)


@pytest.mark.parametrize(
    ("level", "given", "named"),
    [
        ("O1", {"cast_model_type": "float16"}, ("cast_model_type", "opt_level='O1'")),
        ("O1", {"keep_batchnorm_fp32": True}, ("keep_batchnorm_fp32", "opt_level='O1'")),
        ("O1", {"keep_batchnorm_fp32": False}, ("keep_batchnorm_fp32", "opt_level='O1'")),
        ("O1", {"master_weights": "True"}, ("master_weights", "opt_level='O1'")),
        ("O0", {"cast_model_type": "float16"}, ("cast_model_type", "opt_level='O0'")),
        ("O0", {"patch_torch_functions": True}, ("patch_torch_functions", "opt_level='O0'")),
        ("O2", {"cast_model_type": "float32"}, ("master_weights", "cast_model_type")),
        ("O3", {"cast_model_type": "float32", "keep_batchnorm_fp32": True}, ("keep_batchnorm_fp32", "cast_model_type")),
        ("O2", {"cast_model_type": "bfloat16"}, ("cast_model_type", "dtype")),
        ("O1", {"min_loss_scale": 2.0**20, "max_loss_scale": 8}, ("min_loss_scale", "max_loss_scale")),
        ("O1", {"init_scale": 2.0**25}, ("init_scale", "max_loss_scale")),
        ("O1", {"init_scale": 1, "min_loss_scale": 2}, ("init_scale", "min_loss_scale")),
    ],
)
def test_two_settings_in_conflict_are_both_named(level: str, given: dict[str, Any], named: tuple[str, str]) -> None:
    with pytest.raises(AmpConfigError) as error:
        resolve(level, **given)
    assert all(name in str(error.value) for name in named)
    assert any(cure in str(error.value) for cure in ("Remove", "Use", "Lower", "Move"))


def test_float32_weights_at_o2_are_refused_by_what_was_given() -> None:
    with pytest.raises(AmpConfigError, match=r"cast_model_type=float32 .*Remove cast_model_type, or"):
        resolve("O2", cast_model_type="float32")


def test_only_plain_o0_is_passive() -> None:
    assert resolve("O0").passive
    assert not resolve("O0", loss_scale=8).passive
    assert not resolve("O1", dtype="bfloat16").passive


def test_several_processes_move_a_scale_by_gradients_alone() -> None:
    config = resolve("O2", hysteresis=3)
    assert config.for_processes(1) is config
    assert (config.for_processes(2).rule.excuse_loss, config.rule.excuse_loss) == (False, True)
    assert config.for_processes(2).rule.hysteresis == 3


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            {"opt_level": "O1"},
            ["opt level O1", "half type float16", "replaced: nothing", "dynamic, from 65536, doubling"],
        ),
        (
            {"opt_level": "O2", "loss_scale": 8},
            ["master_weights=True", "loss_scale='dynamic'", "loss_scale=8.0", "static 8"],
        ),
        ({"opt_level": "O2", "growth_factor": 4.0, "keep_fp32": "head"}, ["times 4", "keep_fp32=('head',)"]),
        ({"opt_level": "O3", "dtype": "bfloat16"}, ["half type bfloat16", "cast_model_type=bfloat16", "static 1"]),
        ({"opt_level": "O0"}, ["opt level O0, float32 throughout\n", "replaced: nothing", "static 1"]),
        (
            {"opt_level": "O2", "cast_model_type": "float32", "master_weights": False, "keep_batchnorm_fp32": False},
            ["float32 throughout"],
        ),
    ],
)
def test_c37_the_description_names_the_level_and_what_was_replaced(given: dict[str, Any], shown: list[str]) -> None:
    text = resolve(**given).describe()
    assert all(part in text for part in shown), text
