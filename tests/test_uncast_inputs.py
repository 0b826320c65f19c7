"""Inputs that are named to stay as they are, in both front ends."""

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lightning_amp
from lightning_amp import AmpConfigError, amp, resolve
from lightning_amp.batches import cast
from tests.helpers.modules import Scripted, fit, sgd
from tests.helpers.modules import amp as plugin

HALF, FULL = torch.float16, torch.float32
X, TIME = torch.ones(2), torch.tensor([70_000.0, 1.0])


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    amp.deinitialize()


class Named(NamedTuple):
    x: Tensor
    time: Tensor


@dataclasses.dataclass(frozen=True)
class Fields:
    x: Tensor
    time: Tensor


class Converts:
    def __init__(self, x: Tensor, time: Tensor) -> None:
        self.x, self.time = x, time

    def to(self, dtype: torch.dtype) -> "Converts":
        return Converts(self.x.to(dtype), self.time.to(dtype))


CONTAINERS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "mapping": lambda **items: UserDict(items),
    "named tuple": Named,
    "dataclass": Fields,
    "own to": Converts,
    "nested": lambda **items: {"inner": [(items,)]},
    "tree": lambda x, time: {"x": x, "time": {"start": [time], "end": time}},
}


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    items = value if isinstance(value, (dict, UserDict)) else vars(value)
    return [leaf for item in items.values() for leaf in leaves(item)]


@pytest.mark.parametrize("pattern", ["time", "t?me", "*me"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_c66_what_is_named_is_not_cast_in_any_container(kind: str, pattern: str) -> None:
    batch = CONTAINERS[kind](x=X, time=TIME)
    result = cast(batch, HALF, uncast=["other", pattern])
    assert type(result) is type(batch)
    first, *rest = leaves(result)
    assert first.dtype is HALF
    assert rest
    assert all(leaf is TIME for leaf in rest)
    assert {leaf.dtype for leaf in leaves(cast(batch, HALF))} == {HALF}
    assert {leaf.dtype for leaf in leaves(batch)} == {FULL}, "the batch itself stays as it is"


def test_keys_that_are_no_strings_are_nobodys_names() -> None:
    assert cast({0: X}, HALF, uncast=["*"])[0].dtype is HALF


class Model(nn.Module):
    """Tells the dtypes of what it is given, and trains on all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, batch: Any, *, time: Tensor) -> Tensor:
        self.seen += [batch["x"].dtype, batch["time"].dtype, time.dtype]
        return self.layer(batch["x"]) + self.layer(batch["time"] / 70_000)


def in_plain_torch(model: Model, **settings: Any) -> None:
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), verbosity=0, **settings)
    model({"x": X, "time": TIME}, time=TIME).sum().backward()


def in_lightning(model: Model, **settings: Any) -> None:
    def step(module: Any, *_: Any) -> None:
        module.manual_backward(module.model({"x": X, "time": TIME}, time=TIME).sum())

    fit(Scripted(step, sgd("model"), model=model), plugin(**settings))


@pytest.mark.parametrize("train", [in_plain_torch, in_lightning])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_c66_a_model_gets_what_is_named_as_it_is_and_its_layers_cast_it(level: str, train: Any) -> None:
    model = Model()
    train(model, opt_level=level, uncast_inputs=["time"])
    assert model.seen == [HALF, FULL, FULL]
    model = Model()
    train(model, opt_level=level)
    assert model.seen == [HALF, HALF, HALF]


def test_what_is_no_name_is_refused() -> None:
    assert resolve("O2", uncast_inputs="time").uncast_inputs == ("time",)
    with pytest.raises(AmpConfigError, match="Use names of inputs"):
        resolve("O2", uncast_inputs=[nn.Linear])  # type: ignore[list-item]


def test_names_of_inputs_come_from_yaml() -> None:
    jsonargparse = pytest.importorskip("jsonargparse", reason="jsonargparse reads YAML for LightningCLI")
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(lightning_amp.AmpPrecision, "plugin")
    text = "{class_path: lightning_amp.AmpPrecision, init_args: {opt_level: O2, uncast_inputs: ['*_time']}}"
    assert parser.instantiate(parser.parse_args(["--plugin", text])).plugin.config.uncast_inputs == ("*_time",)
