"""Batches of any kind: only floating tensors are cast, containers keep their type, and nothing else is touched."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_amp import batches, register_batch_type
from lightning_amp.batches import cast
from tests.helpers.modules import amp as plugin
from tests.helpers.modules import run, sgd

HALF = torch.float16
X = torch.tensor([1.0, 2.5])
IDS = torch.tensor([70_000, 1])


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_registered", {})


def cast_of(value: Any) -> Any:
    result = cast(value, HALF)
    assert type(result) is type(value)
    return result


# What is cast, and what is not


def test_c66_only_floating_tensors_are_cast() -> None:
    kept = {
        "ids": IDS,
        "mask": torch.tensor([True, False]),
        "complex": torch.ones(1, dtype=torch.complex64),
        "array": np.ones(2),
        "name": "cat",
        "bytes": b"cat",
        "number": 2.5,
        "none": None,
        "device": torch.device("cpu"),
        "kind": torch.float32,
        "module": nn.Linear(1, 1),
        "class": nn.Linear,
    }
    batch = {**kept, "x": X, "time": torch.tensor([1e300], dtype=torch.float64), "bf16": X.bfloat16()}

    result = cast_of(batch)

    assert all(result[name] is value for name, value in kept.items())
    assert kept["module"].weight.dtype is torch.float32
    assert {result[name].dtype for name in ("x", "time", "bf16")} == {HALF}
    assert batch["x"] is X


def test_float64_is_left_alone_on_request() -> None:
    doubles = X.double()
    assert cast((doubles, X), HALF, doubles=False)[0] is doubles


class Pair(NamedTuple):
    x: Tensor
    ids: Tensor


class Tagged(namedtuple("Tagged", "x name")):
    @property
    def shout(self) -> str:
        return str(self.name).upper()


class Files(list):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "batch",
    [
        (X, IDS),
        [X, IDS],
        [[X, (IDS, {"deep": [X]})], "text"],
        Pair(X, IDS),
        Tagged(X, "cat"),
        Files([X, IDS]),
        {"x": X, "ids": IDS},
        OrderedDict(x=X, ids=IDS),
        UserDict(x=X, ids=IDS),
        MappingProxyType({"x": X, "ids": IDS}),
        torch.max(torch.eye(2), dim=0),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_keep_their_type_and_their_integers(batch: Any) -> None:
    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, (tuple, list, Mapping)):
            for item in value.values() if isinstance(value, Mapping) else value:
                yield from leaves(item)
        else:
            yield value

    before, after = list(leaves(batch)), list(leaves(cast_of(batch)))
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Tensor) and old.is_floating_point():
            assert new.dtype is HALF
            assert torch.equal(new.float(), old)
        else:
            assert new is old
    assert cast(batch, torch.float32) is batch, "there was nothing to cast"


def test_a_default_factory_and_what_a_mapping_holds_besides_its_items_stay() -> None:
    batch = defaultdict(list, x=X)
    assert cast_of(batch)["new"] == []
    assert batch["x"] is X


def test_a_tuple_class_keeps_its_methods() -> None:
    assert cast_of(Tagged(X, "cat")).shout == "CAT"


def test_packed_sequences() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    result = cast_of(packed)
    assert isinstance(result, PackedSequence)
    assert result.data.dtype is HALF
    assert result.batch_sizes is packed.batch_sizes
    gru = nn.GRU(2, 2).half()
    assert gru(result)[0].data.dtype is HALF


# Mappings with a custom `to`


class Encoding(UserDict):  # type: ignore[type-arg]
    """Holds more than its items, and its own ``to`` casts all of them: as tokenizers' batches do."""

    def __init__(self, items: Any, encodings: Any = None) -> None:
        super().__init__(items)
        self.encodings = encodings

    def to(self, target: Any) -> "Encoding":
        return Encoding({key: item.to(target) for key, item in self.data.items()}, self.encodings)


def test_c63_a_mapping_is_taken_for_one_before_its_own_to_is_asked() -> None:
    batch = Encoding({"input_ids": IDS, "mask": torch.tensor([True]), "pixels": X}, encodings=["kept"])
    result = cast_of(batch)
    assert result["input_ids"].tolist() == [70_000, 1]
    assert result["input_ids"].dtype is torch.int64
    assert result["mask"].dtype is torch.bool
    assert result["pixels"].dtype is HALF
    assert result.encodings == ["kept"]
    assert batch["pixels"].dtype is torch.float32


class Fixed(Mapping):  # type: ignore[type-arg]
    """An immutable mapping made by keywords."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def test_a_mapping_that_cannot_be_rebuilt_is_told_how() -> None:
    with pytest.raises(TypeError, match=r"register_batch_type\(Fixed"):
        cast(Fixed(x=X), HALF)
    register_batch_type(Fixed, lambda batch, dtype: Fixed(**{k: cast(v, dtype) for k, v in batch.items()}))
    assert cast_of(Fixed(x=X))["x"].dtype is HALF


# Dataclasses


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    ids: Tensor
    name: str
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.x))


@dataclasses.dataclass
class Nested:
    inner: list[Frozen]
    weights: dataclasses.InitVar[Any] = None
    total: Tensor = dataclasses.field(init=False)

    def __post_init__(self, weights: Any) -> None:
        self.total = X if weights is None else weights


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    ids: Tensor


def test_c62_frozen_dataclasses() -> None:
    batch = Frozen(X, IDS, "cat")
    result = cast_of(batch)
    assert result.x.dtype is HALF
    assert result.ids is IDS
    assert (result.name, result.size) == ("cat", 2)
    assert batch.x is X
    assert cast(result, HALF) is result


def test_c62_dataclasses_with_other_arguments_than_fields_slots_and_inner_ones() -> None:
    weights = torch.full((2,), 3.0)
    result = cast_of(Nested([Frozen(X, IDS, "cat")], weights))
    assert result.inner[0].x.dtype is HALF
    assert result.total.tolist() == [3.0, 3.0]
    assert cast_of(Slotted(X, IDS)).x.dtype is HALF


# Objects that convert themselves


class Graph:
    """As graph libraries have it: converts every field, in place or not."""

    def __init__(self, x: Tensor, edges: Tensor, extra: Any = None, in_place: bool = False) -> None:
        self.x, self.edges, self.extra, self.in_place = x, edges, extra, in_place

    def to(self, dtype: torch.dtype) -> "Graph":
        graph = self if self.in_place else Graph(self.x, self.edges, self.extra)
        graph.x, graph.edges = graph.x.to(dtype), graph.edges.to(dtype)
        if graph.extra is not None:
            graph.extra = [t.to(dtype) for t in graph.extra]
        return graph


@pytest.mark.parametrize("in_place", [False, True])
def test_c64_an_object_is_asked_to_convert_itself_and_its_integers_are_put_back(in_place: bool) -> None:
    batch = Graph(X, IDS, [X, IDS], in_place)
    result = cast_of(batch)
    assert result.x.dtype is HALF
    assert result.edges.tolist() == [70_000, 1]
    assert [t.dtype for t in result.extra] == [HALF, torch.int64]
    assert batch.x is X, "targets in the user's batch are not the model's to change"
    assert batch.edges is IDS


def test_an_object_that_has_nothing_to_cast_stays_the_same_object() -> None:
    batch = Graph(X.half(), IDS, [X.half()])
    assert cast_of(batch) is batch


class SlottedGraph:
    __slots__ = ("ids", "x")

    def __init__(self, x: Tensor, ids: Tensor) -> None:
        self.x, self.ids = x, ids

    def to(self, dtype: torch.dtype) -> "SlottedGraph":
        return SlottedGraph(self.x.to(dtype), self.ids.to(dtype))


def test_c63_integers_in_slots_are_put_back_too() -> None:
    assert cast_of(SlottedGraph(X, IDS)).ids.tolist() == [70_000, 1]


class Movable:
    """Its ``to`` takes devices and nothing else."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: str) -> "Movable":
        return Movable(self.x.to(device=device))


def test_c64_an_object_whose_to_takes_no_dtype_is_cast_where_it_reaches_a_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, batch: Movable) -> Tensor:
            assert batch.x.dtype is torch.float32
            return self.layer(batch.x)

    def step(module: Any, *_: Any) -> None:
        module.manual_backward(module.model(Movable(X.view(1, 2))).mean())
        module.optimizers().step()

    model = Model()
    before = model.layer.weight.detach().clone()
    run(step, sgd("model"), plugin("O2"), model=model)
    assert torch.allclose(model.layer.weight, before - X, atol=1e-3)


# The registry


class Boxes(torch.Tensor):
    pass


class Item:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class SubItem(Item):
    pass


def test_a_registered_function_goes_before_everything_else_for_subclasses_too() -> None:
    register_batch_type(Item, lambda item, dtype: type(item)(item.x.to(dtype)))
    register_batch_type(Boxes, lambda boxes, dtype: boxes)
    boxes = X.as_subclass(Boxes)

    result = cast_of([SubItem(X), boxes, {"deep": Item(X)}])

    assert result[0].x.dtype is HALF
    assert isinstance(result[0], SubItem)
    assert result[1] is boxes
    assert result[2]["deep"].x.dtype is HALF


def test_a_later_registration_replaces_an_earlier_one() -> None:
    register_batch_type(Item, lambda item, dtype: item)
    register_batch_type(Item, lambda item, dtype: Item(item.x.to(dtype)))
    assert cast_of(Item(X)).x.dtype is HALF


@pytest.mark.parametrize(("cls", "convert"), [("Item", lambda item, dtype: item), (Item, None), (Item(X), print)])
def test_what_cannot_be_registered_is_refused(cls: Any, convert: Any) -> None:
    with pytest.raises(TypeError, match="Give a class, and a function"):
        register_batch_type(cls, convert)


# In a training


def test_c66_targets_in_a_batch_stay_float32_while_the_model_sees_half() -> None:
    seen: dict[str, Any] = {}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(70_001, 2)
            self.layer = nn.Linear(2, 1)

        def forward(self, batch: Any) -> Tensor:
            seen.update(ids=batch["ids"].dtype, x=batch["x"].dtype)
            return self.layer(self.embed(batch["ids"]) + batch["x"])

    batch = Encoding({"ids": IDS, "x": torch.ones(2, 2), "target": torch.tensor([[70_000.0], [1.0]])})

    def step(module: Any, *_: Any) -> None:
        out = module.model(batch)
        seen["distance"] = (out - batch["target"]).abs().max().item()

    run(step, sgd("model"), plugin("O2"), model=Model())
    assert seen["ids"] is torch.int64
    assert seen["x"] is HALF
    assert 69_000 < seen["distance"] < 71_000
