"""Where O1's casts hold in plain PyTorch, and for how long a cast of a weight is kept."""

import copy
import gc
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp import amp
from tests.helpers.plain import ONE, SCALE, block, pair


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    amp.deinitialize()


# Weights that change, caches


@pytest.mark.parametrize("way", ["step", "data", "load", "no_grad"])
def test_a_weight_that_changed_is_cast_anew(way: str) -> None:
    models, optimizers = pair()
    model = models[0]
    block(model(ONE), optimizers[0])
    assert [model(ONE).item(), nn.functional.linear(ONE, model.weight).item()] == [1.0, 1.0]
    if way == "step":
        optimizers[0].step()
    elif way == "data":
        model.weight.data.zero_()
    elif way == "load":
        model.load_state_dict({"weight": torch.zeros(1, 1)})
    else:
        with torch.no_grad():
            model.weight.zero_()
    assert [model(ONE).item(), nn.functional.linear(ONE, model.weight).item()] == [0.0, 0.0]


def test_casts_of_a_weight_survive_train_eval_train() -> None:
    models, optimizers = pair()
    for n in range(3):
        models[0].train(n != 1)
        with torch.set_grad_enabled(n != 1):
            out = models[0](ONE)
        assert out.dtype is torch.float16
        if n != 1:
            optimizers[0].zero_grad()
            block(out, optimizers[0])
            assert models[0].weight.grad.item() == 1.0


def test_a_weight_used_often_in_one_call_is_cast_once() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = self.cell(x)
            return x

    def casts(node: Any, seen: set[Any]) -> int:
        if node is None or node in seen:
            return 0
        seen.add(node)
        mine = "ToCopy" in node.name() and any(
            "AccumulateGrad" in str(child and child.name()) for child, _ in node.next_functions
        )
        return mine + sum(casts(child, seen) for child, _ in node.next_functions)

    model = amp.initialize(Loop(), opt_level="O1", verbosity=0)
    out = model(torch.ones(1, 2, requires_grad=True) * 1.0)
    assert casts(out.grad_fn, set()) == 2, "a weight and a bias"


# Who is cast, and where


def test_code_outside_of_models_is_cast_as_in_apex_until_the_training_ends() -> None:
    x = torch.ones(2, 2)
    held = pair()
    assert (x @ x).dtype is torch.float16
    assert x.half().softmax(0).dtype is torch.float32
    assert held
    amp.deinitialize()
    assert (x @ x).dtype is torch.float32
    assert x.half().softmax(0).dtype is torch.float16


def test_disabled_casts_are_off_in_models_and_outside() -> None:
    models, _ = pair()
    with amp.disable_casts():
        assert models[0](ONE).dtype is torch.float32
        assert (ONE @ ONE).dtype is torch.float32
        with amp.disable_casts():
            pass
        assert models[0](ONE).dtype is torch.float32
    assert models[0](ONE).dtype is torch.float16


def test_a_region_that_the_user_turned_off_stays_off() -> None:
    models, _ = pair()
    with torch.autocast("cpu", enabled=False):
        assert models[0](ONE).dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_models_of_other_trainings_keep_their_own_casts(level: str) -> None:
    """Whatever the order of the calls, and also if a forward raises."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: Any) -> Tensor:
            if x is None:
                raise ZeroDivisionError
            assert torch.is_autocast_enabled("cpu") is self.cast
            return self.layer(x)

    before, cast, after = Model(), Model(), Model()
    for model, its_level in ((before, level), (cast, "O1"), (after, level)):
        model.cast = its_level == "O1"
        amp.initialize(model, opt_level=its_level, verbosity=0)
    for _ in range(2):
        assert [m(ONE).dtype for m in (before, cast, after)] == [torch.float32, torch.float16, torch.float32]
        for model in (before, cast):
            with pytest.raises(ZeroDivisionError):
                model(None)
    amp.deinitialize(cast)
    assert (ONE @ ONE).dtype is torch.float32
    assert before(ONE).dtype is torch.float32


def test_gradients_at_o0_are_exact_beside_a_training_at_o1() -> None:
    grads = []
    for beside in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
        if beside:
            pair("O1")
        block(model(x), optimizer)
        grads.append([p.grad for p in model.parameters()])
        assert torch.is_autocast_enabled("cpu") is beside
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


def test_autocast_of_the_users_own_reaches_models_at_other_levels() -> None:
    model = amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ONE).dtype is torch.bfloat16


def test_the_latest_training_decides_outside_of_models_and_the_one_before_goes_on() -> None:
    half = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    brain = amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0, dtype="bfloat16")
    assert [(ONE @ ONE).dtype, half(ONE).dtype, brain(ONE).dtype] == [torch.bfloat16, torch.float16, torch.bfloat16]
    amp.deinitialize(half)
    assert (ONE @ ONE).dtype is torch.bfloat16
    amp.deinitialize(brain)
    assert (ONE @ ONE).dtype is torch.float32


@pytest.mark.parametrize("seen_by", ["the collector", "nobody"])
def test_a_training_that_was_dropped_ends_with_deinitialize(seen_by: str) -> None:
    pair()
    if seen_by == "the collector":
        gc.collect()
    amp.deinitialize()
    assert not torch.is_autocast_enabled("cpu")


def test_a_training_that_was_dropped_ends_with_the_next_initialize() -> None:
    pair()
    amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert (ONE @ ONE).dtype is torch.float32


def test_a_model_is_cast_in_other_threads_too() -> None:
    models, _ = pair()
    dtypes: list[torch.dtype] = []

    def work() -> None:
        dtypes.append(models[0](ONE).dtype)
        with amp.disable_casts():
            dtypes.append(models[0](ONE).dtype)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert dtypes == [torch.float16, torch.float32]


def test_trainings_of_several_threads_know_nothing_of_each_other() -> None:
    """Whichever starts, steps or ends first: each thread's casts begin and end with its own trainings."""
    meet = threading.Barrier(2, timeout=60)
    cast: dict[int, list[bool]] = {0: [], 1: []}

    def work(me: int) -> None:
        for turn in range(2):
            meet.wait()
            if me == turn:  # each starts first once, and ends last then
                models, optimizers = pair()
            meet.wait()
            if me != turn:
                models, optimizers = pair()
            meet.wait()
            block(models[0](ONE), optimizers[0])
            meet.wait()
            optimizers[0].step()
            assert models[0].weight.item() == 0.0
            cast[me].append((ONE @ ONE).dtype is torch.float16)
            meet.wait()
            if me != turn:
                amp.deinitialize(models[0])
            meet.wait()
            cast[me].append((ONE @ ONE).dtype is torch.float16)
            if me == turn:
                amp.deinitialize(models[0])
            cast[me].append((ONE @ ONE).dtype is torch.float16)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cast == {0: [True, True, False, True, False, False], 1: [True, False, False, True, True, False]}


def test_casts_that_another_thread_ended_are_gone_with_the_next_call_of_a_model() -> None:
    models, _ = pair()
    other = amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    thread = threading.Thread(target=lambda: amp.deinitialize(models[0]))
    thread.start()
    thread.join()
    other(ONE)
    assert (ONE @ ONE).dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_and_pickles_of_a_model_work_while_it_trains_and_afterwards(level: str) -> None:
    models, _ = pair(level)
    dtype = models[0](ONE).dtype
    twins = [copy.deepcopy(models[0]), pickle.loads(pickle.dumps(models[0]))]
    assert [twin(ONE).dtype for twin in twins] == [dtype, dtype]
    amp.deinitialize()
    assert [twin(ONE).item() for twin in twins] == [1.0, 1.0]
    assert not torch.is_autocast_enabled("cpu")
    assert models[0](ONE).dtype is torch.float32


def test_a_checkpointed_model_is_cast_again_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.GroupNorm(1, 4), nn.Softmax(-1))
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    amp.initialize(net, optimizer, opt_level="O1", verbosity=0, init_scale=SCALE)
    for run in (net, lambda x: net[2](net[1](net[0](x)))):
        grads = []
        for out in (run(torch.ones(1, 2)), checkpoint(run, torch.ones(1, 2), use_reentrant=False)):
            optimizer.zero_grad()
            block(out[..., 0], optimizer)
            grads.append([p.grad for p in net.parameters()])
        assert all(map(torch.equal, *grads))
        assert grads[1][0].abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_cast_like_another() -> None:
    """In the forward pass and in the gradients, and traced by autograd's compiler, not only captured."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.cell = nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.GRUCell(4, 4)

        def forward(self, x: Tensor) -> list[Tensor]:
            x = self.first(x)
            return [
                x,
                self.norm(x),
                x.sum(0),
                x.cumsum(0),
                x**2,
                x.softmax(-1),
                self.cell(x),
                torch.atan2(x, x.float()),
            ]

    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp.initialize(net, optimizer, opt_level="O1", verbosity=0, init_scale=SCALE)
    runs = []
    for model in (net, torch.compile(net, backend="aot_eager")):
        optimizer.zero_grad()
        outs = model(x)
        block(sum(out.float().square().sum() for out in outs), optimizer)
        runs.append([*outs, *(p.grad for p in net.parameters())])
    assert [t.dtype for t in runs[1]] == [t.dtype for t in runs[0]]
    half = [torch.float16 if i in (0, 6) else torch.float32 for i in range(8)]
    assert [t.dtype for t in runs[0][:8]] == half
    for mine, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_model_is_compiled_once(level: str) -> None:
    """In one piece, whatever tensors it is given and whatever becomes of its weights."""
    torch._dynamo.reset()
    pieces: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        pieces.append(sum(node.target is nn.functional.linear for node in graph.graph.nodes))
        return graph.forward

    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, init_scale=SCALE)
    compiled, counts = torch.compile(net, backend=backend), []
    for _ in range(4):
        block(compiled(torch.randn(3, 4)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(pieces))
    assert len(set(counts)) == 1
    assert [layers for layers in pieces if layers] == [2]
