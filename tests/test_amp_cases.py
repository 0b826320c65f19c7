"""Cases from the field, as scripts in plain PyTorch have them."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import Outcome, amp, batches, register_batch_type
from lightning_amp.alarm import TrainingDivergedError
from tests.helpers.plain import ONE, SCALE, block, pair, plain, values

SCALED = ("O1", "O2")


@pytest.fixture(autouse=True)
def _ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batches, "_registered", {})
    yield
    amp.deinitialize()


def scale(loss_id: int = 0) -> float:
    value: float = amp.state_dict()[f"loss_scaler{loss_id}"]["loss_scale"]
    return value


# B. Several optimizers, several losses


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("overflow", [False, True])
def test_c10_a_scale_that_moves_between_two_blocks_and_two_steps(level: str, overflow: bool) -> None:
    """It grows with every clean pass, or falls with the first: neither reaches the other optimizer's gradient."""
    models, optimizers = pair(level, growth_interval=1)
    block(models[0](ONE) * 2, optimizers[0], overflow=models[0] if overflow else None)
    block(models[1](ONE) * 3, optimizers[1])
    for optimizer in optimizers:
        optimizer.step()
    assert values(models) == [1.0 if overflow else -1.0, -2.0]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_c11_an_idle_branch_is_no_error_and_moves_nothing(level: str) -> None:
    models, optimizers = pair(level)
    optimizers[1].param_groups[0]["momentum"] = 0.9
    for _ in range(2):
        block(models[0](ONE), optimizers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert values(models) == [-1.0, 1.0]
    assert amp.outcome(optimizers[1]) is Outcome.IDLE
    assert not optimizers[1].state


def test_c12_a_generator_that_never_trains_is_pointed_out_once() -> None:
    models, optimizers = pair()

    def train() -> None:
        for _ in range(250):
            block(models[1](models[0](ONE).detach()), optimizers[0])
            optimizers[0].step()

    with pytest.warns(UserWarning, match="optimizer 0") as told:
        train()
    assert len(told) == 1


def test_c13_the_batch_of_a_skipped_step_can_be_played_again() -> None:
    models, optimizers = pair()
    for attempt in range(3):
        optimizers[0].zero_grad()
        block(models[0](ONE), optimizers[0], overflow=models[0] if attempt < 2 else None)
        optimizers[0].step()
        if amp.outcome(optimizers[0]) is Outcome.STEPPED:
            break
    assert attempt == 2
    assert values(models) == [0.0, 1.0]
    assert scale() == SCALE / 4


@pytest.mark.parametrize("level", SCALED)
def test_c17_a_loss_into_two_optimizers_beside_losses_of_their_own(level: str) -> None:
    models, optimizers = pair(level, num_losses=3)
    amp.load_state_dict(
        {f"loss_scaler{i}": {"loss_scale": s, "unskipped": 0} for i, s in enumerate((8.0, 1024.0, 2.0))}
    )
    block(models[0](ONE), optimizers[0], loss_id=0)
    block(models[1](ONE), optimizers[1], loss_id=1)
    block(models[0](ONE) * 2 + models[1](ONE) * 4, optimizers, loss_id=2)
    for optimizer in optimizers:
        optimizer.step()
    assert values(models) == [-2.0, -4.0]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_c33_c34_a_training_that_only_skips_ends_with_the_cause(level: str) -> None:
    models, optimizers = pair(level, max_consecutive_skips=5)

    def train() -> None:
        for _ in range(10):
            optimizers[0].zero_grad()
            block(models[0](ONE * float("nan")), optimizers[0])
            optimizers[0].step()

    with pytest.raises(TrainingDivergedError, match="weight"):
        train()
    assert values(models) == [1.0, 1.0]


def test_c33_a_dynamic_scale_stops_at_its_floor() -> None:
    models, optimizers = pair(max_consecutive_skips=None)

    def train(steps: int, overflow: nn.Linear | None) -> None:
        for _ in range(steps):
            optimizers[0].zero_grad()
            block(models[0](ONE), optimizers[0], overflow=overflow)
            optimizers[0].step()

    with pytest.warns(UserWarning, match="at its floor"):
        train(40, models[0])
    assert scale() == 2.0**-14
    train(1, None)
    assert values(models) == [0.0, 1.0]


# H. What is called below, beside and around a model


class Inner(nn.Module):
    """Has methods of its own, a child in a ModuleDict, and noise made in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"body": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
        self.head = nn.Linear(4, 1)
        self.register_buffer("shift", torch.linspace(0.0, 1.0, 4))
        self.bias = nn.Parameter(torch.zeros(4))

    def features(self, x: Tensor) -> Tensor:
        return self.parts["norm"](self.parts["body"](x + self.shift))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.features(x)) + self.bias)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("way", ["model", "method", "child", "generator of the caller"])
def test_c54_float32_noise_and_targets_meet_a_model_in_any_way(level: str, way: str) -> None:
    torch.manual_seed(0)
    model = Inner()
    exact = copy.deepcopy(model)
    calls = {
        "model": lambda m, x: m(x),
        "method": lambda m, x: m.head(m.features(x).tanh()),
        "child": lambda m, x: m.parts["body"](x).float() @ torch.ones(4, 1),
        "generator of the caller": lambda m, x: sum(out for out in map(m, x.split(2))),
    }
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, init_scale=SCALE)
    x, target = torch.randn(8, 4), torch.full((1,), 3.0)
    for m in (model, exact):
        loss = (calls[way](m, x).float() - target).square().mean()
        with amp.scale_loss(loss, optimizer) if m is model else plain(loss) as scaled:
            scaled.backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad is not None
            assert (p.grad.float() - q.grad).norm() <= 0.02 * q.grad.norm() + 1e-3


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_c54_an_error_over_dtypes_inside_a_model_names_the_remedy(level: str) -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.inner = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor, fail: str) -> Tensor:
            if fail == "dtype":
                return x.float() @ self.layer.weight
            if fail == "other":
                raise RuntimeError("another one")
            return self.layer(x)

    model = amp.initialize(Uses(), opt_level=level, verbosity=0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"call the module.*keep_fp32.*patch_torch_functions=True") as caught:
            model(torch.ones(1, 4), "dtype")
        assert str(caught.value).count("keep_fp32") == 1
    with pytest.raises(RuntimeError, match=r"^another one$"):
        model(torch.ones(1, 4), "other")
    assert model(torch.ones(1, 4), "").dtype is torch.float32
    amp.deinitialize()
    assert not model._forward_hooks


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_c54_a_tensor_that_is_given_twice_stays_one(level: str) -> None:
    """Attention tells self-attention by it, and so does a model that looks for it."""

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, key: Tensor, others: dict[str, Tensor]) -> Tensor:
            assert x is key is others["value"]
            return self.layer(x)

    model = amp.initialize(Same(), opt_level=level, verbosity=0)
    x = torch.ones(1, 4)
    assert model(x, key=x, others={"value": x}).dtype is torch.float32


# I. Batches of any kind reach a model in its dtype


class Named(NamedTuple):
    x: Tensor
    ids: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    ids: Tensor


class Graph:
    """Converts whatever it holds, in place."""

    def __init__(self, x: Tensor, ids: Tensor) -> None:
        self.x, self.ids = x, ids

    def to(self, *args: Any, **kwargs: Any) -> "Graph":
        self.x, self.ids = self.x.to(*args, **kwargs), self.ids.to(*args, **kwargs)
        return self


class Sealed:
    """Has no ``to``; only its user knows how it is cast."""

    def __init__(self, x: Tensor, ids: Tensor) -> None:
        self._held = (x, ids)
        self.x, self.ids = self._held


BATCHES: dict[str, Any] = {
    "c62 frozen dataclass": Frozen,
    "c63 mapping": lambda x, ids: UserDict(x=x, ids=ids),
    "c64 own to": Graph,
    "named tuple": Named,
    "nested": lambda x, ids: [({"deep": (x, ids)}, "name", None)],
    "registered": Sealed,
}


def fields(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, list):
        return batch[0][0]["deep"]  # type: ignore[no-any-return]
    return (batch["x"], batch["ids"]) if isinstance(batch, UserDict) else (batch.x, batch.ids)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", BATCHES)
def test_c62_c63_c64_batches_reach_a_model_in_its_dtype_with_their_ids_whole(kind: str, level: str) -> None:
    register_batch_type(Sealed, lambda batch, dtype: Sealed(batch.x.to(dtype), batch.ids))
    seen: list[Any] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(70_001, 2), nn.Linear(2, 1)

        def forward(self, batch: Any, *, extra: Any) -> Tensor:
            seen.extend([type(batch), *fields(batch), *fields(extra)])
            x, ids = fields(batch)
            return self.layer(self.embed(ids) + x)

    batch = BATCHES[kind](torch.ones(2, 2), torch.tensor([70_000, 1]))
    model = Model()
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0)
    with torch.no_grad():
        model(batch, extra=BATCHES[kind](torch.ones(2, 2), torch.tensor([70_000, 1])))
    wanted = torch.float16 if level in ("O2", "O3") else torch.float32
    assert seen[0] is type(batch)
    assert [t.dtype for t in seen[1:]] == [wanted, torch.int64] * 2
    assert all(t.tolist() == [70_000, 1] for t in (seen[2], seen[4]))
    assert fields(batch)[0].dtype is torch.float32, "the user's own stays as it is"
