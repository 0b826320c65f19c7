"""Which weights become half, which stay, and the dtypes that modules see and return."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_amp.casting import Conversion
from lightning_amp.dtype_errors import explained_dtype_errors
from tests.helpers.engines import converted, dtypes, halves, masters_of

HALF, FULL = torch.float16, torch.float32


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.LayerNorm(3), nn.Linear(3, 2))


# Which


BATCHNORM = {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")}
LAYERNORM, CONV, LINEAR = ({f"{i}.weight", f"{i}.bias"} for i in (3, 0, 4))


@pytest.mark.parametrize(
    ("level", "settings", "names"),
    [
        ("O2", {}, CONV | LAYERNORM | LINEAR),
        ("O2", {"keep_batchnorm_fp32": False}, CONV | BATCHNORM | LAYERNORM | LINEAR),
        ("O3", {}, CONV | BATCHNORM | LAYERNORM | LINEAR),
        ("O3", {"keep_batchnorm_fp32": True}, CONV | LAYERNORM | LINEAR),
        ("O3", {"keep_fp32": "LayerNorm"}, CONV | BATCHNORM | LINEAR),
        ("O2", {"keep_fp32": nn.LayerNorm}, CONV | LINEAR),
        ("O2", {"keep_fp32": nn.modules.conv._ConvNd}, LAYERNORM | LINEAR),
        ("O2", {"keep_fp32": "_ConvNd"}, LAYERNORM | LINEAR),
        ("O2", {"keep_fp32": ["[03]"]}, LINEAR),
        ("O2", {"keep_fp32": ["LayerNorm", nn.Linear]}, CONV),
        ("O2", {"keep_fp32": lambda module, name: name == "4" or isinstance(module, nn.Conv2d)}, LAYERNORM),
        ("O2", {"keep_fp32": "Sequential"}, set()),
    ],
)
def test_c56_levels_and_keep_fp32_decide_what_becomes_half(level: str, settings: Any, names: set[str]) -> None:
    model = tower()
    before = copy.deepcopy(model.state_dict())
    conversion = converted(model, level, **settings)
    assert halves(model) == names
    every = {name for name, _ in model.named_parameters()}
    assert set(conversion.kept) == every - names - BATCHNORM
    conversion.undo()
    assert halves(model) == set()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._state_dict_hooks for m in model.modules())


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_norms_work_between_half_layers(kind: Any, affine: bool, level: str, train: bool) -> None:
    norm = kind(3, affine=affine)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), norm, nn.Conv2d(3, 1, 1)).train(train)
    x = torch.randn(4, 2, 5, 5)
    wanted = copy.deepcopy(model)(x)
    converted(model, level)
    between: list[torch.dtype] = []
    norm.register_forward_hook(lambda _module, _args, output: between.append(output.dtype))
    out = model(x)
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)
    out.sum().backward()
    assert between == [HALF], "kept or not, a norm between half layers casts nothing"
    if affine:
        assert norm.weight.dtype is (FULL if kind is nn.BatchNorm2d and level == "O2" else HALF)


def test_only_float32_is_converted_and_other_modules_get_their_inputs_as_they_are() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.table = nn.Parameter(torch.arange(3), requires_grad=False)
            self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    model = nn.ModuleDict({"wide": nn.Linear(2, 2).double(), "brain": nn.Linear(2, 2).bfloat16(), "odd": Counter()})
    before = dtypes(model)
    conversion = converted(model)
    assert dtypes(model) == before
    assert conversion.kept == []
    assert model["wide"](torch.ones(1, 2, dtype=torch.float64)).dtype is torch.float64
    assert model["brain"](torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16


class Attentive(nn.Module):
    """Owns its weights through lists, as well as directly."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(2, 2) for _ in range(2)])
        self.named = nn.ParameterDict({"bias": torch.randn(2)})

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0] @ self.weights[1] + self.named["bias"]


def test_parameter_lists_belong_to_the_module_that_has_them() -> None:
    model = nn.Sequential(Attentive())
    converted(model)
    assert halves(model) == set(dtypes(model))
    assert model[0](torch.ones(1, 2)).dtype is HALF, "called directly, with float32"
    kept = nn.Sequential(Attentive())
    converted(kept, keep_fp32="*.named")
    assert halves(kept) == set(), "a module has one dtype"


def test_what_the_lightning_module_owns_itself_stays_float32() -> None:
    module = Attentive()
    module.net, module.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    conversion = converted(module, inside=True)
    assert halves(module) == {"net.weight", "net.bias"}
    assert set(conversion.kept) == {"scale", "weights.0", "weights.1", "named.bias"}
    assert module(module.net(torch.ones(1, 2)) * module.scale).dtype is FULL
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


@pytest.mark.parametrize(("keep", "names"), [(None, {"emb.weight", "out.weight"}), ("out", set()), ("emb", set())])
def test_tied_weights_stay_tied_and_of_one_dtype(keep: str | None, names: set[str]) -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(5, 3), "out": nn.Linear(3, 5, bias=False)})
    model["out"].weight = model["emb"].weight
    conversion = converted(model, keep_fp32=keep)
    assert halves(model) == names
    assert model["out"].weight is model["emb"].weight
    assert len(masters_of(conversion)) == (0 if keep else 1)
    model["out"](model["emb"](torch.tensor([1, 2]))).float().sum().backward()


def parametrized(name: str) -> nn.Module:
    wrap: Callable[..., nn.Module] = {
        "weight_norm": parametrizations.weight_norm,
        "spectral_norm": parametrizations.spectral_norm,
        "old_weight_norm": torch.nn.utils.weight_norm,
        "old_spectral_norm": torch.nn.utils.spectral_norm,
    }[name]
    return nn.Sequential(wrap(nn.Conv2d(2, 4, 3)), nn.Flatten(), wrap(nn.Linear(36, 2)))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "old_weight_norm", "old_spectral_norm"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_parametrized_weights_are_converted_trained_and_restored(name: str, level: str) -> None:
    model, plain = parametrized(name), parametrized(name)
    plain.load_state_dict(model.state_dict())
    before = dtypes(model)
    x = torch.randn(3, 2, 5, 5)
    conversion = converted(model, level)
    assert halves(model) == set(before)
    for inputs in (x, x):
        out, wanted = model(inputs), plain(inputs)
        assert out.dtype is FULL
        torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)
    out.sum().backward()
    wanted.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=5e-2, atol=5e-2)
    assert model[0](x).dtype is HALF, "called below the boundary, with float32"
    conversion.undo()
    assert dtypes(model) == before
    torch.testing.assert_close(model(x), plain(x), rtol=1e-2, atol=1e-2)


def test_a_parametrized_module_is_kept_by_the_name_of_its_class() -> None:
    model = parametrized("weight_norm")
    conversion = converted(model, keep_fp32="Linear")
    assert halves(model) == {n for n in dtypes(model) if n.startswith("0.")}
    assert set(conversion.kept) == {n for n in dtypes(model) if n.startswith("2.")}
    model(torch.randn(3, 2, 5, 5)).sum().backward()


def test_a_module_whose_name_resembles_parametrizations_is_converted() -> None:
    model = nn.Module()
    model.my_parametrizations = nn.Linear(2, 2)
    converted(model, inside=True)
    assert halves(model) == set(dtypes(model))
    assert model.my_parametrizations(torch.ones(1, 2)).dtype is FULL


# Copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_work_alone(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    conversion = converted(model, keep_fp32="LayerNorm")
    twin, x = copied(model), torch.randn(4, 2)
    assert dtypes(twin) == dtypes(model)
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))
        twin[0].weight.zero_()
    twin.load_state_dict(twin.state_dict())
    assert twin.state_dict()["0.weight"].dtype is HALF, "its own values, which know no master"
    conversion.undo()
    assert model[0].weight.abs().sum() > 0
    assert twin(x).dtype is FULL


# What is refused, and what is explained


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:`torch.jit")
def test_lazy_and_scripted_modules_are_refused_by_name(level: str) -> None:
    for child, word in ((nn.LazyLinear(2), "lazy"), (torch.jit.script(nn.Linear(1, 1)), "scripted")):
        model = nn.Sequential(nn.Linear(1, 1), child)
        with pytest.raises(ValueError, match=rf"'1.*' is {word}: .*\. "):
            converted(model, level)
        assert halves(model) == set(), "refused before anything is touched"


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (lambda m: nn.functional.linear(torch.ones(1, 2), m.weight), RuntimeError),
        (lambda m: torch.ones(1, 2) @ m.weight.t(), RuntimeError),
        (lambda m: nn.functional.conv1d(torch.ones(1, 2, 1), m.weight[..., None]), RuntimeError),
        (lambda m: torch.linalg.inv(m.weight), RuntimeError),
        (lambda m: torch.linalg.qr(m.weight), NotImplementedError),
    ],
)
def test_an_error_over_dtypes_is_explained(use: Callable[[Any], Any], kind: type[Exception]) -> None:
    model = nn.Linear(2, 2)
    converted(model)
    with pytest.raises(kind) as plain:
        use(model)
    with (
        pytest.raises(kind, match=r"call the module.*keep_fp32.*patch_torch_functions=True") as explained,
        explained_dtype_errors(),
    ):
        use(model)
    assert str(explained.value).startswith(str(plain.value))
    assert type(explained.value) is type(plain.value)
    assert str(explained.value.__cause__) == str(plain.value)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("same dtype"), KeyboardInterrupt()])
def test_other_errors_pass_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, explained_dtype_errors():
        raise error
    assert caught.value is error


def test_undoing_twice_does_nothing_more() -> None:
    model = nn.Linear(2, 1)
    conversion: Conversion = converted(model)
    conversion.undo()
    model.weight.data.fill_(5.0)
    conversion.undo()
    assert model.weight.tolist() == [[5.0, 5.0]]
