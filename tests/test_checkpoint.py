"""The saved state: its format and its versions, those of others, damage told by its key, and the half export."""

import copy
import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import Engine, resolve
from lightning_amp.checkpoint import VERSION, CheckpointError, export_half, fit, grad_scaler_state
from lightning_amp.loss_scaler import LossScaler
from lightning_amp.outcomes import Outcome
from lightning_amp.saved_state import Saved, find, read

CPU = torch.device("cpu")


def engine(level: str = "O1", num_losses: int = 3, optimizers: int = 2, **settings: Any) -> Engine:
    """An engine over one linear layer an optimizer, its scale starting at 1024."""
    nets = [nn.Linear(2, 1) for _ in range(optimizers)]
    sgds = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    config = resolve(level, **{"init_scale": 1024.0, "growth_interval": 4, **settings})
    return Engine(config, sgds, nets, num_losses=num_losses)


def used(**settings: Any) -> Engine:
    """An engine that has seen clean passes of all losses, an overflow of the first, and steps of all kinds."""
    it = engine(**settings)
    x = torch.ones(1, 2)
    for factor in (1.0, 1.0, 1e38, 1.0):
        for loss_id, net in enumerate(nets_of(it)):
            it.backward(net(x).mean() * (factor if loss_id == 0 else 1.0), loss_id=loss_id)
        for optimizer in it.optimizers:
            it.step(optimizer)
            optimizer.zero_grad()
    return it


def nets_of(it: Engine) -> list[Any]:
    """The layers of an engine, the first once more at the end."""

    def forward(optimizer: Any) -> Any:
        weight, bias = optimizer.param_groups[0]["params"]
        return lambda x: nn.functional.linear(x, weight, bias)

    nets = [forward(optimizer) for optimizer in it.optimizers]
    return [*nets, nets[0]]


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return used().state_dict()


# The format


def test_c75_the_state_is_plain_data(state: dict[str, Any]) -> None:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state
    leaves = [leaf for _, leaf in walk(state)]
    assert {type(leaf) for leaf in leaves} <= {int, float, str, bool, type(None), dict, list}


def test_c71_the_state_comes_back_whole(state: dict[str, Any]) -> None:
    other = engine()
    assert other.load_state_dict(state) == []
    assert other.state_dict() == state
    assert [other.outcome(o) for o in other.optimizers] == [Outcome.STEPPED, Outcome.STEPPED]
    assert other.counts(other.optimizers[0]) == {Outcome.STEPPED: 3, Outcome.SKIPPED: 1, Outcome.IDLE: 0}
    assert other.accounts() == used().accounts()


def test_scales_that_are_no_powers_of_two_come_back_bit_for_bit() -> None:
    settings = {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1}
    saved, other = used(**settings), engine(**settings)
    other.load_state_dict(saved.state_dict())
    for mine, theirs in zip(saved.scalers, other.scalers, strict=True):
        assert torch.equal(mine.state, theirs.state)
        assert mine.read().scale != 1024.0


def test_scalers_that_the_state_does_not_know_are_forgotten(state: dict[str, Any]) -> None:
    other = used(num_losses=3)
    before = engine().state_dict()
    assert other.load_state_dict(before) == []
    assert other.loss_scales() == {}
    other.load_state_dict(state)
    assert list(other.loss_scales()) == ["loss_0", "loss_1", "loss_2"]


def test_version_1_is_read() -> None:
    """As the first version wrote it: totals without the latest outcome, no settings."""
    scaler = {
        **{"scale": 512.0, "inv_scale": 1 / 512, "clean": 3.0, "hysteresis": 1.0, "overflows": 2.0, "bad_losses": 1.0},
        **{"streak": 0.0, "lowest": 256.0, "highest": 1024.0, "last_bad": 4.0, "attempts": 9},
    }
    one = {**scaler, "scale": 1.0, "inv_scale": 1.0, "lowest": 1.0, "highest": 1.0}
    outcomes = [{"stepped": 7, "skipped": 2, "idle": 0}, {"stepped": 9, "skipped": 0, "idle": 0}]
    old = {"version": 1, "scalers": {"optimizer_0": scaler, "optimizer_0_1": scaler}, "outcomes": outcomes}
    it = engine()
    assert it.load_state_dict(old) == []
    assert it.loss_scales() == {"optimizer_0": 512.0, "optimizer_0_1": 512.0}
    assert it.accounts()["optimizer_0"].attempts == 9
    assert [it.counts(o)[Outcome.STEPPED] for o in it.optimizers] == [7, 9]
    assert not read({**old, "scalers": {"default": one}}).scalers[("default", ())].dynamic


# Damage


def walk(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields every place below a tree's root, and what is there."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key), value
        yield from walk(value, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], *value: Any) -> Any:
    """Returns a copy with another value at ``path``, or none there."""
    tree = copy.deepcopy(tree)
    place = tree
    for key in path[:-1]:
        place = place[key]
    if value:
        place[path[-1]] = value[0]
    else:
        del place[path[-1]]
    return tree


NEEDED = [
    ("version",),
    ("settings",),
    ("settings", "loss_scale"),
    ("num_losses",),
    ("scalers",),
    *(("scalers", "loss_1", name) for name in ("scale", "inv_scale", "clean", "hysteresis", "streak", "attempts")),
    *(("scalers", "loss_0", name) for name in ("overflows", "bad_losses", "lowest", "highest", "last_bad")),
    ("optimizers",),
    *(("optimizers", 1, name) for name in ("stepped", "skipped", "idle", "latest", "streak")),
]
GARBAGE = ["x", [], -7.5, math.nan, math.inf, {}]


@pytest.mark.parametrize("path", NEEDED, ids=lambda path: ".".join(map(str, path)))
def test_a_damaged_state_names_the_key_and_is_not_half_loaded(path: tuple[Any, ...], state: dict[str, Any]) -> None:
    it = used(growth_interval=3)
    before = it.state_dict()
    versions = [changed(state, path), *(changed(state, path, value) for value in GARBAGE)]
    if path in {("scalers",), ("optimizers",), ("settings",)}:
        versions = [v for v in versions if path[0] not in v or v[path[0]] not in ({}, [])]  # there may be none of them
    if path == ("settings", "loss_scale"):
        versions = versions[:1]
    for damaged in versions:
        with pytest.raises(CheckpointError, match=rf"AmpPrecision.*{path[-1]}") as raised:
            it.load_state_dict(damaged, "AmpPrecision")
        assert "delete" in str(raised.value)
        assert it.state_dict() == before


@pytest.mark.parametrize(
    "schedulers", [3, [3], [{"tried": 1}], [{"tried": 1, "made": "x"}], [{"tried": -1, "made": 0}]]
)
def test_damaged_schedulers_are_named(schedulers: Any, state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"AmpPrecision\['schedulers'\]"):
        engine().load_state_dict({**state, "schedulers": schedulers}, "AmpPrecision")


@pytest.mark.parametrize("name", ["loss", "loss_x", "loss_0_1", "optimizer", "default_1", "critic_0", ""])
def test_an_unknown_scaler_is_named(name: str, state: dict[str, Any]) -> None:
    scalers = {name: state["scalers"]["loss_0"]}
    with pytest.raises(CheckpointError, match=rf"\['scalers'\]\['{name}'\] is no name of a scaler"):
        engine().load_state_dict({**state, "scalers": scalers})


@pytest.mark.parametrize("entry", [7, "state", [1], None])
def test_what_is_no_dict_is_refused(entry: Any) -> None:
    with pytest.raises(CheckpointError, match="a dict is expected"):
        engine().load_state_dict(entry)


def test_an_unknown_format_says_what_is_there() -> None:
    with pytest.raises(CheckpointError, match=r"\['version'\] is missing \(there are: epoch, weights\)"):
        engine().load_state_dict({"epoch": 3, "weights": {}})


def test_a_newer_version_says_which_are_read(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=rf"is {VERSION + 1}, .* reads 1 to {VERSION}"):
        engine().load_state_dict({**state, "version": VERSION + 1})


# What fits


def test_c73_more_losses_than_before_start_anew(state: dict[str, Any]) -> None:
    it = engine(num_losses=5)
    assert it.load_state_dict(state) == ["the scale of loss_3: starts anew", "the scale of loss_4: starts anew"]
    assert it.loss_scales() == engine_with(state).loss_scales()


def engine_with(state: dict[str, Any], **settings: Any) -> Engine:
    it = engine(**settings)
    it.load_state_dict(state)
    return it


def test_c73_fewer_losses_and_optimizers_drop_what_is_surplus(state: dict[str, Any]) -> None:
    it = engine(num_losses=1, optimizers=1)
    assert it.load_state_dict(state) == [
        "the scale of loss_1: dropped, there are 1 losses",
        "the scale of loss_2: dropped, there are 1 losses",
        "the step totals of optimizer 1: dropped",
    ]
    assert list(it.loss_scales()) == ["loss_0"]


def test_more_optimizers_start_their_totals_anew(state: dict[str, Any]) -> None:
    it = engine(optimizers=3)
    assert it.load_state_dict(state) == ["the step totals of optimizer 2: start anew"]
    assert it.counts(it.optimizers[2])[Outcome.STEPPED] == 0


def test_a_scale_for_an_optimizer_that_is_not_there_is_dropped(state: dict[str, Any]) -> None:
    scalers = {"optimizer_0_2": state["scalers"]["loss_0"], "optimizer_1": state["scalers"]["loss_1"]}
    it = engine()
    notes = it.load_state_dict({**state, "scalers": scalers})
    assert notes == ["the scale of optimizer_0_2: dropped, there are 2 optimizers"]
    assert list(it.loss_scales()) == ["optimizer_1"]


@pytest.mark.parametrize(
    ("settings", "scale", "note"),
    [
        ({"loss_scale": 128.0}, 128.0, "dynamic 512 is dropped, it is static 128"),
        ({"max_loss_scale": 256.0, "init_scale": 64.0}, 256.0, "512 is outside"),
        ({"min_loss_scale": 1024.0}, 1024.0, "512 is outside"),
    ],
)
def test_a_scale_that_the_settings_rule_out_is_told(
    settings: dict[str, Any], scale: float, note: str, state: dict[str, Any]
) -> None:
    it = engine(**settings)
    notes = it.load_state_dict(state)
    assert any(n.startswith("the scale of loss_0: ") and note in n for n in notes)
    found = next(iter(it.scalers)).read()
    assert (found.scale, found.inv_scale) == (scale, 1 / scale)
    assert found.overflows == 1.0  # what it has been through stays true


def test_a_static_scale_does_not_become_a_dynamic_one() -> None:
    """From one a dynamic scale would need thousands of steps to get anywhere."""
    it = engine()
    notes = it.load_state_dict(used(level="O3").state_dict())
    assert notes[0] == "the scale of loss_0: static 1 is dropped, it starts at 1024"
    assert set(it.loss_scales().values()) == {1024.0}


def test_settings_are_the_trainings_own(state: dict[str, Any]) -> None:
    it = engine(growth_interval=2)
    assert it.load_state_dict(state) == []
    assert all(scaler.rule.growth_interval == 2 for scaler in it.scalers)


def test_an_edited_scale_keeps_its_inverse_right(state: dict[str, Any]) -> None:
    it = engine_with(changed(state, ("scalers", "loss_0", "scale"), 64.0))
    assert next(iter(it.scalers)).read()[:2] == (64.0, 1 / 64)


def test_fitting_touches_nothing(state: dict[str, Any]) -> None:
    saved = read(state)
    fitted = fit(saved, resolve("O3"), 3, 2)
    assert read(state) == saved
    assert {values["scale"] for values in fitted.scalers.values()} == {1.0}


# Others' formats

APEX = {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 3}, "loss_scaler1": {"loss_scale": 256.0, "unskipped": 1}}


def test_c68_apex_scalers_become_those_of_the_loss_ids() -> None:
    it = engine(num_losses=2)
    assert it.load_state_dict(APEX) == []
    assert it.loss_scales() == {"default": 4096.0, "loss_0": 4096.0, "loss_1": 256.0}
    assert [s.read().clean for s in it.scalers] == [3.0, 3.0, 1.0]


def test_a_lone_apex_scaler_is_where_every_scale_starts() -> None:
    it = engine(num_losses=1)
    assert it.load_state_dict({"loss_scaler0": APEX["loss_scaler0"]}) == []
    loss = next(iter(nets_of(it)))(torch.ones(1, 2)).mean()
    it.backward(loss, loss_id=0)
    assert it.loss_scales()["loss_0"] == 8192.0  # the fourth clean pass


def test_apex_with_more_losses_tells_what_is_dropped() -> None:
    it = engine(num_losses=1)
    assert it.load_state_dict(APEX) == ["the scale of loss_1: dropped, there are 1 losses"]


@pytest.mark.parametrize(
    ("damaged", "key"),
    [
        ({"loss_scaler0": {"loss_scale": 2.0}}, "unskipped"),
        ({"loss_scaler0": {"unskipped": 2}}, "loss_scale"),
        ({"loss_scaler0": {"loss_scale": 0.0, "unskipped": 2}}, "loss_scale"),
        ({"loss_scaler0": 7}, "loss_scaler0"),
        ({"loss_scaler1": APEX["loss_scaler1"]}, "loss_scaler0"),
    ],
)
def test_damaged_apex_states_name_the_key(damaged: Any, key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        engine().load_state_dict(damaged)


def grad_scaler(scale: float = 2048.0) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    return scaler.state_dict()


def test_a_grad_scaler_covers_every_scale() -> None:
    it = engine()
    assert it.load_state_dict(grad_scaler()) == []
    first, second, _ = nets_of(it)
    it.backward(first(torch.ones(1, 2)).mean())
    it.backward(second(torch.ones(1, 2)).mean(), loss_id=2)
    assert it.loss_scales() == {"default": 2048.0, "optimizer_0": 2048.0, "loss_2": 2048.0}


def test_a_grad_scaler_that_fell_to_zero_starts_anew() -> None:
    it = engine()
    (note,) = it.load_state_dict({**grad_scaler(), "scale": 0.0})
    assert "start at 1024" in note
    assert it.loss_scales() == {}


def test_a_damaged_grad_scaler_names_the_key() -> None:
    damaged = grad_scaler()
    del damaged["_growth_tracker"]
    with pytest.raises(CheckpointError, match="_growth_tracker"):
        engine().load_state_dict(damaged)
    with pytest.raises(CheckpointError, match=r"MixedPrecision\['_growth_tracker'\]"):
        engine().load_state_dict({"scale": 3.0}, "MixedPrecision")


def test_a_grad_scaler_can_go_on_from_the_lowest_scale(state: dict[str, Any]) -> None:
    it = engine_with(state)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(grad_scaler_state(it.scalers, it.config.rule))
    other.scale(torch.ones(()))
    assert other.get_scale() == min(it.loss_scales().values()) == 512.0
    assert other.get_growth_interval() == 4
    assert grad_scaler_state([], it.config.rule) == {}
    static = used(level="O3")
    assert grad_scaler_state(static.scalers, static.config.rule) == {}


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ({"AmpPrecision": "mine", "MixedPrecision": grad_scaler()}, "AmpPrecision"),
        ({"OldName": {"version": 1, "scalers": {}}, "MixedPrecision": grad_scaler()}, "OldName"),
        ({"MixedPrecision": grad_scaler(), "amp": APEX}, "MixedPrecision"),
        ({"MyMixedPrecision": grad_scaler()}, "MyMixedPrecision"),
        ({"native_amp_scaling_state": {"scale": 1.0}}, "native_amp_scaling_state"),
        ({"amp": APEX, "epoch": 3}, "amp"),
        ({"state_dict": {"loss_scaler0": torch.ones(1)}, "epoch": 3}, "AmpPrecision"),
    ],
)
def test_a_state_is_found_under_other_names(checkpoint: dict[str, Any], name: str) -> None:
    assert find(checkpoint, "AmpPrecision") == (name, checkpoint.get(name, {}))


def test_an_empty_state_holds_nothing() -> None:
    assert read({}) == Saved()


def test_every_number_of_a_scaler_is_saved() -> None:
    scaler = LossScaler(("loss", (0,)), resolve("O1"), CPU)
    assert set(scaler.read()._fields) | {"attempts"} == set(scaler.state_dict())


# Half on request


class Tied(nn.Module):
    """An embedding tied to a head, a BatchNorm, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "float16", "bfloat16"])
@pytest.mark.parametrize("of", ["module", "state dict"])
def test_c69_half_weights_on_request(dtype: Any, of: str) -> None:
    module = Tied()
    half = export_half(module if of == "module" else module.state_dict(), dtype)
    kept = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    expected = torch.float16 if str(dtype).removeprefix("torch.") == "float16" else torch.bfloat16
    assert {n for n, t in half.items() if t.dtype is torch.float32} == kept
    assert half["embedding.weight"].dtype is expected
    assert half["embedding.weight"] is half["head.weight"]
    assert half["counts"].dtype is torch.int64
    assert torch.equal(half["head.weight"], module.head.weight.to(expected))
    assert module.head.weight.dtype is torch.float32
    Tied().load_state_dict(half)


def test_an_export_keeps_what_is_named() -> None:
    half = export_half(Tied(), keep_batchnorm_fp32=False, keep_fp32=["head.*"])
    dtypes = {name: t.dtype for name, t in half.items() if t.is_floating_point()}
    assert dtypes.pop("head.weight") is torch.float32
    assert set(dtypes.values()) == {torch.float16}


def test_an_export_that_would_overflow_names_the_weight() -> None:
    module = nn.Linear(2, 1)
    module.weight.data[0, 1] = -70000.0
    with pytest.raises(CheckpointError, match=r"'weight' holds 70000, which is beyond torch.float16"):
        export_half(module)
    assert export_half(module, "bfloat16")["weight"].isfinite().all()
    module.weight.data[0, 1] = torch.inf  # it is what it is
    assert not export_half(module)["weight"].isfinite().all()


def test_an_export_knows_two_types() -> None:
    with pytest.raises(ValueError, match="dtype='float64' cannot be used"):
        export_half(nn.Linear(1, 1), "float64")


def test_an_export_shares_nothing_with_the_module() -> None:
    module = nn.Linear(2, 1)
    half: dict[str, Tensor] = export_half(module)
    before = half["weight"].clone()
    module.weight.data.zero_()
    assert torch.equal(half["weight"], before)
