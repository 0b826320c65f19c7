"""Apex's API for plain PyTorch: what goes in, what comes out, what is refused, and what is left behind."""

import copy
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp import AmpConfigError, Outcome, amp
from lightning_amp.entry_reader import CheckpointError
from tests.helpers.plain import ONE, SCALE, block, pair, plain, values

LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    amp.deinitialize()
    alive.clear()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(model: nn.Module, lr: float = 0.1, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr, **settings)


alive: list[Any] = []
"""What `start` has returned: a training that nobody holds ends when it is collected, in the middle of a test too."""


def start(level: str = "O1", **settings: Any) -> tuple[nn.Sequential, torch.optim.SGD]:
    model, settings = net(), {"verbosity": 0, "init_scale": 1024.0, **settings}
    alive.append(amp.initialize(model, sgd(model), opt_level=level, **settings))
    return alive[-1]


def train(
    model: nn.Module,
    optimizer: Any,
    clip: Callable[[], Any] = lambda: None,
    steps: int = 5,
    mixed: bool = True,
    scheduler: Any = None,
) -> list[Tensor]:
    """Returns the weights after some steps in mixed precision, or in float32."""
    for n in range(steps):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        loss = (model(x).float() ** 2).mean()
        with amp.scale_loss(loss, optimizer) if mixed else plain(loss) as scaled:
            scaled.backward()
        clip()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().float().clone() for p in model.parameters()]


def assert_close(mine: list[Tensor], theirs: list[Tensor], tolerance: float = 0.01) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6


# What goes in comes out


@pytest.mark.parametrize("level", LEVELS)
def test_single_in_single_out_and_list_in_list_out(level: str) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.SGD]:
        model = nn.Linear(1, 1)
        return model, sgd(model)

    def call(models: Any, optimizers: Any = None) -> Any:
        return amp.initialize(models, optimizers, opt_level=level, verbosity=0)

    model, optimizer = fresh()
    out = call(model, optimizer)
    assert type(out) is tuple
    assert out[0] is model
    assert out[1] is optimizer
    model, optimizer = fresh()
    models, optimizers = call([model], [optimizer])
    assert type(models) is type(optimizers) is list
    assert (models[0], optimizers[0]) == (model, optimizer)
    model, optimizer = fresh()
    models, single = call([model], optimizer)
    assert models == [model]
    assert single is optimizer
    model, optimizer = fresh()
    alone, optimizers = call(model, [optimizer])
    assert alone is model
    assert optimizers == [optimizer]
    model, _ = fresh()
    assert call(model) is model
    model, _ = fresh()
    assert call([model]) == [model]


def test_the_signatures_are_those_of_apex() -> None:
    apex = {
        "initialize": """models optimizers enabled opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32
            master_weights loss_scale cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale""",
        "scale_loss": "loss optimizers loss_id model delay_unscale delay_overflow_check",
        "master_params": "optimizer",
        "state_dict": "destination",
        "load_state_dict": "state_dict",
        "disable_casts": "",
        "register_half_function": "module name",
        "register_float_function": "module name",
        "register_promote_function": "module name",
    }
    for function, names in apex.items():
        parameters = inspect.signature(getattr(amp, function)).parameters.values()
        positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert positional == names.split(), function
    defaults = {p.name: p.default for p in inspect.signature(amp.initialize).parameters.values()}
    assert (
        defaults
        | {
            "enabled": True,
            "opt_level": "O1",
            "num_losses": 1,
            "verbosity": 1,
            "loss_scale": None,
            "min_loss_scale": None,
            "max_loss_scale": 2.0**24,
        }
        == defaults
    )


def test_c91_the_page_for_users_of_apex_has_every_name_and_keyword() -> None:
    page = (Path(__file__).parents[1] / "docs" / "coming_from_apex.md").read_text()
    table = page[page.index("## From Apex's amp") : page.index("### Who skips")]
    public = {f"amp.{name}" for name in amp.__all__}
    keywords = {*inspect.signature(amp.initialize).parameters, *inspect.signature(amp.scale_loss).parameters}
    assert {word for word in public | keywords if word not in table} == set()


def test_c91_the_page_has_every_public_name_of_what_people_come_from() -> None:
    page = (Path(__file__).parents[1] / "docs" / "coming_from_apex.md").read_text()
    _, of_apex, of_torch, _ = re.split("## From .*\n", page)
    apex = """init initialize scale_loss state_dict load_state_dict master_params disable_casts half_function
        float_function promote_function register_half_function register_float_function register_promote_function"""
    assert {name for name in apex.split() if f"amp.{name}" not in of_apex} == set()
    scaler = [name for name in vars(torch.amp.GradScaler) if not name.startswith("_")]
    keywords = [name for name in inspect.signature(torch.amp.GradScaler).parameters if name != "device"]
    others = ["autocast", "custom_fwd", "custom_bwd", "is_autocast_available", "cache_enabled"]
    assert {name for name in [*scaler, *keywords, *others] if name not in of_torch} == set()


def test_it_imports_no_lightning() -> None:
    code = "import sys; from lightning_amp import amp; sys.exit(any(m.startswith('lightning.') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_disabled_every_call_does_nothing() -> None:
    model = net()
    optimizer = sgd(model)
    before = copy.deepcopy(dict(vars(optimizer))), model.state_dict()
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    loss = model(torch.ones(1, 4)).sum()
    with amp.scale_loss(loss, optimizer) as same:
        assert same is loss
    with amp.scale_loss(loss, [Larc(optimizer)], loss_id=7) as same:
        assert same is loss
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
    assert vars(optimizer).keys() == before[0].keys()
    assert not model._forward_pre_hooks
    assert model(torch.ones(1, 4)).dtype is torch.float32
    assert amp.outcome(optimizer) is None
    assert isinstance(amp.initialize(model, optimizer, verbosity=0), tuple), "it may be enabled later"


def test_c90_what_runs_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    start("O2", verbosity=1, keep_fp32=["2"], num_losses=3)
    said = capsys.readouterr().out
    for part in (
        "O2",
        "float16",
        "dynamic, from 1024",
        "device=cpu",
        "num_losses=3",
        "stays float32: 2.weight, 2.bias",
    ):
        assert part in said
    start("O1", verbosity=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_c90_float16_runs_on_the_cpu_with_a_scale(level: str) -> None:
    model, optimizer = start(level)
    assert model[0](torch.ones(1, 4)).dtype is torch.float16
    loss = model(torch.ones(1, 4)).float().sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == pytest.approx(1024.0 * loss.item())
        scaled.backward()


def test_bfloat16_comes_with_a_word() -> None:
    model, _ = start("O2", cast_model_type=torch.bfloat16)
    assert model[0].weight.dtype is torch.bfloat16
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 1.0


# Settings


@pytest.mark.parametrize(
    "settings",
    [
        {"opt_level": "O2", "keep_batchnorm_fp32": "True", "loss_scale": "128.0", "master_weights": "True"},
        {"opt_level": "O2", "cast_model_type": "float16", "loss_scale": "dynamic"},
        {"opt_level": "O2", "cast_model_type": torch.float16, "loss_scale": 128},
        {"opt_level": "O3", "keep_batchnorm_fp32": True},
        {"opt_level": "O3", "master_weights": True, "loss_scale": "dynamic"},
        {"opt_level": "O1", "loss_scale": 128.0, "min_loss_scale": 1.0, "max_loss_scale": 2.0**20},
        {"opt_level": "O0", "loss_scale": 4.0},
        {"opt_level": "O1", "cast_model_outputs": torch.float32},
        {"opt_level": "O2", "patch_torch_functions": True},
    ],
    ids=str,
)
def test_c91_settings_of_apex_are_taken(settings: dict[str, Any]) -> None:
    model = net()
    exact = copy.deepcopy(model)
    wanted = train(exact, sgd(exact), mixed=False)
    amp.initialize(model, optimizer := sgd(model), verbosity=0, init_scale=1024.0, **settings)
    assert_close(train(model, optimizer), wanted, 0.02)


FLAGS = [
    (level, batchnorm, scale)
    for level in LEVELS
    for batchnorm in ((None,) if level == "O1" else (None, "True", "False"))
    for scale in (None, "1.0", "128.0", "dynamic")
]


@pytest.mark.parametrize(("level", "batchnorm", "scale"), FLAGS)
def test_c91_flags_of_a_script_are_taken_in_every_combination(
    level: str, batchnorm: str | None, scale: str | None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    exact = copy.deepcopy(model)
    wanted = train(exact, sgd(exact), mixed=False, steps=3)
    settings = {"keep_batchnorm_fp32": batchnorm, "loss_scale": scale, "verbosity": 0, "init_scale": 1024.0}
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, **settings)
    kept = level in ("O0", "O1") or batchnorm == "True" or (level, batchnorm) == ("O2", None)
    assert model[1].weight.dtype is (torch.float32 if kept else torch.float16)
    assert_close(train(model, optimizer, steps=3), wanted, 0.05)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"opt_level": "01"}, "letter O"),
        ({"opt_level": "O4"}, "'O0', 'O1', 'O2', 'O3'"),
        ({"opt_level": "O1", "cast_model_type": torch.float16}, "cast_model_type"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32"),
        ({"opt_level": "O1", "master_weights": True}, "master_weights"),
        ({"opt_level": "O0", "patch_torch_functions": True}, "patch_torch_functions"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32"),
        ({"opt_level": "O2", "loss_scale": "much"}, "loss_scale"),
        ({"opt_level": "O2", "min_loss_scale": 2.0, "max_loss_scale": 1.0}, "max_loss_scale"),
    ],
)
def test_c91_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    model = net()
    with pytest.raises(AmpConfigError, match=words):
        amp.initialize(model, sgd(model), verbosity=0, **settings)
    assert model[0].weight.dtype is torch.float32
    amp.initialize(model, sgd(model), verbosity=0)


@pytest.mark.parametrize("num_losses", [0, True, 1.5, "2"])
def test_num_losses_is_a_whole_number(num_losses: Any) -> None:
    with pytest.raises(ValueError, match="num_losses"):
        start(num_losses=num_losses)


@pytest.mark.parametrize("limit", [0, -1, 1.5, "2"])
def test_c37_a_limit_of_skips_is_a_whole_number_or_none(limit: Any) -> None:
    model = net()
    with pytest.raises(ValueError, match=r"max_consecutive_skips=.* at least 1, or None"):
        amp.initialize(model, sgd(model), opt_level="O2", max_consecutive_skips=limit, verbosity=0)
    assert model[0].weight.dtype is torch.float32


def test_c90_a_level_in_the_place_of_enabled_is_refused() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"enabled='O2' cannot be used.*opt_level='O2'"):
        amp.initialize(model, sgd(model), "O2")  # type: ignore[arg-type]


@pytest.mark.parametrize("level", LEVELS)
def test_outputs_have_the_dtype_that_was_asked_for(level: str) -> None:
    model = amp.initialize(net(), opt_level=level, cast_model_outputs="float16", verbosity=0)
    assert model(torch.ones(1, 4)).dtype is torch.float16


def test_c56_layers_that_stay_float32_are_chosen_and_told() -> None:
    model, _ = start("O2", keep_fp32=lambda module, name: name == "2")
    assert [p.dtype for p in model.parameters()] == [torch.float16] * 2 + [torch.float32] * 2


# What is refused


def test_models_that_are_wrapped_already_are_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for wrap in (nn.DataParallel, nn.parallel.DistributedDataParallel):
            wrapped = wrap(net())
            for model in (wrapped, nn.Sequential(wrapped)):
                with pytest.raises(ValueError, match="wrap it afterwards"):
                    amp.initialize(model, verbosity=0)
    finally:
        torch.distributed.destroy_process_group()


def test_c60_half_models_are_refused_and_named() -> None:
    model = net()
    model[2].half()
    for level in LEVELS:
        with pytest.raises(ValueError, match=r"'2\.weight'.*allow_half_models=True"):
            amp.initialize(model, opt_level=level, verbosity=0)
    amp.initialize(model, opt_level="O2", verbosity=0, allow_half_models=True)


def test_the_same_thing_twice_is_refused_until_its_training_ends() -> None:
    model, optimizer = start()
    other = net()
    for models, optimizers in (([other, other], None), (other, [sgd(other)] * 2), (model, None), (other, optimizer)):
        with pytest.raises(ValueError, match=r"twice|before"):
            amp.initialize(models, optimizers, verbosity=0)
    amp.initialize(other, sgd(other), verbosity=0)
    amp.deinitialize(model)
    amp.initialize(model, optimizer, verbosity=0)


@pytest.mark.parametrize(("models", "optimizers"), [("net", None), (None, None), (nn.Linear(1, 1), 0.1), (print, None)])
def test_what_is_no_model_or_optimizer_is_refused(models: Any, optimizers: Any) -> None:
    with pytest.raises(TypeError, match="is no"):
        amp.initialize(models, optimizers, verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_lbfgs_is_refused_where_gradients_are_scaled(level: str) -> None:
    model = net()
    for optimizer in (torch.optim.LBFGS(model.parameters()), Larc(torch.optim.LBFGS(model.parameters()))):
        with pytest.raises(ValueError, match="opt_level='O0'"):
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_could_not_be_started_is_left_as_it_was(level: str) -> None:
    model, other = net(), net()
    optimizer = sgd(model)
    keys = set(vars(optimizer))
    if level == "O2":
        other.append(nn.LazyLinear(1))
    else:
        other[0].weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=r"lazy|post-accumulate"):
        amp.initialize([model, other], optimizer, opt_level=level, verbosity=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert set(vars(optimizer)) == keys
    assert not torch.is_autocast_enabled("cpu")
    train(model, optimizer, mixed=False)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def test_scale_loss_says_what_is_wrong() -> None:
    model, optimizer = start(num_losses=2)
    other, their_optimizer = start()
    loss = model(torch.ones(1, 4)).sum()
    with pytest.raises(RuntimeError, match=r"amp\.initialize has not seen this SGD"):
        amp.scale_loss(loss, sgd(net()))
    with pytest.raises(RuntimeError, match="empty list"):
        amp.scale_loss(loss, [])
    with pytest.raises(ValueError, match=r"same amp\.initialize"):
        amp.scale_loss(loss, [optimizer, their_optimizer])
    with pytest.raises(TypeError, match="float"):
        amp.scale_loss(1.0, optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_losses=2 allows 0 to 1"), amp.scale_loss(loss, optimizer, loss_id=2):
        pass
    amp.deinitialize()
    with pytest.raises(RuntimeError, match="has not seen"):
        amp.scale_loss(loss, optimizer)
    assert other is not model


def test_several_trainings_have_states_of_their_own() -> None:
    (a, opt_a), (b, opt_b) = start("O1"), start("O2", loss_scale=8.0)
    train(a, opt_a, steps=3)
    wanted = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 3}}
    assert amp.state_dict(optimizers=opt_a) == wanted
    assert amp.state_dict() == amp.state_dict(optimizers=opt_b) == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}
    train(b, opt_b, steps=2)
    assert amp.state_dict(optimizers=[opt_a]) == wanted
    amp.deinitialize(b)
    assert amp.state_dict() == wanted


# Steps


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_the_step_of_a_float32_run(level: str, fused: bool) -> None:
    def make(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
        if level == "O3":  # squares of half gradients are no match for float32
            return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=fused)
        return torch.optim.AdamW(model.parameters(), 0.01, fused=fused)

    model = net()
    exact = copy.deepcopy(model)
    wanted = train(exact, make(exact, False), mixed=False)
    _, optimizer = amp.initialize(model, make(model, fused), opt_level=level, verbosity=0, init_scale=1024.0)
    assert_close(train(model, optimizer), wanted, 0.02)


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_runs_before_the_step_and_its_loss_comes_back(level: str) -> None:
    reference = net()
    wanted = reference(torch.ones(1, 4)).sum()
    wanted.backward()
    sgd(reference).step()
    model, optimizer = start(level)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).float().sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss.detach()

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-3)
    assert_close([p.detach().float() for p in model.parameters()], [p.detach() for p in reference.parameters()], 2e-3)


def test_c16_a_second_step_cannot_bring_an_overflow_in() -> None:
    models, optimizers = pair("O2")
    block(models[0](ONE), optimizers[0], overflow=models[0])
    for _ in range(3):
        optimizers[0].step()
    assert values(models) == [1.0, 1.0]
    assert amp.engine(optimizers[0]).counts(optimizers[0])[Outcome.SKIPPED] == 3
    with pytest.raises(RuntimeError, match="called directly"):
        torch.optim.SGD.step(optimizers[0])
    assert values(models) == [1.0, 1.0]


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("overflow", [False, True])
def test_schedulers_made_before_and_after_work_and_nobody_warns(made: str, overflow: bool) -> None:
    model = net()
    optimizer = sgd(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)] if made == "before" else []
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, init_scale=2.0**24 if overflow else 1024.0)
    schedulers = schedulers or [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, steps=2, scheduler=schedulers[0])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    before = [p.detach().clone() for p in model.parameters()]
    engine, step = amp.engine(optimizer), optimizer.step
    counts = engine.counts(optimizer)
    amp.deinitialize()
    train(model, optimizer, steps=1, mixed=False)
    assert any(not torch.equal(p.float(), q) for p, q in zip(before, model.parameters(), strict=True))
    assert engine.counts(optimizer) == counts, "the engine has nothing to do with it any more"
    if made == "after":
        assert optimizer.step is step, "the scheduler's own wrapper stays"


def test_an_optimizer_without_gradients_is_idle() -> None:
    models, optimizers = pair()
    block(models[0](ONE), optimizers[0])
    optimizers[1].step()
    assert amp.outcome(optimizers[1]) is Outcome.IDLE


# Wrappers of an optimizer


class Larc:
    """Adapts each gradient to its weight before the step, and has an optimizer's methods, as such wrappers do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim = optimizer

    @property
    def state(self) -> Any:
        return self.optim.state

    @property
    def param_groups(self) -> Any:
        return self.optim.param_groups

    def state_dict(self) -> Any:
        return self.optim.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optim.load_state_dict(state)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, group: Any) -> None:
        self.optim.add_param_group(group)

    def step(self) -> None:
        with torch.no_grad():
            for group in self.optim.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.data *= 0.02 * torch.norm(p.data.float()) / (torch.norm(p.grad.data.float()) + 1e-8)
        self.optim.step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_wrappers_of_an_optimizer_train_like_float32(level: str, wrapped: str) -> None:
    model = net()
    exact = copy.deepcopy(model)
    wanted = train(exact, Larc(sgd(exact, 1.0, momentum=0.5)), mixed=False)
    optimizer: Any = sgd(model, 1.0, momentum=0.5)
    if wrapped == "before":
        _, optimizer = amp.initialize(model, Larc(optimizer), opt_level=level, verbosity=0, init_scale=1024.0)
        assert type(optimizer) is Larc
    else:
        optimizer = Larc(amp.initialize(model, optimizer, opt_level=level, verbosity=0, init_scale=1024.0)[1])
    assert_close(train(model, optimizer), wanted, 0.02)
    if level == "O2":
        assert all(s["momentum_buffer"].dtype is torch.float32 for s in optimizer.state.values())
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        for mine, theirs in zip(optimizer.state.values(), saved["state"].values(), strict=True):
            assert torch.equal(mine["momentum_buffer"], theirs["momentum_buffer"])


def test_a_wrapper_skips_and_what_it_wraps_cannot_go_behind_its_back() -> None:
    models = [nn.Linear(1, 1, bias=False)]
    models[0].weight.data.fill_(1.0)
    _, optimizer = amp.initialize(models, Larc(sgd(models[0])), opt_level="O2", verbosity=0, init_scale=SCALE)
    block(models[0](ONE), optimizer, overflow=models[0])
    optimizer.step()
    assert values(models) == [1.0]
    with pytest.raises(RuntimeError, match="called directly"):
        optimizer.optim.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_wrapper_that_goes_on_with_the_weights_after_the_step_has_the_masters(level: str) -> None:
    class Damped(Larc):
        """Moves the weights back by a little, which a half weight cannot show."""

        def step(self) -> None:
            before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
            self.optim.step()
            with torch.no_grad():
                for p, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
                    assert p.dtype is torch.float32
                    p.lerp_(old, 1e-4)

    model = net()
    exact = copy.deepcopy(model)
    wanted = train(exact, Damped(sgd(exact, 1e-3)), mixed=False)
    _, optimizer = amp.initialize(model, Damped(sgd(model, 1e-3)), opt_level=level, verbosity=0, init_scale=1024.0)
    train(model, optimizer)
    amp.deinitialize()
    assert_close(list(model.parameters()), wanted, 1e-4)


def test_a_wrapper_that_hides_its_optimizer_is_refused() -> None:
    class Hiding(Larc):
        @property
        def param_groups(self) -> Any:
            return list(self.optim.param_groups)

    model = net()
    with pytest.raises(ValueError, match="wrap it afterwards"):
        amp.initialize(model, Hiding(sgd(model)), opt_level="O2", verbosity=0)


# Masters and clipping


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("which", ["masters", "model"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_c05_clipping_masters_or_parameters_is_right(level: str, which: str, algorithm: str) -> None:
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm]
    model = net()
    exact = copy.deepcopy(model)
    wanted = train(exact, sgd(exact, 1.0), clip=lambda: clip(exact.parameters(), 0.05), mixed=False, steps=10)
    _, optimizer = amp.initialize(model, sgd(model, 1.0), opt_level=level, verbosity=0, init_scale=1024.0)
    params = {"masters": lambda: amp.master_params(optimizer), "model": model.parameters}[which]
    assert_close(train(model, optimizer, clip=lambda: clip(params(), 0.05), steps=10), wanted, 0.02)


def test_masters_are_float32_and_have_the_gradients_of_their_parameters() -> None:
    model, optimizer = start("O2", keep_fp32=["0"])
    block(model(torch.ones(1, 4)), optimizer)
    for master, param in zip(amp.master_params(optimizer), model.parameters(), strict=True):
        assert master.dtype is torch.float32
        assert master.grad is param.grad
        assert param.grad.dtype is torch.float32
        assert (master is param) is (param.dtype is torch.float32)
    assert [p is q for p, q in zip(amp.master_params(sgd(model)), model.parameters(), strict=True)] == [True] * 4


def test_masters_have_true_gradients_though_they_were_delayed() -> None:
    models, optimizers = pair("O1")
    block(models[0](ONE), optimizers[0], delay_unscale=True)
    assert models[0].weight.grad.item() == SCALE
    assert [p.grad.item() for p in amp.master_params(optimizers[0])] == [1.0]


@pytest.mark.parametrize("then", ["call", "step", "loss", "end"])
def test_edits_of_masters_are_taken_over(then: str) -> None:
    """As WGAN scripts clamp weights: Apex's users had to clamp the masters."""
    models, optimizers = pair("O2")
    out = models[0](ONE)
    for master in amp.master_params(optimizers[0]):
        master.data.fill_(0.1)
    if then == "call":
        assert models[0](ONE).item() == pytest.approx(0.1, abs=1e-4)
    elif then == "end":
        amp.deinitialize()
        assert values(models)[0] == pytest.approx(0.1, abs=1e-8)
    else:
        block(out, optimizers[0])
        if then == "step":
            for master in amp.master_params(optimizers[0]):
                master.data.fill_(0.3)
        optimizers[0].step()
        wanted = {"step": -0.7, "loss": -0.9}[then]
        assert [m.item() for m in amp.master_params(optimizers[0])] == [pytest.approx(wanted, abs=1e-6)]


def test_gradients_put_into_masters_are_taken_over() -> None:
    models, optimizers = pair("O2")
    block(models[0](ONE), optimizers[0])
    for master in amp.master_params(optimizers[0]):
        master.grad = master.grad / 4
    optimizers[0].step()
    assert values(models) == [0.75, 1.0]
    block(models[0](ONE), optimizers[0])
    for master in amp.master_params(optimizers[0]):
        master.grad = None
    optimizers[0].step()
    assert amp.outcome(optimizers[0]) is Outcome.IDLE


def test_looking_at_masters_between_forward_and_backward_hurts_nobody() -> None:
    model, optimizer = start("O2")
    loss = model(torch.ones(1, 4)).sum()
    assert len(list(amp.master_params(optimizer))) == 4
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


def test_half_weights_that_were_edited_before_masters_are_looked_at_count() -> None:
    models, optimizers = pair("O2")
    models[0].weight.data.fill_(0.5)
    assert [m.item() for m in amp.master_params(optimizers[0])] == [0.5]


# State


def test_the_state_is_in_the_format_of_apex_and_loads() -> None:
    model, optimizer = start(num_losses=3)
    for n in range(4):
        block(model(torch.ones(1, 4)), optimizer, loss_id=n % 2)
    state = amp.state_dict()
    assert state == {f"loss_scaler{i}": {"loss_scale": 1024.0, "unskipped": 2 * (i < 2)} for i in range(3)}
    filled: dict[str, Any] = {}
    assert amp.state_dict(filled) is filled == state
    amp.deinitialize()
    start(num_losses=3)
    state["loss_scaler1"] = {"loss_scale": 64.0, "unskipped": 5}
    amp.load_state_dict(state)
    assert amp.state_dict() == state


def test_a_static_scale_can_be_set_by_the_state() -> None:
    model, optimizer = start("O2", loss_scale=128.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": 0}})
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
        assert scaled.item() == pytest.approx(32.0 * model(torch.ones(1, 4)).sum().item())
        scaled.backward()
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32.0, "unskipped": 1}


def test_a_loaded_scale_stays_between_its_bounds_and_levels_without_one_go_on_without() -> None:
    for settings, scale in (({"max_loss_scale": 2.0**12}, 2.0**12), ({"opt_level": "O3"}, 1.0)):
        start(settings.pop("opt_level", "O1"), **settings)
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 7}})
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": scale, "unskipped": 7}
        amp.deinitialize()


def test_a_state_that_does_not_fit_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"amp\.initialize first"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
    start()
    before = amp.state_dict()
    with pytest.raises(CheckpointError):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": "much", "unskipped": 0}})
    assert amp.state_dict() == before
    with pytest.warns(UserWarning, match=r"num_losses=1.*\[1\]"):
        amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 8.0, "unskipped": 0} for i in range(2)})
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 8.0


def test_one_saved_scale_is_for_all_losses() -> None:
    start(num_losses=2)
    for state, scale in (
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}}, 8.0),
        (torch.amp.GradScaler("cpu", init_scale=32.0).state_dict(), 32.0),
    ):
        amp.load_state_dict(state)
        assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [scale, scale]


def test_c73_losses_that_are_new_start_anew() -> None:
    start(num_losses=3)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 8.0, "unskipped": 0} for i in range(2)})
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [8.0, 8.0, 1024.0]


# The end


@pytest.mark.parametrize("level", LEVELS)
def test_everything_is_left_as_it_was_found(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = sgd(model, momentum=0.9)
    keys = {id(m): set(vars(m)) for m in model.modules()}, set(vars(optimizer))
    step = optimizer.step.__func__
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, init_scale=1024.0)
    train(model, optimizer)
    masters = [m.detach().clone() for m in amp.master_params(optimizer)]
    amp.deinitialize(optimizer)
    for p, master in zip(model.parameters(), masters, strict=True):
        assert p.dtype is torch.float32
        assert p.grad_dtype is torch.float32
        assert torch.equal(p, master.float()) or level == "O3"
    for module in model.modules():
        hooks = [v for k, v in vars(module).items() if "hook" in k and isinstance(v, dict)]
        assert not any(hooks)
        assert set(vars(module)) == keys[0][id(module)]
    assert set(vars(optimizer)) - {"_opt_called"} == keys[1]
    assert optimizer.step.__func__ is step
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    train(model, optimizer, mixed=False)


def test_the_end_is_for_those_named_and_twice_is_once() -> None:
    (a, opt_a), (b, _) = start("O1"), start("O2")
    amp.deinitialize(opt_a)
    assert b[0].weight.dtype is torch.float16
    with pytest.raises(ValueError, match="is of no training"):
        amp.deinitialize(a)
    amp.deinitialize()
    amp.deinitialize()
    assert b[0].weight.dtype is torch.float32


def test_pending_gradients_are_true_after_the_end() -> None:
    models, optimizers = pair("O1")
    block(models[0](ONE), optimizers[0], delay_unscale=True)
    amp.deinitialize()
    assert models[0].weight.grad.item() == 1.0


def test_optimizers_can_be_copied_and_their_copies_know_nothing_of_it() -> None:
    models, optimizers = pair("O1")
    twin = copy.deepcopy(optimizers[0])
    assert "step" not in vars(twin)
    block(models[0](ONE), optimizers[0])
    twin.step()
    assert values(models) == [1.0, 1.0]
