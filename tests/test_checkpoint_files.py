"""Checkpoints are float32 and plain whatever trained: in every file, for every reader, at every moment."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from lightning_amp import AmpPrecision
from lightning_amp.checkpoint import export_half
from tests.helpers.modules import LEVELS, amp, fit, trainer
from tests.helpers.resuming import BATCHES, Duel, Spec, Stream, differences, state_of, train

HALF_WEIGHTS = ("O2", "O3")


class Visit(Callback):
    """Saves in every way there is after the fifth batch, and notes the masters as the optimizers would hold them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.masters: dict[str, Tensor] = {}
        self.files: dict[str, bytes] = {}
        self.copies: dict[str, nn.Module] = {}
        self.shown: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch or batch_idx != 4:
            return
        trainer.save_checkpoint(self.folder / "full.ckpt")
        trainer.save_checkpoint(self.folder / "weights.ckpt", weights_only=True)
        self.files = {"net": _bytes(pl_module.g.state_dict()), "module": _bytes(pl_module), "g": _bytes(pl_module.g)}
        self.copies = {
            "deepcopy": copy.deepcopy(pl_module),
            "pickle": pickle.loads(pickle.dumps(pl_module)),
            "torch.save": torch.load(io.BytesIO(self.files["module"]), weights_only=False),
        }
        self.shown = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        plugin: Any = trainer.precision_plugin
        for optimizer in trainer.optimizers:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            names = [n for p in params for n, q in pl_module.named_parameters() if p is q]
            if plugin.config.passive:
                self.masters |= {n: p.detach().clone() for n, p in zip(names, params, strict=True)}
                continue
            with plugin.masters(optimizer):
                held = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
            self.masters |= dict(zip(names, held, strict=True))


def _bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Visit]:
    """A training at each level, visited on its way."""
    found = {}
    for level in LEVELS:
        found[level] = Visit(tmp_path_factory.mktemp(level))
        train(Spec(level), callbacks=[found[level]], max_epochs=1)
    return found


def saved(visit: Visit, name: str = "full") -> Any:
    return torch.load(visit.folder / f"{name}.ckpt", weights_only=True)


# What is in the file


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["full", "weights"])
def test_c75_c76_weights_are_float32_and_there_once(level: str, name: str, visits: dict[str, Visit]) -> None:
    file = saved(visits[level], name)
    assert file["state_dict"].keys() == Duel().state_dict().keys()
    assert {t.dtype for t in file["state_dict"].values() if t.is_floating_point()} == {torch.float32}
    assert ("optimizer_states" in file) is (name == "full")
    assert ("AmpPrecision" in file) is (name == "full" and level != "O0")


@pytest.mark.parametrize("level", LEVELS)
def test_c69_saved_weights_are_the_masters(level: str, visits: dict[str, Visit]) -> None:
    visit = visits[level]
    for name, master in visit.masters.items():
        assert torch.equal(saved(visit)["state_dict"][name], master.float()), name
    if level == "O2":  # which a half weight could not hold
        assert any(not torch.equal(m, m.half().float()) for m in visit.masters.values())


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_no_optimizer_owns_come_back_as_they_were(level: str, visits: dict[str, Visit]) -> None:
    assert torch.equal(saved(visits[level])["state_dict"]["teacher.weight"], Duel().teacher.weight)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_c70_optimizer_state_is_float32_in_the_file(level: str, visits: dict[str, Visit]) -> None:
    states = [s for o in saved(visits[level])["optimizer_states"] for s in o["state"].values()]
    assert {v.dtype for s in states for v in s.values()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_a_submodule_saved_in_mid_training_is_float32(level: str, visits: dict[str, Visit]) -> None:
    net = torch.load(io.BytesIO(visits[level].files["net"]), weights_only=True)
    whole = saved(visits[level])["state_dict"]
    assert differences(dict(net), {n.removeprefix("g."): w for n, w in whole.items() if n.startswith("g.")}) == []


class Wide(pl.LightningModule):
    """Wide enough that weights make up the file, with a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"a": nn.Embedding(512, 128), "b": nn.Linear(128, 512, bias=False)})
        self.net["b"].weight = self.net["a"].weight

    def training_step(self, *_: Any) -> Tensor:
        return self.net["b"](self.net["a"](torch.arange(8))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), eps=1e-4, fused=True)


def test_c76_files_are_no_larger_at_o2(tmp_path: Path) -> None:
    sizes = {}
    for level in LEVELS:
        it = fit(Wide(), amp(level), [0] * 2)
        for weights_only in (False, True):
            it.save_checkpoint(tmp_path / "x.ckpt", weights_only=weights_only)
            sizes[level, weights_only] = (tmp_path / "x.ckpt").stat().st_size
    for weights_only in (False, True):
        for level in ("O1", "O2"):
            assert sizes[level, weights_only] == pytest.approx(sizes["O0", weights_only], rel=0.05)
        assert sizes["O3", weights_only] <= sizes["O0", weights_only] * 1.05  # Adam's state is half there


@pytest.mark.parametrize("level", LEVELS)
def test_c76_an_open_window_adds_one_copy_of_the_gradients(level: str, tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, out: Any, batch: Any, index: int) -> None:
            trainer.save_checkpoint(tmp_path / f"{index}.ckpt")
            trainer.save_checkpoint(tmp_path / f"{index} weights.ckpt", weights_only=True)

    fit(Wide(), amp(level), [0] * 4, accumulate_grad_batches=2, callbacks=[Save()])
    sizes = [(tmp_path / f"{i}.ckpt").stat().st_size for i in range(4)]
    weights = [(tmp_path / f"{i} weights.ckpt").stat().st_size for i in range(4)]
    once = weights[3] / (2 if level == "O3" else 1)  # O3 has half gradients
    assert sizes[2] - sizes[3] == pytest.approx(once, rel=0.05)
    assert sizes[1] == pytest.approx(sizes[3], rel=0.01)
    assert weights[2] == pytest.approx(weights[3], rel=0.01)


@pytest.mark.parametrize("level", LEVELS)
def test_a_truncated_file_is_refused_before_anything_is_touched(
    level: str, visits: dict[str, Visit], tmp_path: Path
) -> None:
    whole = (visits[level].folder / "full.ckpt").read_bytes()
    (tmp_path / "short.ckpt").write_bytes(whole[: len(whole) // 2])
    module, plugin = Duel(), Spec(level).plugin()
    with pytest.raises((OSError, RuntimeError)):  # torch tells, before anybody else sees it
        trainer(plugin).fit(module, Stream(), ckpt_path=tmp_path / "short.ckpt", weights_only=True)
    assert plugin.loss_scales() == {}
    assert differences(dict(module.state_dict()), dict(Duel().state_dict())) == []


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_tied_weights_are_one_tensor_in_a_state_dict(level: str) -> None:
    seen: list[dict[str, Tensor]] = []
    module = Wide()
    module.on_train_batch_end = lambda *_: seen.extend([module.state_dict(), module.state_dict()])  # type: ignore[method-assign]
    fit(module, amp(level))
    first, second = seen
    assert first["net.a.weight"] is first["net.b.weight"]
    assert first["net.a.weight"].dtype is torch.float32
    assert first["net.a.weight"] is not second["net.a.weight"]
    assert differences(first["net.a.weight"], second["net.a.weight"]) == []


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_a_state_dict_is_not_changed_by_what_comes_after(level: str) -> None:
    """Asynchronous savers write it while training goes on."""
    module, seen = Wide(), []

    def keep(*_: Any) -> None:
        state = module.state_dict()
        seen.append((state, copy.deepcopy(state)))

    module.on_train_batch_end = keep  # type: ignore[method-assign]
    fit(module, amp(level), [0] * 3)
    assert all(differences(dict(state), dict(then)) == [] for state, then in seen)
    assert not torch.equal(seen[0][0]["net.a.weight"], seen[2][0]["net.a.weight"])


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_keep_vars_and_hooks_of_others_are_respected(level: str) -> None:
    module, seen = Wide(), {}

    def double(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    def look(*_: Any) -> None:
        seen["vars"] = module.net["b"].state_dict(keep_vars=True)["weight"] is module.net["b"].weight
        seen["doubled"] = module.net["a"].state_dict()["weight"]
        seen["shown"] = module.net["a"].weight.detach().clone()

    module.net["a"].register_state_dict_post_hook(double)
    module.on_train_batch_end = look  # type: ignore[method-assign]
    fit(module, amp(level))
    assert seen["vars"]
    assert seen["doubled"].dtype is torch.float32
    assert torch.equal(seen["doubled"], seen["shown"].float() * 2)


# Who can read it


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["full", "weights"])
def test_plain_pytorch_and_lightning_load_it_strictly(level: str, name: str, visits: dict[str, Visit]) -> None:
    visit = visits[level]
    plain = Duel()
    plain.load_state_dict(saved(visit, name)["state_dict"], strict=True)
    assert differences(dict(plain.state_dict()), dict(saved(visit, name)["state_dict"])) == []
    loaded = Duel.load_from_checkpoint(visit.folder / f"{name}.ckpt", strict=True, weights_only=True)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert differences(dict(loaded.state_dict()), dict(saved(visit, name)["state_dict"])) == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_weights_only_checkpoint_is_loaded_in_training(level: str, visits: dict[str, Visit]) -> None:
    """As Tuner.lr_find and users in hooks do: the masters get the exact values, not their rounding."""
    values = saved(visits["O2"], "weights")["state_dict"]
    seen: dict[str, Any] = {}

    class Load(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.load_state_dict(values)
            seen.update(state_of(trainer)["weights"])

    train(Spec(level), callbacks=[Load()], max_epochs=1)
    assert differences(seen, dict(values)) == []


@pytest.mark.parametrize("level", LEVELS)
def test_apex_checkpoints_with_half_weights_are_loaded(level: str) -> None:
    halves = {n: t.half() if t.is_floating_point() else t for n, t in Duel().state_dict().items()}
    module = Duel()
    module.load_state_dict(halves)
    seen = {}
    module.on_train_start = lambda: seen.update(state_of(module.trainer)["weights"])  # type: ignore[method-assign]
    trainer(Spec(level).plugin()).fit(module, Stream())
    assert differences(seen, {n: t.float() if t.is_floating_point() else t for n, t in halves.items()}) == []


# Copies


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_made_in_training_stands_alone(level: str, how: str, visits: dict[str, Visit]) -> None:
    visit = visits[level]
    other: Any = visit.copies[how]
    for name, param in other.named_parameters():
        assert torch.equal(param, visit.shown[name])
        assert param.grad is None
    assert other.state_dict()["g.0.weight"].dtype is visit.shown["g.0.weight"].dtype  # its hooks are dead
    x = torch.randn(4, 8)
    other.d(other.g(x)).mean().backward()  # it casts its inputs as the original does
    assert all(p.grad.dtype is p.dtype for p in other.d.parameters())
    other.float()
    assert {t.dtype for t in other.state_dict().values() if t.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_a_pickle_holds_no_plugin_and_no_master(level: str, visits: dict[str, Visit]) -> None:
    for name in ("module", "g"):
        assert b"master" not in visits[level].files[name]
        assert b"AmpPrecision" not in visits[level].files[name]
    if level in HALF_WEIGHTS:
        assert len(visits[level].files["g"]) < len(visits["O0"].files["g"]) + 4000  # half weights and some hooks


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_copies_before_and_after_training_are_as_without_the_plugin(level: str, moment: str) -> None:
    module = Duel(overflows=False)
    if moment == "after":
        trainer(Spec(level).plugin()).fit(module, Stream())
    module.trainer = None  # type: ignore[assignment]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert differences(dict(other.state_dict()), dict(module.state_dict())) == []
        assert all(not m._forward_pre_hooks and not m._state_dict_hooks for m in other.modules())
        assert {p.dtype for p in other.parameters()} == {torch.float32}
        trainer(Spec(level).plugin()).fit(other, Stream())  # and it trains


def test_c69_half_weights_of_a_module_in_training() -> None:
    module, seen = Duel(overflows=False), {}
    module.on_train_end = lambda: seen.update(export_half(module.g))  # type: ignore[method-assign]
    trainer(Spec("O2").plugin()).fit(module, Stream())
    assert torch.equal(seen["0.weight"], module.g[0].weight.half())
    assert seen["1.running_mean"].dtype is torch.float32


# The plugin's own entry


def entry(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)["AmpPrecision"]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_checkpoint_saved_after_fit_is_that_of_its_end(level: str, tmp_path: Path) -> None:
    """The plugin's teardown comes before a user's last save."""
    module, plugin = Duel(), Spec(level).plugin()
    at_the_end: list[dict[str, Any]] = []
    module.on_train_end = lambda: at_the_end.append(state_of(module.trainer))  # type: ignore[method-assign]
    it = trainer(plugin)
    it.fit(module, Stream())
    it.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert differences(at_the_end[0]["plugin"], saved["AmpPrecision"]) == []
    assert differences(at_the_end[0]["weights"], dict(saved["state_dict"])) == []
    assert differences(at_the_end[0]["optimizers"], saved["optimizer_states"]) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_evaluation_between_forgets_nothing_and_loads_nothing(level: str, tmp_path: Path) -> None:
    class Tested(Duel):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.g(batch[0])

    module, plugin = Tested(), Spec(level).plugin()
    it = trainer(plugin)
    early: list[Path] = []

    def save_early(*_: Any) -> None:
        if not early:
            early.append(tmp_path / "early.ckpt")
            it.save_checkpoint(early[0])

    module.on_train_batch_end = save_early  # type: ignore[method-assign]
    it.fit(module, Stream())
    it.save_checkpoint(tmp_path / "before.ckpt")
    it.test(module, Stream(), verbose=False)
    it.save_checkpoint(tmp_path / "after.ckpt")
    assert differences(entry(tmp_path / "before.ckpt"), entry(tmp_path / "after.ckpt")) == []
    it.test(module, Stream(), ckpt_path=early[0], verbose=False, weights_only=True)
    it.save_checkpoint(tmp_path / "last.ckpt")
    assert differences(entry(tmp_path / "before.ckpt"), entry(tmp_path / "last.ckpt")) == []


def test_a_checkpoint_that_was_only_evaluated_does_not_reach_a_later_fit(visits: dict[str, Visit]) -> None:
    module, plugin = Duel(), Spec("O1").plugin()
    module.predict_step = lambda batch, batch_idx: module.g(batch[0])  # type: ignore[method-assign, assignment]
    it = trainer(plugin)
    it.predict(module, Stream(), ckpt_path=visits["O1"].folder / "full.ckpt", weights_only=True)
    starts: list[dict[str, float]] = []
    module.on_train_start = lambda: starts.append(plugin.loss_scales())  # type: ignore[method-assign]
    it.fit(module, Stream())
    assert starts == [{}]


def test_models_saved_by_a_callback_keep_the_best(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, save_weights_only=True, filename="only")
    train(Spec("O2"), callbacks=[keep], enable_checkpointing=True)
    file = torch.load(tmp_path / "only.ckpt", weights_only=True)
    assert {t.dtype for t in file["state_dict"].values() if t.is_floating_point()} == {torch.float32}
    assert "optimizer_states" not in file
    assert "AmpPrecision" not in file


def test_a_users_on_load_checkpoint_sees_float32(visits: dict[str, Visit]) -> None:
    seen: list[Any] = []

    class Looking(Duel):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.extend(t.dtype for t in checkpoint["state_dict"].values() if t.is_floating_point())

    trainer(Spec("O2").plugin(), max_epochs=2).fit(
        Looking(), Stream(), ckpt_path=visits["O2"].folder / "full.ckpt", weights_only=True
    )
    assert set(seen) == {torch.float32}


@pytest.fixture
def caught() -> Any:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield lambda: [str(w.message) for w in found if "AmpPrecision went on" in str(w.message)]


def go_on(checkpoint: dict[str, Any], plugin: Any, path: Path) -> AmpPrecision:
    """Resumes from a checkpoint that was changed, as far as its first epoch lasts."""
    torch.save(checkpoint, path / "changed.ckpt")
    trainer(plugin).fit(Duel(), Stream(), ckpt_path=path / "changed.ckpt", weights_only=True)
    return plugin  # type: ignore[no-any-return]


class Renamed(AmpPrecision):
    """The plugin under another name."""


def scales_at(checkpoint: dict[str, Any]) -> dict[str, float]:
    return {name: values["scale"] for name, values in checkpoint["AmpPrecision"]["scalers"].items()}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_plugin_of_another_class_finds_its_state(
    level: str, visits: dict[str, Visit], tmp_path: Path, caught: Callable[[], list[str]]
) -> None:
    checkpoint = saved(visits[level])
    plugin = Renamed(level, num_losses=3, growth_interval=2000)  # type: ignore[arg-type]
    go_on(checkpoint, plugin, tmp_path)
    assert caught() == []
    assert {n: a.attempts for n, a in plugin.accounts().items()} == dict.fromkeys(scales_at(checkpoint), BATCHES)
    half, whole = scales_at(checkpoint)["loss_0"], plugin.loss_scales()["loss_0"]
    assert whole == half / 2  # the overflow that came after


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        (lambda c: c.pop("AmpPrecision") and c.pop("MixedPrecision"), ["there are none to go on with"]),
        (lambda c: c["AmpPrecision"]["scalers"].pop("loss_1"), []),
        (lambda c: c["AmpPrecision"].update(num_losses=2), ["the scale of loss_2: starts anew"]),
        (
            lambda c: c["AmpPrecision"]["scalers"].update(loss_7=c["AmpPrecision"]["scalers"]["loss_0"]),
            ["the scale of loss_7: dropped, there are 3 losses"],
        ),
        (lambda c: c["AmpPrecision"]["optimizers"].pop(), ["the step totals of optimizer 1: start anew"]),
    ],
)
def test_c73_one_warning_lists_what_does_not_fit(
    change: Any, notes: list[str], visits: dict[str, Visit], tmp_path: Path, caught: Callable[[], list[str]]
) -> None:
    checkpoint = saved(visits["O2"])
    change(checkpoint)
    go_on(checkpoint, Spec("O2").plugin(), tmp_path)
    assert len(caught()) == bool(notes)
    assert all(note in caught()[0] for note in notes)


def test_c73_from_one_loss_to_three_and_back(tmp_path: Path, caught: Callable[[], list[str]]) -> None:
    class One(Duel):
        def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().manual_backward(loss, *args, **kwargs | {"loss_id": 0})

    for first, second, said in ((One, Duel, 2), (Duel, One, 2)):
        plugin = Spec("O1").plugin(num_losses=1 if first is One else 3)
        it = trainer(plugin)
        it.fit(first(), Stream())
        it.save_checkpoint(tmp_path / "x.ckpt")
        other = Spec("O1").plugin(num_losses=1 if second is One else 3)
        trainer(other, max_epochs=2).fit(second(), Stream(), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
        (message,) = caught()[-1:]
        assert sum(f"the scale of loss_{i}" in message for i in (1, 2)) == said
        assert other.accounts()["loss_0"].attempts > plugin.accounts()["loss_0"].attempts


def test_a_damaged_entry_stops_fit_and_names_the_key(visits: dict[str, Visit], tmp_path: Path) -> None:
    checkpoint = saved(visits["O2"])
    del checkpoint["AmpPrecision"]["scalers"]["loss_1"]["clean"]
    plugin = Spec("O2").plugin()
    with pytest.raises(ValueError, match=r"AmpPrecision\['scalers'\]\['loss_1'\]\['clean'\] is missing"):
        go_on(checkpoint, plugin, tmp_path)
    assert plugin.loss_scales() == {}


def test_only_an_open_window_is_in_a_checkpoint(tmp_path: Path) -> None:
    train(Spec("O2", automatic=True, window=4), folder=tmp_path, save_after=[3, 4])
    files = {n: torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in (3, 4)}
    assert {n: "amp_open_window" in file for n, file in files.items()} == {3: True, 4: False}


APEX = {f"loss_scaler{i}": {"loss_scale": 2.0**i * 256, "unskipped": i} for i in range(3)}


def test_c68_apex_state_in_a_checkpoint_is_found(
    visits: dict[str, Visit], tmp_path: Path, caught: Callable[[], list[str]]
) -> None:
    checkpoint = saved(visits["O0"]) | {"amp": APEX}
    plugin = go_on(checkpoint, Spec("O2").plugin(growth_interval=2000), tmp_path)
    assert caught() == []
    assert plugin.loss_scales() == {"default": 256.0, "loss_0": 128.0, "loss_1": 256.0, "loss_2": 1024.0}


def test_a_state_given_by_hand_before_fit_is_gone_on_with(caught: Callable[[], list[str]]) -> None:
    plugin = Spec("O2").plugin(growth_interval=2000)
    plugin.load_state_dict(APEX)
    trainer(plugin).fit(Duel(overflows=False), Stream())
    assert caught() == []
    assert plugin.loss_scales() == {"default": 256.0, "loss_0": 256.0, "loss_1": 512.0, "loss_2": 1024.0}


def test_a_state_given_by_hand_outlives_a_checkpoint_without_one(
    visits: dict[str, Visit], tmp_path: Path, caught: Callable[[], list[str]]
) -> None:
    plugin = Spec("O1").plugin(growth_interval=2000)
    plugin.load_state_dict(APEX)
    go_on(saved(visits["O0"]), plugin, tmp_path)
    assert caught() == []
    assert plugin.loss_scales()["loss_2"] == 1024.0


def test_a_damaged_state_given_by_hand_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"AmpPrecision\['loss_scaler0'\]\['unskipped'\] is missing"):
        amp("O1").load_state_dict({"loss_scaler0": {"loss_scale": 2.0}})


def test_lightning_finds_a_scale_to_go_on_with(visits: dict[str, Visit]) -> None:
    scales = {level: saved(visits[level]).get("MixedPrecision", {}).get("scale") for level in LEVELS}
    assert scales["O0"] is scales["O3"] is None
    for level in ("O1", "O2"):
        assert scales[level] == min(scales_at(saved(visits[level])).values())


def test_a_users_own_entries_stay(visits: dict[str, Visit]) -> None:
    assert {saved(visits[level])["note"] for level in LEVELS} == {"a user's own entry"}
