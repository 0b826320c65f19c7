"""What scripts written for Apex rely on: each block, skip, scale, weight and master equals a plain float32 run.

Models, losses and optimizers are combined as such scripts do; infinities are put into gradients inside a block, where
an overflow would put them. The reference is plain PyTorch in float32, which is told what is to be skipped.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import Outcome, amp
from lightning_amp.engine import Engine
from tests.helpers.plain import ONE, SCALE, ZEROING, block, pair, plain, values, zero

ITERATIONS = 3
X = torch.tensor([[0.5, -1.0], [2.0, 0.25]])


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    amp.deinitialize()


class Model(nn.Module):
    """Two weights, of which O2 is told to keep the first one float32."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.kept = Factor(1.0 + seed)
        self.low = Factor(2.0 - 0.5 * seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(self.kept(x)).float().sum()


class Factor(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(start + 0.25 * torch.arange(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@dataclass
class Setup:
    """Who trains what: indices of models.

    Attributes:
        owners: For each optimizer, its models.
        losses: For each loss, the models it is made of.
        named: For each loss, the optimizers that its block is given.
    """

    owners: Sequence[Sequence[int]]
    losses: Sequence[Sequence[int]]
    named: Sequence[Sequence[int]]


SETUPS = {
    "two models, one loss, one optimizer": Setup([[0, 1]], [[0, 1]], [[0]]),
    "two models, two losses, one optimizer": Setup([[0, 1]], [[0], [1]], [[0], [0]]),
    "two models, two losses, two optimizers": Setup([[0], [1]], [[0], [1]], [[0], [1]]),
    "two models, one loss, two optimizers": Setup([[0], [1]], [[0, 1]], [[0, 1]]),
    "three models, two losses, one optimizer": Setup([[0, 1, 2]], [[0, 2], [1, 2]], [[0], [0]]),
    "three models, two losses, two optimizers": Setup([[0, 1], [2]], [[0, 1], [1, 2]], [[0], [0, 1]]),
}


@dataclass
class Fault:
    """A non-finite value in a gradient of a model, in one backward pass of one iteration."""

    iteration: int
    loss: int
    weight: str
    value: float
    model: int = -1
    """The last of the loss's models that its optimizers own, unless given."""

    def __str__(self) -> str:
        return f"{self.value} in {self.weight} of loss {self.loss} in iteration {self.iteration}"


FAULTS: list[Fault | None] = [None] + [
    Fault(iteration, loss, weight, value)
    for iteration in (0, 1)
    for loss in (0, 1)
    for weight, value in (("kept", float("inf")), ("low", (float("-inf"), float("nan"))[iteration]))
]


@dataclass
class Run:
    """What was seen after each block, and in the end."""

    grads: list[dict[str, Tensor]] = field(default_factory=list)
    scales: list[list[float]] = field(default_factory=list)
    outcomes: list[list[bool]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    momenta: list[Tensor] = field(default_factory=list)


def names(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {f"{i}.{name}": p for i, model in enumerate(models) for name, p in model.named_parameters()}


def momenta(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[Tensor]:
    state = {p: s for optimizer in optimizers for p, s in optimizer.state.items()}
    found = [state.get(p, {}).get("momentum_buffer") for model in models for p in model.parameters()]
    return [torch.zeros(()) if m is None else m.float().clone() for m in found]


def build(setup: Setup) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models: list[nn.Module] = [Model(i) for i in range(max(map(max, setup.losses)) + 1)]
    optimizers = [
        torch.optim.SGD([{"params": models[i].parameters(), "lr": 0.0625 / (i + 1)} for i in owned], lr=1, momentum=0.5)
        for owned in setup.owners
    ]
    return models, optimizers


def faulty_model(setup: Setup, fault: Fault) -> int:
    owned = [i for o in setup.named[fault.loss] for i in setup.owners[o]]
    return [i for i in setup.losses[fault.loss] if i in owned][-1]


def reference(setup: Setup, fault: Fault | None, checked: bool) -> Run:
    """Runs it in float32; what skips is what was named with the faulty loss."""
    models, optimizers = build(setup)
    run = Run()
    for iteration in range(ITERATIONS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        skipping: set[int] = set()
        for loss, parts in enumerate(setup.losses):
            sum(models[i](X) for i in parts).backward()  # type: ignore[union-attr]
            run.grads.append({name: p.grad.clone() for name, p in names(models).items() if p.grad is not None})
            if fault is not None and (fault.iteration, fault.loss) == (iteration, loss):
                skipping = set(setup.named[loss])
        for i, optimizer in enumerate(optimizers):
            if i not in skipping or not checked:
                optimizer.step()
        run.outcomes.append([i not in skipping for i in range(len(optimizers))])
    run.weights = [p.detach().clone() for model in models for p in model.parameters()]
    run.momenta = momenta(models, optimizers)
    return run


def mixed(setup: Setup, fault: Fault | None, level: str, per_loss: bool, way: str) -> Run:
    models, optimizers = build(setup)
    settings: dict[str, Any] = {"keep_fp32": ["kept"]} if level in ("O2", "O3") else {}
    models, optimizers = amp.initialize(
        models,
        optimizers,
        opt_level=level,
        num_losses=len(setup.losses) if per_loss else 1,
        init_scale=SCALE,
        verbosity=0,
        **settings,
    )
    run = Run()
    for iteration in range(ITERATIONS):
        zero(models, optimizers, way)
        for loss, parts in enumerate(setup.losses):
            value = sum(models[i](X) for i in parts)
            named: Any = [optimizers[i] for i in setup.named[loss]]
            named = named if len(named) > 1 else named[0]
            with amp.scale_loss(value, named, loss_id=loss if per_loss else 0) as scaled:
                scaled.backward()
                if fault is not None and (fault.iteration, fault.loss) == (iteration, loss):
                    victim = getattr(models[faulty_model(setup, fault)], fault.weight).weight
                    assert victim.grad.dtype is victim.dtype
                    victim.grad.view(-1)[-1] = fault.value
            run.grads.append({name: p.grad.clone() for name, p in names(models).items() if p.grad is not None})
            run.scales.append([entry["loss_scale"] for entry in amp.state_dict().values()])
        for optimizer in optimizers:
            optimizer.step()
        if level != "O0":
            run.outcomes.append([amp.outcome(optimizer) is Outcome.STEPPED for optimizer in optimizers])
    masters = [m for optimizer in optimizers for m in amp.master_params(optimizer)]
    models_own = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert all(
        m.dtype is (p.dtype if level == "O3" else torch.float32) for m, p in zip(masters, models_own, strict=True)
    )
    assert all(torch.equal(m.to(p.dtype), p) for m, p in zip(masters, models_own, strict=True))
    run.momenta = momenta(models, optimizers)
    amp.deinitialize()
    run.weights = [p.detach().clone() for model in models for p in model.parameters()]
    return run


CASES = [
    (setup, level, per_loss, fault)
    for setup in SETUPS
    for level in ("O0", "O1", "O2", "O3")
    for per_loss in ([False, True] if len(SETUPS[setup].losses) > 1 and level in ("O1", "O2") else [False])
    for fault in (FAULTS if level != "O0" else [None])
    if fault is None or fault.loss < len(SETUPS[setup].losses)
]


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, ZEROING[n % len(ZEROING)], id="-".join(map(str, case))) for n, case in enumerate(CASES)],
)
def test_every_block_skip_scale_and_weight_is_that_of_a_float32_run(case: tuple[Any, ...], way: str) -> None:
    setup, level, per_loss, fault = SETUPS[case[0]], *case[1:]
    wanted, got = reference(setup, fault, level != "O0"), mixed(setup, fault, level, per_loss, way)
    exact = level in ("O0", "O1")
    rtol, atol = (0.0, 0.0) if exact else (4e-3, 4e-3)

    if level != "O0":
        assert got.outcomes == wanted.outcomes
    scales = [SCALE if level in ("O1", "O2") else 1.0] * (len(setup.losses) if per_loss else 1)
    for n, (mine, theirs) in enumerate(zip(got.grads, wanted.grads, strict=True)):
        iteration, loss = divmod(n, len(setup.losses))
        struck = fault is not None and iteration == fault.iteration and loss >= fault.loss
        if fault is not None and (iteration, loss) == (fault.iteration, fault.loss) and level in ("O1", "O2"):
            scales[loss if per_loss else 0] /= 2.0
        assert got.scales[n] == scales
        for name, grad in theirs.items():
            found = mine[name].float()
            if struck and name == f"{faulty_model(setup, fault)}.{fault.weight}.weight":
                assert not torch.isfinite(found[-1])
                found, grad = found[:-1], grad[:-1]
            torch.testing.assert_close(found, grad, rtol=rtol, atol=atol)
        assert all((mine[name] == 0).all() for name in mine.keys() - theirs.keys()), "zeroed in place"
    for mine, theirs in zip(got.weights + got.momenta, wanted.weights + wanted.momenta, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=2 * atol)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_model_that_came_with_half_weights_trains_where_it_is_allowed(level: str) -> None:
    model = Model(0)
    model.low.half()
    exact = copy.deepcopy(model).float()
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.125, momentum=0.5) for m in (model, exact))
    amp.initialize(model, optimizer, opt_level=level, allow_half_models=True, verbosity=0, init_scale=SCALE)
    for n in range(3):
        for m, o in ((model, optimizer), (exact, other)):
            o.zero_grad()
            with amp.scale_loss(m(X), o) if m is model else plain(m(X)) as loss:
                loss.backward()
                if n == 1 and m is model and level != "O0":
                    m.low.weight.grad[0] = float("inf")
            if n != 1 or level == "O0" or m is model:
                o.step()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=4e-3, atol=4e-3)


# Losses that share a backward pass, windows, graphs


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("delay", [False, True])
def test_c24_a_window_of_four_is_one_big_batch(level: str, delay: bool) -> None:
    torch.manual_seed(1)
    xs = torch.randn(4, 8, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    exact = copy.deepcopy(model)
    (exact(xs.flatten(0, 1)) ** 2).mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, init_scale=1024.0)
    for n, x in enumerate(xs):
        loss = (model(x).float() ** 2).mean() / 4
        with amp.scale_loss(loss, optimizer, delay_unscale=delay and n < 3) as scaled:
            scaled.backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert (p.grad.float() - q.grad).norm() < 0.01 * q.grad.norm()


@pytest.mark.parametrize("delayed_last", [False, True])
@pytest.mark.parametrize("last", [0, 1])
def test_an_overflow_in_a_delayed_block_skips_everybody_named_in_the_window(delayed_last: bool, last: int) -> None:
    models, optimizers = pair()
    block(models[0](ONE) + models[1](ONE), optimizers, delay_unscale=True, overflow=models[0])
    block(models[last](ONE), optimizers[last], delay_unscale=delayed_last)
    for optimizer in optimizers:
        optimizer.step()
    assert values(models) == [1.0, 1.0]
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == SCALE / 2


def test_delayed_blocks_of_different_scales_are_each_divided_by_their_own() -> None:
    models, optimizers = pair(num_losses=2)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0 ** (3 + 4 * i), "unskipped": 0} for i in range(2)})
    for n in range(4):
        block(models[0](ONE) * (n + 1), optimizers[0], loss_id=n % 2, delay_unscale=True)
    optimizers[0].step()
    assert values(models) == [1.0 - 10.0, 1.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_c19_three_backwards_over_one_graph_at_three_scales(level: str) -> None:
    models, optimizers = pair(level, num_losses=3)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": 0} for i in range(3)})
    out = models[0](ONE)
    for n in range(3):
        with amp.scale_loss((out.float() * (n + 1)).sum(), optimizers[0], loss_id=n) as scaled:
            scaled.backward(retain_graph=n < 2)
    assert models[0].weight.grad.item() == 6.0
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_gradients_that_are_part_of_a_graph_can_be_differentiated_again(level: str) -> None:
    """By ``scaled.backward(create_graph=True)``, of which nobody is told before; the scale moves right after it."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, init_scale=8.0, growth_interval=1)
    for n in (1, 2):
        with amp.scale_loss((model(2 * ONE).float() ** 3).sum(), optimizer) as scaled:
            scaled.backward(create_graph=True)
        assert model.weight.grad.item() == n * 3 * 6**2 * 2
        (second,) = torch.autograd.grad(model.weight.grad.sum(), model.weight, retain_graph=True)
        assert second.item() == n * 6 * 6 * 2**2
    model.weight.grad = None


def test_a_backward_that_fails_leaves_gradients_and_scale_as_they_were() -> None:
    models, optimizers = pair()
    block(models[0](ONE), optimizers[0])

    def fail() -> None:
        with amp.scale_loss(models[0](ONE).float().sum(), optimizers[0]) as scaled:
            scaled.backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert models[0].weight.grad.item() == 1.0
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": SCALE, "unskipped": 1}


# The scale


def test_c37_the_rule_of_the_scale_is_the_users() -> None:
    models, optimizers = pair(growth_interval=2, growth_factor=8.0, backoff_factor=0.25, hysteresis=2)
    scales = []
    for n in range(6):
        models[0].weight.grad = None
        block(models[0](ONE), optimizers[0], overflow=models[0] if n in (2, 3) else None)
        scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
    assert scales == [SCALE, 8 * SCALE, 8 * SCALE, 2 * SCALE, 2 * SCALE, 16 * SCALE]


@pytest.mark.parametrize(
    ("settings", "skips", "scale"),
    [
        ({"init_scale": 2.0**16}, 1, 2.0**15),
        ({"init_scale": 2.0**16, "growth_interval": 2}, 2, 2.0**15),
        ({"init_scale": 2.0**15, "max_loss_scale": 2.0**15, "growth_interval": 2}, 0, 2.0**15),
        ({"loss_scale": 2.0**15}, 0, 2.0**15),
    ],
)
def test_a_loss_in_half_overflows_where_its_own_gradient_does_and_nowhere_else(
    settings: dict[str, Any], skips: int, scale: float
) -> None:
    model = nn.Linear(2, 1)
    model.weight.data.fill_(30_000.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    amp.initialize(model, optimizer, verbosity=0, **settings)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).mean()
        assert loss.dtype is torch.float16
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled.isfinite(), "multiplied in float32"
            scaled.backward()
        optimizer.step()
    assert amp.engine(optimizer).counts(optimizer)[Outcome.SKIPPED] == skips
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale


# Layers


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("layer", [nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers_and_cells_train_like_float32(layer: Any, level: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = layer(3, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(self.layer, nn.RNNBase):
                return self.last(self.layer(x)[0])
            state: Any = None
            for step in x:
                state = self.layer(step, state)
            return self.last(state[0] if isinstance(state, tuple) else state)

    torch.manual_seed(3)
    net, x = Net(), torch.randn(5, 2, 3)
    exact = copy.deepcopy(net)
    (exact(x) ** 2).mean().backward()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, init_scale=1024.0)
    with amp.scale_loss((net(x).float() ** 2).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    for p, q in zip(net.parameters(), exact.parameters(), strict=True):
        assert (p.grad.float() - q.grad).norm() <= 0.02 * q.grad.norm() + 1e-4


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4)])
def test_c53_norms_work_as_modules_and_in_functions(norm: nn.Module, level: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), copy.deepcopy(norm)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.first(x))
            return nn.functional.layer_norm(x.to(self.scale.dtype), (4,), self.scale)

    net, x = Net(), torch.randn(3, 4)
    wanted = copy.deepcopy(net)(x)
    net = amp.initialize(net, opt_level=level, verbosity=0)
    torch.testing.assert_close(net(x).float(), wanted, rtol=5e-3, atol=5e-3)


# Parameters that come later


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_parameter_group_added_after_initialize_trains_like_the_others(level: str, steps_before: int) -> None:
    torch.manual_seed(2)
    x = torch.randn(8, 4)
    models = [nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 1)}) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    runs = []
    for model, mixed_ in zip(models, (False, True), strict=True):
        optimizer = torch.optim.SGD(model["head"].parameters(), 0.05, momentum=0.9)
        parts: Any = [model["body"], model["head"]]
        if mixed_:
            parts, optimizer = amp.initialize(parts, optimizer, opt_level=level, verbosity=0, init_scale=1024.0)
        for n in range(4):
            if n == steps_before:
                optimizer.add_param_group({"params": list(model["body"].parameters()), "lr": 0.1})
            optimizer.zero_grad()
            loss = (parts[1](parts[0](x).tanh()).float() ** 2).mean()
            with amp.scale_loss(loss, optimizer) if mixed_ else plain(loss) as scaled:
                scaled.backward()
            optimizer.step()
        if level == "O2" and mixed_:
            assert all(m.dtype is torch.float32 for m in amp.master_params(optimizer))
        amp.deinitialize()
        runs.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*runs, strict=True):
        torch.testing.assert_close(p, q, rtol=0.02, atol=0.02)


# Saving and going on


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_checkpoints_are_float32_and_going_on_from_one_is_exact_to_the_bit(level: str) -> None:
    def start() -> tuple[list[nn.Module], list[Any]]:
        torch.manual_seed(5)
        models = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2)]
        optimizers = [torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4) for model in models]
        return amp.initialize(
            models, optimizers, opt_level=level, num_losses=2, verbosity=0, init_scale=2.0**12, growth_interval=3
        )

    def train(models: Any, optimizers: Any, steps: range) -> None:
        for n in steps:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(n))
            for i in range(2):
                optimizers[i].zero_grad()
                block(models[i](x) ** 2, optimizers[i], loss_id=i)
                optimizers[i].step()

    models, optimizers = start()
    train(models, optimizers, range(5))
    saved = copy.deepcopy(
        {
            "models": [m.state_dict() for m in models],
            "optimizers": [o.state_dict() for o in optimizers],
            "amp": amp.state_dict(),
        }
    )
    assert all(t.dtype in (torch.float32, torch.int64) for sd in saved["models"] for t in sd.values())
    train(models, optimizers, range(5, 9))
    wanted, scales = [copy.deepcopy(m.state_dict()) for m in models], amp.state_dict()
    amp.deinitialize()

    models, optimizers = start()
    for i in range(2):
        models[i].load_state_dict(saved["models"][i])
        optimizers[i].load_state_dict(saved["optimizers"][i])
    amp.load_state_dict(saved["amp"])
    assert all(
        torch.equal(a, b)
        for m, sd in zip(models, saved["models"], strict=True)
        for a, b in zip(m.state_dict().values(), sd.values(), strict=True)
    )
    train(models, optimizers, range(5, 9))
    assert amp.state_dict() == scales
    for model, state in zip(models, wanted, strict=True):
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name


def test_c59_half_weights_move_by_less_than_they_can_show() -> None:
    """Steps too small for a half weight of one: lost at O3, kept by the masters of O2."""
    ends = {}
    for level in ("O2", "O3"):
        models, optimizers = pair(level)
        optimizers[0].param_groups[0]["lr"] = 1e-4
        for _ in range(200):
            optimizers[0].zero_grad()
            block(models[0](ONE), optimizers[0])
            optimizers[0].step()
        ends[level] = next(iter(models[0].state_dict().values())).item()
        amp.deinitialize()
    assert ends["O2"] == pytest.approx(0.98, abs=1e-4)
    assert ends["O3"] == 1.0


def test_it_is_the_one_engine() -> None:
    _, optimizers = pair("O2")
    assert type(amp.engine(optimizers[0])) is Engine
