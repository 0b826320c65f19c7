"""What a converted module puts into a state dict, and what loading one does to its float32 side."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.helpers.engines import converted, masters_of

LEVELS = ["O2", "O3"]


class Model(nn.Module):
    """Weights under two names, tied across modules and parametrized; buffers, float and not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), parametrizations.weight_norm(nn.Linear(3, 2)))
        self.weight = self.alias = nn.Parameter(torch.randn(4))
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.net[0].weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mean", torch.randn(4))


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert list(left) == list(right)
    return all(left[k].dtype is right[k].dtype and torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_c69_the_originals_are_saved_bit_for_bit(level: str, dtype: str) -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.conversion = converted(model, level, dtype=dtype)
    saved = model.state_dict()
    assert same(saved, before)
    assert saved["alias"] is saved["weight"], "a file holds tied weights once"
    assert saved["tied.weight"] is saved["net.0.weight"]
    Model().load_state_dict(saved, strict=True)
    prefixed = nn.ModuleDict({"m": model}).state_dict()
    assert same({k.removeprefix("m."): v for k, v in prefixed.items()}, before)


@pytest.mark.parametrize("level", LEVELS)
def test_edits_are_saved_and_saving_writes_nothing(level: str) -> None:
    model = Model()
    conversion = converted(model, level)
    low_bits = model.state_dict()["weight"][1].item()
    with torch.no_grad():
        model.weight[0], model.mean[0] = 5.0, 6.0
    master = masters_of(conversion).of(model.weight)
    assert master is not None
    before = master.detach().clone()
    saved = model.state_dict()
    assert (saved["weight"][:2].tolist(), saved["mean"][0].item()) == ([5.0, low_bits], 6.0)
    saved["weight"].zero_()
    assert torch.equal(master, before)
    assert model.weight.abs().sum() > 0


def test_with_keep_vars_the_parameters_themselves_are_given() -> None:
    model = Model()
    model.weight.requires_grad_(False)
    model.conversion = converted(model)
    state = model.state_dict(keep_vars=True)
    assert state["weight"] is model.weight
    assert state["net.0.weight"] is model.net[0].weight
    assert state["mean"] is model.mean


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_c67_loading_fills_the_float32_side(level: str, dtype: torch.dtype) -> None:
    source = {k: v.to(dtype) if v.is_floating_point() else v for k, v in Model().state_dict().items()}
    model = Model()
    conversion = converted(model, level)
    assert not model.load_state_dict(source).missing_keys
    wanted = {k: v.float() if v.is_floating_point() else v for k, v in source.items()}
    assert same(model.state_dict(), wanted)
    assert torch.equal(model.weight, wanted["weight"].half())
    conversion.undo()
    assert same(model.state_dict(), wanted)


def test_a_part_of_a_state_dict_fills_that_part() -> None:
    model = Model()
    model.conversion = converted(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({"weight": torch.full((4,), 0.1)}, strict=False)
    after = model.state_dict()
    assert after["weight"].tolist() == torch.full((4,), 0.1).tolist()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed <= {"weight", "alias"}


def test_a_value_of_another_shape_is_refused_and_leaves_the_master() -> None:
    model = Model()
    model.conversion = converted(model)
    before: Any = model.state_dict()["weight"].clone()
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        model.load_state_dict({"weight": torch.zeros(1)}, strict=False)
    assert torch.equal(model.state_dict()["weight"], before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_replaced_buffer_is_saved_as_it_is(level: str) -> None:
    model = Model()
    model.conversion = converted(model, level)
    model.mean = torch.arange(3).half()
    assert model.state_dict()["mean"].tolist() == [0.0, 1.0, 2.0]
    assert model.state_dict()["mean"].dtype is torch.float32
