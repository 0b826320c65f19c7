"""A scaler moved on many times, against the closed form of its rule; which scaler a new one starts from."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from lightning_amp.kernels.scale_rule import FIRST_BAD_NONE
from lightning_amp.loss_scaler import DEFAULT_KEY, GRAD_KEY, GRAD_START, Key, LossScaler, LossScalers
from lightning_amp.opt_levels import AmpConfig, resolve

CPU = torch.device("cpu")
FINE, INF, NAN = torch.tensor(1.5), torch.tensor(math.inf), torch.tensor(math.nan)


def scaler(key: Key = DEFAULT_KEY, **settings: Any) -> LossScaler:
    return LossScaler(key, resolve("O1", **settings), CPU)


def move(it: LossScaler, overflow: bool = False, loss: torch.Tensor | None = FINE, times: int = 1) -> float:
    """Moves a scaler on as `collect` and `update` do, and returns the scale that its next pass would run under."""
    for _ in range(times):
        if overflow:
            it.first_bad.fill_(3)
        it.update(loss)
    scale = it.now().scale
    assert scale is not None
    return scale.item()


@pytest.mark.parametrize("growth", [2.0, 4.0, 1.5])
@pytest.mark.parametrize("interval", [1, 3])
def test_clean_passes_grow_the_scale_every_interval_up_to_its_maximum(growth: float, interval: int) -> None:
    it = scaler(init_scale=8.0, growth_factor=growth, growth_interval=interval, max_loss_scale=1000.0)
    for passes in range(1, 60):
        wanted = min(8.0 * growth ** (passes // interval), 1000.0)
        assert move(it) == pytest.approx(wanted, rel=1e-6), passes
    assert it.read().highest == 1000.0


@pytest.mark.parametrize("backoff", [0.5, 0.25, 0.7])
@pytest.mark.parametrize("hysteresis", [1, 3])
def test_c33_overflows_lower_the_scale_to_its_minimum_and_no_further(backoff: float, hysteresis: int) -> None:
    it = scaler(init_scale=2.0**16, backoff_factor=backoff, hysteresis=hysteresis, min_loss_scale=0.01)
    for overflows in range(1, 60):
        wanted = max(2.0**16 * backoff ** max(0, overflows - hysteresis + 1), 0.01)
        assert move(it, overflow=True) == pytest.approx(wanted, rel=1e-5), overflows
    state = it.read()
    assert state.lowest == pytest.approx(0.01)
    assert (state.overflows, state.streak, state.last_bad) == (59, 59, 3)


def test_growth_refills_the_hysteresis_and_a_clean_pass_does_not() -> None:
    it = scaler(init_scale=64.0, hysteresis=2, growth_interval=3)
    assert move(it, overflow=True) == 64.0
    assert move(it, times=2) == 64.0
    assert move(it, overflow=True) == 32.0
    assert move(it, times=3) == 64.0
    assert move(it, overflow=True) == 64.0
    assert move(it, overflow=True) == 32.0


@pytest.mark.parametrize("length", [1, 2, 7])
def test_an_overflow_starts_the_count_of_clean_passes_again(length: int) -> None:
    it = scaler(init_scale=64.0, growth_interval=8)
    for _ in range(5):
        assert move(it, times=length) == it.read().scale
        before = it.read().scale
        assert move(it, overflow=True) == before / 2
    assert move(it, times=7) == 2.0
    assert move(it) == 4.0


def test_overflow_every_so_many_passes_settles_where_growth_and_backoff_meet() -> None:
    """With an overflow after each growth the scale returns to where it was, for as long as one likes."""
    it = scaler(init_scale=1024.0, growth_interval=10)
    for _ in range(40):
        assert move(it, times=10) == 2048.0
        assert move(it, overflow=True) == 1024.0
    assert it.account().overflows == 40
    assert it.account().attempts == 440


@pytest.mark.parametrize("loss", [INF, NAN, torch.tensor([1.0, math.nan])])
def test_a_nonfinite_loss_is_not_the_scales_fault(loss: torch.Tensor) -> None:
    it = scaler(init_scale=64.0, growth_interval=3)
    move(it, times=2)
    assert move(it, overflow=True, loss=loss, times=20) == 64.0
    assert (it.read().overflows, it.read().bad_losses, it.read().streak) == (20, 20, 20)
    assert move(it, times=2) == 64.0
    assert it.read().streak == 0
    assert move(it) == 128.0


def test_with_several_processes_the_gradients_alone_decide() -> None:
    it = LossScaler(DEFAULT_KEY, resolve("O1", init_scale=64.0).for_processes(2), CPU)
    assert move(it, overflow=True, loss=INF) == 32.0
    assert it.account().nonfinite_losses == 1


@pytest.mark.parametrize("loss", [None, FINE, INF])
def test_a_nonfinite_loss_with_finite_gradients_counts_as_clean(loss: torch.Tensor | None) -> None:
    it = scaler(init_scale=64.0, growth_interval=1)
    assert move(it, loss=loss) == 128.0
    assert it.account().overflows == it.account().nonfinite_losses == 0


@pytest.mark.parametrize("scale", [1.0, 128.0, 0.5])
def test_a_static_scale_never_moves_and_still_counts(scale: float) -> None:
    it = scaler(loss_scale=scale, growth_interval=1)
    for overflow in (False, True) * 10:
        if overflow:
            it.first_bad.fill_(0)
        it.update(FINE)
    assert (it.read().scale, it.read().overflows) == (scale, 10)
    assert (it.now().scale is None) is (scale == 1.0)


def test_the_inverse_follows_the_scale_and_the_first_bad_index_is_cleared() -> None:
    it = scaler(init_scale=1024.0, growth_interval=2, growth_factor=3.0)
    for i in range(30):
        move(it, overflow=i % 5 == 0)
        state = it.read()
        assert state.inv_scale == pytest.approx(1.0 / state.scale, rel=1e-6)
        assert it.first_bad.item() == FIRST_BAD_NONE


@pytest.mark.parametrize("passes", [range(8), [2, 4, 5]])
def test_c71_a_saved_scaler_goes_on_as_if_nothing_had_been(passes: Iterable[int]) -> None:
    config = resolve("O1", init_scale=64.0, growth_interval=4, hysteresis=2)
    overflows = set(passes)
    through, saved = LossScaler(DEFAULT_KEY, config, CPU), LossScaler(DEFAULT_KEY, config, CPU)
    for i in range(24):
        move(through, overflow=i in overflows)
        move(saved, overflow=i in overflows)
        state = saved.state_dict()
        assert all(type(value) in (int, float) for value in state.values())
        saved = LossScaler(DEFAULT_KEY, config, CPU)
        saved.load_state_dict(state)
        assert saved.read() == through.read()
        assert saved.account() == through.account()


def test_the_scale_in_hand_is_the_present_one_and_a_kept_one_is_not() -> None:
    it = scaler(init_scale=64.0, growth_interval=1)
    live, kept = it.now(), it.now().kept()
    move(it)
    assert live.scale is not None
    assert kept.scale is not None
    assert kept.inv_scale is not None
    assert (live.scale.item(), kept.scale.item(), kept.inv_scale.item()) == (128.0, 64.0, 1 / 64)
    assert it.now()[:2] != live[:2]


# Many scalers


def scalers(config: AmpConfig | None = None, **scales: float) -> LossScalers:
    """Scalers by name, with these scales."""
    many = LossScalers(config or resolve("O1"), CPU)
    for name, scale in scales.items():
        kind, *indices = name.split("_")
        many.get((kind, tuple(map(int, indices)))).state[0] = scale
    return many


@pytest.mark.parametrize(
    ("key", "start"),
    [
        (("optimizer", (0,)), 4.0),  # the smallest set around it
        (("optimizer", (2,)), 8.0),
        (("optimizer", (0, 2)), 8.0),
        (("optimizer", (3,)), 2.0),  # nothing around it but the default
        (("optimizer", (0, 1, 2, 3)), 2.0),  # a set does not cover one that is wider
        (("loss", (1,)), 2.0),
        (("grad", ()), GRAD_START),
    ],
)
def test_a_new_scaler_starts_from_the_smallest_that_covers_it(key: Key, start: float) -> None:
    many = scalers(default=2.0, optimizer_0_1=4.0, optimizer_0_1_2=8.0, optimizer_1=16.0, loss_0=32.0)
    new = many.get(key)
    assert new.read().scale == start
    assert (new.read().lowest, new.read().highest) == (start, start)
    assert many.get(key) is new


def test_a_new_scaler_takes_over_a_standing_and_no_history() -> None:
    config = resolve("O1", init_scale=64.0, hysteresis=3)
    many = LossScalers(config, CPU)
    cover = many.get(DEFAULT_KEY)
    move(cover, overflow=True, times=2)
    move(cover, times=5)
    new, old = many.get(("optimizer", (0,))).read(), cover.read()
    assert new[:4] == old[:4]
    assert (new.clean, new.hysteresis, new.overflows, new.streak, new.last_bad) == (5.0, 1.0, 0.0, 0.0, -1.0)
    move(many.get(("optimizer", (0,))))
    assert cover.read() == old, "the two share nothing"


@pytest.mark.parametrize(("settings", "start"), [({"init_scale": 8.0}, 8.0), ({"min_loss_scale": 2.0**12}, 2.0**12)])
def test_the_scaler_of_grad_starts_low_and_inside_its_bounds(settings: dict[str, Any], start: float) -> None:
    assert scaler(GRAD_KEY, **settings).read().scale == start
    assert scaler(GRAD_KEY, loss_scale=4096).read().scale == 4096.0


@pytest.mark.parametrize(("key", "name"), [(("loss", (0,)), "loss_0"), (("optimizer", (0, 2)), "optimizer_0_2")])
def test_a_scaler_is_named_by_its_key(key: Key, name: str) -> None:
    assert scaler(key).name == name


def test_replacing_scalers_leaves_none_of_the_old() -> None:
    many = scalers(default=2.0, loss_0=4.0)
    state = many.get(("loss", (0,))).state_dict()
    many.replace({("loss", (1,)): state})
    assert [(s.name, s.read().scale) for s in many] == [("loss_1", 4.0)]
