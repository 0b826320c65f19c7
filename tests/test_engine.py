"""One backward and one step as a whole: the loss, autocast and its cache, norm and clip, joint skips, state."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightning_amp.engine import Engine
from lightning_amp.opt_levels import resolve
from lightning_amp.outcomes import Outcome
from tests.helpers.engines import SCALE, all_equal, backward, engine_of, grad_of, linear_training, param

LEVELS = ["O1", "O2", "O3"]


def plain_sgd(params: Any) -> SGD:
    return SGD(params, lr=1.0)


# The loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_loss_of_any_dtype_is_scaled_beyond_the_range_of_half(dtype: torch.dtype) -> None:
    p = param(60000.0)
    engine = engine_of("O1", [plain_sgd([p])])
    with engine.scaled_loss(p.to(dtype)) as scaled:
        assert scaled.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        assert scaled.item() == p.to(dtype).item() * SCALE
        scaled.backward()
    assert grad_of(p).tolist() == [1.0]


def test_a_loss_of_any_shape_takes_the_gradient_it_is_given() -> None:
    p = param(1.0, 2.0)
    engine = engine_of("O1", [plain_sgd([p])])
    engine.backward(p * 3, gradient=torch.tensor([1.0, 10.0]))
    assert grad_of(p).tolist() == [3.0, 30.0]


@pytest.mark.parametrize("settings", [{"loss_scale": 1.0}, {"dtype": "bfloat16"}])
def test_a_scale_of_one_multiplies_nothing(settings: Any) -> None:
    p = param(1.0)
    engine = engine_of("O1", [plain_sgd([p])], **settings)
    loss = p.sum()
    with engine.scaled_loss(loss) as scaled:
        assert scaled is loss
        scaled.backward()
    assert grad_of(p).tolist() == [1.0]


def interrupted(loss: Tensor) -> None:
    loss.backward()
    raise KeyboardInterrupt


def test_an_exception_in_the_block_leaves_gradients_and_scalers() -> None:
    p = param(1.0)
    engine = engine_of("O1", [plain_sgd([p])])
    engine.backward(p.sum())
    with pytest.raises(KeyboardInterrupt), engine.scaled_loss(p.sum() * 5) as scaled:
        interrupted(scaled)
    assert grad_of(p).tolist() == [1.0]
    assert engine.accounts()["optimizer_0"].attempts == 1


# Autocast


def test_passes_and_steps_run_with_autocast_off() -> None:
    seen: list[torch.dtype] = []

    class Watched(SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)
            return super().step(closure)

    layer, optimizer, engine = linear_training("O1", lambda params: Watched(params, lr=1.0))
    with torch.autocast("cpu", torch.float16):
        layer.weight.register_hook(lambda _: seen.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype))
        backward(engine, layer)
        engine.step(optimizer)
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float16
    assert seen == [torch.float32] * 2


@pytest.mark.parametrize("cache", [True, "step"])
@pytest.mark.parametrize("after", ["pass", "step", "idle"])
def test_c48_casts_are_made_anew_after_a_pass_or_a_step(cache: Any, after: str) -> None:
    layer, optimizer, engine = linear_training("O1", plain_sgd, cache_casts=cache)
    x = torch.ones(1, 2)
    with torch.autocast("cpu", torch.float16, cache_enabled=True):
        other = param(1.0)
        backward(engine, layer) if after == "step" else None
        first = layer(x)
        if after == "pass":
            engine.backward(other.sum())
        else:
            engine.step(optimizer)
        with torch.no_grad():
            layer.weight.fill_(0.0)
            layer.bias.fill_(7.0)
        fresh = layer(x).item() == 7.0
    assert first.dtype is torch.float16
    assert fresh is (after == "step" or (after == "pass" and cache is True))


# Norm and clip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delay", [False, True])
def test_c07_the_norm_is_that_of_the_true_gradients(level: str, delay: bool) -> None:
    layer, optimizer, engine = linear_training(level, plain_sgd, loss_scale=SCALE)
    assert engine.norm(optimizer).item() == 0.0
    engine.backward(layer(torch.tensor([[2.0, -1.0]])).float().sum(), delay_unscale=delay)
    assert engine.norm(optimizer).item() == pytest.approx(6**0.5, rel=1e-3)
    assert engine.norm(optimizer).dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("algorithm", "bound"), [("norm", 0.5), ("norm", 1e4), ("value", 0.3), ("value", 1e4)])
def test_c01_clipping_is_torchs_own_on_true_gradients(level: str, algorithm: str, bound: float) -> None:
    layer, optimizer, engine = linear_training(level, plain_sgd)
    backward(engine, layer)
    reference = [nn.Parameter(torch.zeros_like(p, dtype=torch.float64)) for p in layer.parameters()]
    for p, q in zip(layer.parameters(), reference, strict=True):
        q.grad = grad_of(p).double()
    if algorithm == "norm":
        nn.utils.clip_grad_norm_(reference, bound)
    else:
        nn.utils.clip_grad_value_(reference, bound)
    engine.clip(optimizer, bound, algorithm)
    for p, q in zip(layer.parameters(), reference, strict=True):
        torch.testing.assert_close(grad_of(p).double(), grad_of(q), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_clip_hides_no_nonfinite_gradient_from_the_step(algorithm: str, bad: float) -> None:
    layer, optimizer, engine = linear_training("O1", plain_sgd)
    backward(engine, layer, bad)
    before = [p.detach().clone() for p in layer.parameters()]
    engine.clip(optimizer, 0.1, algorithm)
    engine.step(optimizer)
    assert engine.outcome(optimizer) is Outcome.SKIPPED
    assert all_equal(list(layer.parameters()), before)


def test_a_clip_without_gradients_does_nothing() -> None:
    _, optimizer, engine = linear_training("O1", plain_sgd)
    engine.clip(optimizer, 1.0)


@pytest.mark.parametrize(
    ("value", "algorithm", "message"),
    [
        (1.0, "max", r"algorithm='max' is unknown. Use 'norm' or 'value'"),
        (0.0, "norm", r"clip value of 0\.0 cannot be used. Use a positive number"),
        (-1.0, "value", "clip value of"),
        (float("nan"), "norm", "clip value of nan"),
    ],
)
def test_bad_clips_are_refused(value: float, algorithm: str, message: str) -> None:
    layer, optimizer, engine = linear_training("O1", plain_sgd)
    backward(engine, layer)
    with pytest.raises(ValueError, match=message):
        engine.clip(optimizer, value, algorithm)


# What is refused at the start


@pytest.mark.parametrize("groups", [[[0, 3]], [[-1]]])
def test_skip_together_names_optimizers_that_are_there(groups: Any) -> None:
    with pytest.raises(ValueError, match=r"skip_together names optimizer .*there are 2, so 0 to 1 are allowed"):
        engine_of("O1", [plain_sgd([param(1.0)]) for _ in range(2)], engine={"skip_together": groups})


@pytest.mark.parametrize(
    ("level", "settings", "refused"), [("O2", {}, True), ("O3", {}, False), ("O1", {"loss_scale": 1}, False)]
)
def test_an_optimizer_inside_the_backward_pass_is_refused_where_it_would_see_a_scale(
    level: str, settings: Any, refused: bool
) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    optimizer = plain_sgd(model.parameters())
    if not refused:
        engine_of(level, [optimizer], model, **settings)
        return
    with pytest.raises(ValueError, match=r"'0\.weight' has a post-accumulate-grad hook.*set loss_scale=1"):
        engine_of(level, [optimizer], model, **settings)


# Joint skips, names, state


@pytest.mark.parametrize("together", [[], [[0, 2]]])
def test_a_group_skips_as_one_and_others_do_not(together: Any) -> None:
    params = [param(1.0) for _ in range(3)]
    engine = engine_of("O1", [plain_sgd([p]) for p in params], engine={"skip_together": together})
    for i, p in enumerate(params):
        engine.backward((p * (float("inf") if i == 0 else 1.0)).sum())
    for optimizer in engine.optimizers:
        engine.step(optimizer)
    skipped = [engine.outcome(o) is Outcome.SKIPPED for o in engine.optimizers]
    assert skipped == [True, False, bool(together)]


def test_a_parameter_is_named_by_its_model_or_its_shape() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    engine = engine_of("O1", [plain_sgd(model.parameters())], model)
    assert engine.name_of(model[0].bias) == "0.bias"
    assert engine.name_of(param(1.0, 2.0)) == "a parameter of shape [2]"


def test_c71_a_saved_engine_goes_on_as_if_nothing_had_been() -> None:
    def make() -> tuple[nn.Linear, Any, Engine]:
        return linear_training("O2", lambda params: Adam(params, lr=0.1), growth_interval=2, hysteresis=2)

    through, saved = make(), make()
    saved[0].load_state_dict(through[0].state_dict())
    for i in range(8):
        for layer, optimizer, engine in (through, saved):
            optimizer.zero_grad()
            backward(engine, layer, float("inf") if i in (2, 5) else 1.0)
            engine.step(optimizer)
        file = io.BytesIO()
        torch.save([saved[0].state_dict(), saved[2].state_dict(), saved[1].state_dict()], file)
        file.seek(0)
        weights, state, moments = torch.load(file, weights_only=True)
        saved = make()
        saved[0].load_state_dict(weights)
        saved[2].load_state_dict(state)
        saved[1].load_state_dict(copy.deepcopy(moments))
        assert saved[2].accounts() == through[2].accounts()
        assert saved[2].counts(saved[1]) == through[2].counts(through[1])
    assert all_equal(list(saved[0].state_dict().values()), list(through[0].state_dict().values()))


def test_the_engine_runs_without_models_and_at_o0_with_a_scale() -> None:
    p = param(1.0)
    engine = Engine(resolve("O0", loss_scale=8), [plain_sgd([p])])
    engine.backward(p.sum())
    engine.step(engine.optimizers[0])
    assert (p.item(), engine.loss_scales()) == (0.0, {"optimizer_0": 8.0})
