"""Manual accumulation windows that a checkpoint finds open are finished as if nothing had happened."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_amp import saved_window
from lightning_amp.callbacks import EMAWeights
from tests.helpers.clean_process import in_clean_process
from tests.helpers.modules import Batches, trainer
from tests.helpers.resuming import OVERFLOW, Duel, Spec, Stream, Watch, differences, path_of, train
from tests.helpers.window_training import (
    Norms,
    Windows,
    go_on_at_other_levels,
    run,
    save_while_handling,
    stop_and_go_on,
)

LEVELS = ("O0", "O1", "O2", "O3")
POINTS = [1, 4, OVERFLOW + 1, 11]
"""In the first windows; between two of the second optimizer; after an overflow; in the second epoch."""

KINDS: dict[str, dict[str, Any]] = {
    "zeroed after the step": {},
    "zeroed before the first pass": {"zero": "before"},
    "zeroed in place": {"zero": "anew", "toggled": False},
    "untoggled": {"toggled": False},
    "delayed": {"delay": True},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[tuple[str, str], Any] = {}

    def get(level: str, kind: str) -> Any:
        if (level, kind) not in done:
            folder = tmp_path_factory.mktemp(level)
            done[level, kind] = run(level, folder=folder, save_after=[*POINTS, 12], settings=KINDS[kind]), folder
        return done[level, kind]

    return get


CASES = [(kind, n) for kind in KINDS for n in (POINTS if kind == "zeroed after the step" else POINTS[1:3])]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "batches"), CASES)
def test_c67_manual_windows_are_finished_bit_for_bit(level: str, kind: str, batches: int, runs: Any) -> None:
    whole, folder = runs(level, kind)
    resumed = run(level, path_of(folder, batches), settings=KINDS[kind])
    assert differences(whole.end, resumed.end) == []


class Branching(Windows):
    """One optimizer, zeroed in place, and a branch that the passes of every other window reach."""

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        optimizer, done = self.optimizers(), self.trainer.fit_loop.epoch_loop.total_batch_idx
        if done % 3 == 0:
            optimizer.zero_grad(set_to_none=False)
        y = self.g(batch[0])
        self.manual_backward((y if done % 6 < 3 else self.d(y)).square().mean())
        if done % 3 == 2:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.d.parameters(), *self.g.parameters()], lr=0.01, momentum=0.9)


@pytest.mark.parametrize("level", LEVELS)
def test_c67_gradients_that_were_zeroed_in_place_are_there(level: str, tmp_path: Path) -> None:
    """A parameter with a gradient of zeros is moved by its momentum, one without a gradient is not."""
    points = [4, 5, 7]
    whole = run(level, module=Branching(), folder=tmp_path, save_after=points)
    for n in points:
        assert differences(whole.end, run(level, path_of(tmp_path, n), module=Branching()).end) == []


def test_a_checkpoint_holds_the_gradients_of_open_windows_alone(runs: Any) -> None:
    _, folder = runs("O2", "zeroed after the step")
    files = {n: torch.load(path_of(folder, n), weights_only=True).get("amp_open_window") for n in (*POINTS, 12)}
    assert {n: file and file["optimizers"] for n, file in files.items()} == {
        1: [True, True],
        4: [True, False],
        7: [True, True],
        11: [True, True],
        12: None,
    }
    (process,) = files[4]["processes"]
    assert {g.dtype for g in process["gradients"][0]} == {torch.float32}
    assert process["gradients"][1] == [None] * len(process["gradients"][1])


# Several processes

TWO: dict[str, dict[str, Any]] = {
    "each pass reduced": {},
    "reduced at the end": {"settings": {"unreduced": True}},
    "reduced at the end, untoggled": {"settings": {"unreduced": True, "toggled": False}, "bucket_view": True},
    "automatic": {"automatic": True},
}


def without_running_means(end: dict[str, Any]) -> dict[str, Any]:
    """Each process has its own, and a checkpoint those of the first."""
    weights = {name: w for name, w in end["weights"].items() if not name.startswith("g.1.")}
    return {**end, "weights": weights, "as they are": None}


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("each pass reduced", "O2"),
        *(("reduced at the end", level) for level in LEVELS),
        ("reduced at the end, untoggled", "O2"),
        *(("automatic", level) for level in ("O0", "O1", "O2")),
    ],
)
def test_c67_c86_windows_of_two_processes_are_finished_bit_for_bit(level: str, kind: str, tmp_path: Path) -> None:
    points = [2, OVERFLOW + 1]
    in_clean_process(stop_and_go_on, level, tmp_path, points, **TWO[kind])
    held = torch.load(path_of(tmp_path, 2), weights_only=True)["amp_open_window"]["processes"]
    assert len(held) == (1 if kind == "each pass reduced" else 2)
    for rank in range(2):
        whole = torch.load(tmp_path / f"end of rank {rank}.pt", weights_only=True)
        for n in points:
            again = torch.load(tmp_path / str(n) / f"end of rank {rank}.pt", weights_only=True)
            assert differences(without_running_means(whole), without_running_means(again)) == [], (rank, n)


# Under other circumstances

LEFT_OUT = "the gradients of the accumulation window that was open"


@pytest.fixture
def caught() -> Any:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield lambda: [str(w.message) for w in found if "AmpPrecision" in str(w.message) or "lacks" in str(w.message)]


@pytest.fixture(scope="module")
def whole_norm() -> float:
    norms = Norms()
    run("O0", callbacks=[norms], max_epochs=1)
    return norms.seen[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("saved", "kind"), [*((level, "zeroed after the step") for level in LEVELS), ("O1", "delayed"), ("O3", "delayed")]
)
def test_c73_a_manual_window_is_finished_at_another_level(
    saved: str, level: str, kind: str, runs: Any, whole_norm: float, caught: Callable[[], list[str]]
) -> None:
    _, folder = runs(saved, kind)
    norms = Norms()
    run(level, path_of(folder, 1), callbacks=[norms], max_epochs=1, settings=KINDS[kind])
    assert norms.seen[0] == pytest.approx(whole_norm, rel=0.01)
    assert not any(LEFT_OUT in message for message in caught())


def test_c73_windows_of_two_processes_are_finished_at_another_level(tmp_path: Path) -> None:
    pairs = [("O0", "O2"), ("O2", "O1"), ("O1", "O0")]
    in_clean_process(go_on_at_other_levels, tmp_path, pairs)
    whole = torch.load(tmp_path / "O0" / "norms.0", weights_only=True)[0]
    for saved, resumed in pairs:
        for rank in (0, 1):
            norms = torch.load(tmp_path / f"{saved} to {resumed}" / f"norms.{rank}", weights_only=True)
            assert norms[0] == pytest.approx(whole, rel=0.01), (saved, resumed, rank)
    found = [g for g in Look.gradients("O1", path_of(tmp_path / "O2", 2)) if g is not None]
    file = torch.load(path_of(tmp_path / "O2", 2), weights_only=True)["amp_open_window"]
    shares = [[g.float() for mine in share["gradients"] for g in mine if g is not None] for share in file["processes"]]
    inverse = file["processes"][0]["pending"][0]["inv_scale"]
    for g, first, second in zip(found, *shares, strict=True):
        torch.testing.assert_close(g, (first + second) / 2 * inverse)


class Look(Callback):
    """What gradients there are before the first batch of a resumed training."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if not hasattr(self, "seen"):
            owned = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
            self.seen = [None if p.grad is None else p.grad.clone() for p in owned]

    @classmethod
    def gradients(cls, level: str, path: Path, **more: Any) -> list[Tensor | None]:
        look = cls()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(level, path, callbacks=[look], **more)
        return look.seen


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_window_is_there_before_any_hook_sees_a_batch(level: str, runs: Any) -> None:
    _, folder = runs(level, "zeroed after the step")
    assert all(g is not None and g.dtype is torch.float32 for g in Look.gradients(level, path_of(folder, 1)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_start"])
def test_a_window_that_was_not_gone_on_with_yet_is_saved_again(
    level: str, hook: str, runs: Any, tmp_path: Path
) -> None:
    whole, folder = runs(level, "zeroed after the step")
    again = Callback()

    def save(trainer: pl.Trainer, *_: Any) -> None:
        setattr(again, hook, lambda *_: None)
        trainer.save_checkpoint(tmp_path / "again.ckpt")

    setattr(again, hook, save)
    run(level, path_of(folder, 1), callbacks=[again], max_epochs=1)
    first, second = (
        torch.load(path, weights_only=True)["amp_open_window"] for path in (path_of(folder, 1), tmp_path / "again.ckpt")
    )
    assert differences(first, second) == []
    if hook == "on_train_start":  # no checkpoint holds the place of a batch that is under way
        assert differences(whole.end, run(level, tmp_path / "again.ckpt").end) == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_window_that_is_open_when_fit_ends_is_saved_by_hand(level: str, runs: Any, tmp_path: Path) -> None:
    whole, _ = runs(level, "zeroed after the step")
    watch, module = Watch(), Windows(overflows=level != "O0")
    it = trainer(Spec(level).plugin(num_losses=2, growth_interval=3), max_epochs=1, callbacks=[EMAWeights(0.9), watch])
    it.fit(module, Stream())
    it.save_checkpoint(tmp_path / "after.ckpt")
    assert differences(whole.end, run(level, tmp_path / "after.ckpt").end) == []


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_training_step_that_was_cut_short_has_gathered_is_not_used_twice(
    level: str, tmp_path: Path, caught: Callable[[], list[str]]
) -> None:
    module = Windows(overflows=False)
    module.within = lambda: module.trainer.save_checkpoint(tmp_path / "within.ckpt")
    run(level, module=module, max_epochs=1)
    assert set(caught()) == {
        "This checkpoint lacks the gradients that no step has used yet: it was saved within a training step, whose "
        "place no checkpoint holds. Save between batches to go on from them."
    }
    assert all(g is None for g in Look.gradients(level, tmp_path / "within.ckpt", max_epochs=2))


class StopWithin(Windows):
    """Fails in its fifth training step, before or after its first backward pass."""

    def __init__(self, before: bool) -> None:
        super().__init__(overflows=False)
        self.before = before

    def d_losses(self, x: Tensor) -> Any:
        return super().d_losses(x) if not self.before else self.stop() or super().d_losses(x)

    def g_loss(self, x: Tensor) -> Tensor:
        return super().g_loss(x) if self.before else self.stop() or super().g_loss(x)

    def stop(self) -> None:
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == 4:
            raise RuntimeError("stop")


@pytest.mark.parametrize("before", [True, False])
def test_a_window_is_saved_on_an_exception_unless_the_batch_has_added_to_it(
    before: bool, tmp_path: Path, caught: Callable[[], list[str]]
) -> None:
    keep = ModelCheckpoint(tmp_path, filename="stopped", save_on_exception=True, every_n_train_steps=1000)
    with pytest.raises(RuntimeError, match="stop"):
        run("O1", module=StopWithin(before), callbacks=[keep], enable_checkpointing=True)
    assert ("amp_open_window" in torch.load(tmp_path / "stopped.ckpt", weights_only=True)) is before
    assert len(caught()) == (not before)


def test_two_processes_do_not_wait_for_each_other_on_an_exception(tmp_path: Path) -> None:
    in_clean_process(save_while_handling, tmp_path)
    assert "amp_open_window" not in torch.load(tmp_path / "stopped.ckpt", weights_only=True)


def edited(path: Path, change: Callable[[Any], Any], folder: Path) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint["amp_open_window"])
    torch.save(checkpoint, folder / "changed.ckpt")
    return folder / "changed.ckpt"


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("version", lambda w: w.pop("version")),
        ("version", lambda w: w.update(version=2)),
        ("optimizers", lambda w: w.update(optimizers=None)),
        ("waiting", lambda w: w["waiting"].pop()),
        ("kind", lambda w: w.pop("kind")),
        ("length", lambda w: w.update(length="long")),
        ("processes", lambda w: w.update(processes=[])),
        ("gradients", lambda w: w["processes"][0].pop("gradients")),
        ("gradients", lambda w: w["processes"][0]["gradients"].pop()),
        ("gradients", lambda w: w["processes"][0].update(gradients=[3, 4, 5])),
        ("gradients", lambda w: w["processes"][0]["gradients"].__setitem__(0, ["x"])),
        ("scaler", lambda w: w["processes"][0]["pending"][0].pop("scaler")),
        ("scale", lambda w: w["processes"][0]["pending"][0].update(scale=0.0)),
        ("inv_scale", lambda w: w["processes"][0]["pending"][0].update(inv_scale=float("nan"))),
        ("places", lambda w: w["processes"][0]["pending"][0].update(places=[[7, 0]])),
        ("losses", lambda w: w["processes"][0]["pending"][0].update(losses=[1.0])),
    ],
)
def test_a_damaged_window_stops_fit_and_names_the_key(key: str, change: Any, runs: Any, tmp_path: Path) -> None:
    _, folder = runs("O1", "delayed")
    module, plugin = Windows(), Spec("O1").plugin(num_losses=2)
    with pytest.raises(ValueError, match=rf"amp_open_window.*\['{key}'\].*(then lacks its first batches)"):
        run("O1", edited(path_of(folder, 1), change, tmp_path), module=module, plugin=plugin)
    assert plugin.loss_scales() == {}


class OneOptimizer(Windows):
    def configure_optimizers(self) -> Any:
        adams, schedulers = super().configure_optimizers()
        return adams[:1], schedulers[:1]


class ThreeOptimizers(Windows):
    def configure_optimizers(self) -> Any:
        adams, schedulers = super().configure_optimizers()
        third = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        return [*adams, third], schedulers


@pytest.mark.parametrize("kind", ["zeroed after the step", "delayed"])
@pytest.mark.parametrize("module", [OneOptimizer, ThreeOptimizers])
def test_c73_what_fits_of_a_window_goes_on_with_another_number_of_optimizers(
    module: type[Windows], kind: str, runs: Any, caught: Callable[[], list[str]]
) -> None:
    _, folder = runs("O1", kind)
    saved = torch.load(path_of(folder, 1), weights_only=True)["amp_open_window"]["processes"][0]
    seen: list[Any] = []

    class Only(module):
        def on_train_batch_start(self, *_: Any) -> int:
            seen.extend(None if p.grad is None else p.grad.clone() for p in self.d.parameters())
            return -1

    run("O1", path_of(folder, 1), module=Only(), max_epochs=1)
    assert differences(seen, saved["gradients"][0]) == []
    told = f"{LEFT_OUT}, those of optimizer 1: dropped, there are 1"
    assert (told in "".join(caught())) is (module is OneOptimizer)
    assert "are others" not in "".join(caught())


def test_c73_a_window_of_other_parameters_is_dropped_with_a_word(
    runs: Any, tmp_path: Path, caught: Callable[[], list[str]]
) -> None:
    _, folder = runs("O1", "delayed")
    path = edited(path_of(folder, 1), lambda w: w["processes"][0]["gradients"][1].reverse(), tmp_path)
    look = Look()
    run("O1", path, callbacks=[look], max_epochs=1)
    of_first = len(list(Windows().d.parameters()))
    assert all(g is not None for g in look.seen[:of_first])
    assert all(g is None for g in look.seen[of_first:])
    assert f"{LEFT_OUT}, those of optimizer 1: dropped, the parameters are others" in caught()[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("length", [1, 2])
def test_c73_an_automatic_window_of_another_length_is_dropped_with_a_word(
    level: str, length: int, tmp_path: Path, caught: Callable[[], list[str]]
) -> None:
    train(Spec(level, automatic=True, window=4), folder=tmp_path, save_after=[1], max_epochs=1)
    look = Look()
    train(Spec(level, automatic=True, window=length), path_of(tmp_path, 1), callbacks=[look], max_epochs=1)
    assert all(g is None for g in look.seen)
    assert f"{LEFT_OUT}: dropped, it was to be 4 batches long, and windows are {length} now" in caught()[0]
    assert len(caught()) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_plain_lightning_goes_on_without_the_window(level: str, runs: Any) -> None:
    _, folder = runs(level, "delayed")

    class Plain(Windows):
        def manual_backward(self, loss: Tensor, *args: Any, **_: Any) -> None:
            super().manual_backward(loss, *args)

    module = Plain(overflows=False)
    it = trainer(max_epochs=2)
    saved = torch.load(path_of(folder, 1), weights_only=True)
    assert saved_window.ENTRY in saved
    it.fit(module, Stream(), ckpt_path=path_of(folder, 1), weights_only=True)
    assert it.current_epoch == 2
    assert any(not torch.equal(p, saved["state_dict"][name]) for name, p in module.named_parameters())


class Validated(Duel):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.g(batch)


class SaveInValidation(Callback):
    """Saves in the middle of the first validation and at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.save(trainer, "middle")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.save(trainer, "end")

    def save(self, trainer: pl.Trainer, when: str) -> None:
        path = self.folder / f"{when}.ckpt"
        if not trainer.sanity_checking and not path.exists():
            trainer.save_checkpoint(path)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["middle", "end"])
def test_a_window_that_is_open_during_a_validation_is_finished(level: str, when: str, tmp_path: Path) -> None:
    """What is made in a validation, which runs in inference mode, could not be added to afterwards."""

    def fit(resume: Path | None) -> dict[str, Any]:
        watch, spec = Watch(), Spec(level, automatic=True, window=4)
        callbacks = [EMAWeights(0.9), SaveInValidation(tmp_path), watch]
        more = {"accumulate_grad_batches": 4, "val_check_interval": 3, "num_sanity_val_steps": 1}
        it = trainer(spec.plugin(), max_epochs=2, callbacks=callbacks, **more)
        module = Validated(automatic=True, overflows=False)
        it.fit(module, Stream(), Batches([torch.ones(4, 8)] * 2), ckpt_path=resume, weights_only=resume and True)
        return watch.end

    whole = fit(None)
    assert "amp_open_window" in torch.load(tmp_path / f"{when}.ckpt", weights_only=True)
    assert differences(whole, fit(tmp_path / f"{when}.ckpt")) == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_window_whose_gradients_were_zeroed_is_not_saved(level: str, tmp_path: Path) -> None:
    class Zero(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            pl_module.zero_grad()

    run(level, folder=tmp_path, save_after=[1], callbacks=[Zero()], max_epochs=1)
    assert "amp_open_window" not in torch.load(path_of(tmp_path, 1), weights_only=True)


class Compiled(Duel):
    """Its networks are compiled, and saved under the names that torch gives them."""

    def __init__(self) -> None:
        super().__init__(automatic=True)
        self.d, self.g = (torch.compile(net, backend="eager") for net in (self.d, self.g))


@pytest.mark.parametrize("level", LEVELS)
def test_a_window_of_compiled_networks_is_finished(level: str, tmp_path: Path) -> None:
    spec = Spec(level, automatic=True, window=4)
    whole = train(spec, folder=tmp_path, save_after=[6], module=Compiled())
    saved = torch.load(path_of(tmp_path, 6), weights_only=True)["state_dict"]
    assert saved.keys() == Compiled().state_dict().keys()
    assert {t.dtype for t in saved.values() if t.is_floating_point()} == {torch.float32}
    assert differences(whole.end, train(spec, path_of(tmp_path, 6), module=Compiled()).end) == []


class Iterated(Windows):
    """Takes its batches from Lightning's iterator."""

    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        batch, index, _ = next(dataloader_iter)
        super().training_step(batch, index)


def test_a_window_is_finished_where_a_step_fetches_its_batches(tmp_path: Path) -> None:
    def fit(resume: Path | None) -> dict[str, Any]:
        watch = Watch(tmp_path, [] if resume else [4])
        it = trainer(Spec("O1").plugin(num_losses=2), callbacks=[watch])
        it.fit(Iterated(overflows=False), Stream(), ckpt_path=resume, weights_only=resume and True)
        return watch.end

    assert differences(fit(None), fit(path_of(tmp_path, 4))) == []


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_window_waits_for_a_batch_of_the_training(level: str, runs: Any) -> None:
    class Validate(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            with torch.inference_mode():  # a validation that was interrupted comes first
                trainer.precision_plugin.convert_input(torch.ones(1))

    whole, folder = runs(level, "zeroed after the step")
    assert differences(whole.end, run(level, path_of(folder, 1), callbacks=[Validate()]).end) == []
