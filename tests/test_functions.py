"""O1 casts the same functions on every device, and functions of one's own as they were registered."""

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_amp
from lightning_amp import amp, cpu_casts, functions
from lightning_amp.cast_lists import CPU_CASTS
from lightning_amp.cpu_casts import CpuCasts, casts
from lightning_amp.function_patches import FunctionPatches
from lightning_amp.functions import find_function
from tests.helpers.modules import Scripted, fit, linear, run, sgd
from tests.helpers.modules import amp as plugin

HALF, FULL = torch.float16, torch.float32
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(functions.registry, "kinds", {})
    yield
    amp.deinitialize()
    alive.clear()
    assert functions.registry.users == 0


def floats(result: Any) -> set[torch.dtype]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}


def make(*shape: int, dtype: torch.dtype = FULL, device: str = "cpu") -> Tensor:
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).view(shape).to(device, dtype)


# Autocast's lists, as they are on CUDA. Each entry gets square matrices; `g` is an index tensor.

IN_HALF: dict[str, Callable[[Any], Any]] = {
    "conv1d": lambda x: F.conv1d(x[None], x[:, :, None]),
    "conv2d": lambda x: F.conv2d(x[None, :, :, None], x[:, :, None, None]),
    "conv3d": lambda x: F.conv3d(x[None, :, :, None, None], x[:, :, None, None, None]),
    "conv_tbc": lambda x: torch.conv_tbc(x[None], x[None], x[0]),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[None], x[:, :, None]),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x[None, :, :, None], x[:, :, None, None]),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x[None, :, :, None, None], x[:, :, None, None, None]),
    "prelu": lambda x: F.prelu(x, x[0]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "addmv": lambda x: torch.addmv(x[0], x, x[0]),
    "addr": lambda x: torch.addr(x, x[0], x[0]),
    "matmul": lambda x: [torch.matmul(x, x), x @ x, x.matmul(x), x.__rmatmul__(x), torch.linalg.matmul(x, x)],
    "einsum": lambda x: [torch.einsum("ij,jk->ik", x, x), torch.einsum("ij,j->ij", x, x[0])],
    "mm": lambda x: [torch.mm(x, x), x.mm(x)],
    "mv": lambda x: [torch.mv(x, x[0]), x.mv(x[0]), x @ x[0]],
    "linalg_vecdot": lambda x: torch.linalg.vecdot(x, x),
    "linear": lambda x: F.linear(x, x, x[0]),
    "addbmm": lambda x: torch.addbmm(x, x[None], x[None]),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "chain_matmul": lambda x: torch.chain_matmul(x, x, x),
    "linalg_multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}

ELEMENTWISE = ["acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"]
ELEMENTWISE_AND_SUMS = [*ELEMENTWISE, "sinh", "tan", "square", "sum", "prod"]

IN_FLOAT: dict[str, Callable[[Any], Any]] = {
    **{name: (lambda x, name=name: [getattr(torch, name)(x), getattr(x, name)()]) for name in ELEMENTWISE_AND_SUMS},
    "pow": lambda x: [torch.pow(x, 2), x**2, x.pow(x), 2**x, torch.pow(2, x), x.square(), 1 / x],
    "softplus": F.softplus,
    "layer_norm": lambda x: [F.layer_norm(x, (4,)), nn.LayerNorm(4)(x)],
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "group_norm": lambda x: [F.group_norm(x, 2), nn.GroupNorm(2, 4)(x)],
    "norm": lambda x: [torch.norm(x), x.norm(), x.norm(dim=1), torch.norm(x, p=1, dim=0), torch.linalg.norm(x)],
    "frobenius_norm": lambda x: torch.norm(x, p="fro"),
    "nuclear_norm": lambda x: torch.norm(x, p="nuc"),
    "linalg_vector_norm": torch.linalg.vector_norm,
    "linalg_matrix_norm": torch.linalg.matrix_norm,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, x),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x, torch.ones(4)),
    "nll_loss": lambda x: [F.nll_loss(x, torch.zeros(4).long()), F.cross_entropy(x, torch.zeros(4).long())],
    "nll_loss2d": lambda x: F.nll_loss(x[None, :, :, None], torch.zeros(1, 4, 1).long()),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, torch.ones(4)),
    "kl_div": lambda x: F.kl_div(x.log(), x, reduction="batchmean"),
    "l1_loss": lambda x: F.l1_loss(x, x),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
    "huber_loss": lambda x: F.huber_loss(x, x),
    "mse_loss": lambda x: [F.mse_loss(x, x), nn.MSELoss()(x, x.float()), nn.MSELoss()(x.float(), x)],
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, x, torch.ones(4, 4)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, torch.zeros(4, 4).long()),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones(4)),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x, x),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, torch.zeros(4).long()),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.float()),
    "dist": lambda x: [torch.dist(x, x), x.dist(x)],
    "pdist": F.pdist,
    "cdist": lambda x: torch.cdist(x, x),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
    "upsample": lambda x: [F.interpolate(x[None], scale_factor=2), nn.Upsample(scale_factor=2)(x[None])],
    "softmax": lambda x: [F.softmax(x, -1), x.softmax(-1), torch.softmax(x, 0), nn.Softmax(-1)(x), F.softmin(x, 0)],
    "log_softmax": lambda x: [F.log_softmax(x, -1), x.log_softmax(-1)],
    "cumprod": lambda x: x.cumprod(0),
    "cumsum": lambda x: torch.cumsum(x, 0),
    # Made of listed ones, in torch's Python code.
    "normalize": F.normalize,
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x, x),
}

IN_THE_WIDEST: dict[str, Callable[[Any, Any], Any]] = {
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "atan2": lambda x, y: [torch.atan2(x, y), y.atan2(x)],
    "bilinear": lambda x, y: F.bilinear(x, y, torch.ones(1, 4, 4, dtype=x.dtype, device=x.device)),
    "cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "dot": lambda x, y: [torch.dot(x[0], y[0]), y[0].dot(x[0])],
    "vdot": lambda x, y: torch.vdot(x[0], y[0]),
    "index_put": lambda x, y: torch.index_put(y, (torch.tensor([0], device=x.device),), x[0]),
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=1),
    "scatter_add": lambda x, y: torch.scatter_add(y, 0, torch.zeros(4, 4, dtype=torch.int64, device=x.device), x),
    # On no list: torch itself promotes, or the CPU's lists have them.
    "cat": lambda x, y: [torch.cat([x, y]), torch.cat((y, x))],
    "stack": lambda x, y: torch.stack([x, y]),
    "arithmetic": lambda x, y: [x * y, x + y, x - y, x / y, y * x],
    "where": lambda x, y: torch.where(x > 0.5, x, y),
}


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IN_HALF)
def test_functions_that_run_in_half(name: str, device: str) -> None:
    with casts(device, HALF, True):
        assert floats(IN_HALF[name](make(4, 4, device=device))) == {HALF}
        assert floats(IN_HALF[name](make(4, 4, device=device).double())) == {torch.float64}
    assert floats(IN_HALF[name](make(4, 4, device=device))) == {FULL}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IN_FLOAT)
def test_functions_that_run_in_float32(name: str, device: str) -> None:
    with casts(device, HALF, True), torch.device(device):
        x = make(4, 4, device=device)
        result = IN_FLOAT[name](x.half())
        assert floats(result) == {FULL}
        exact = torch.utils._pytree.tree_leaves(IN_FLOAT[name](x.half().float()))
    for got, wanted in zip(torch.utils._pytree.tree_leaves(result), exact, strict=True):
        assert torch.equal(got, wanted), "computed in float32, not only returned in it"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", IN_THE_WIDEST)
def test_functions_that_run_in_the_widest_dtype(name: str, device: str) -> None:
    x, y = make(4, 4, dtype=HALF, device=device), make(4, 4, device=device)
    with casts(device, HALF, True):
        assert floats(IN_THE_WIDEST[name](x, y)) == {FULL}
        assert floats(IN_THE_WIDEST[name](y, y)) == {FULL}
        assert floats(IN_THE_WIDEST[name](x, x)) == {HALF}


def test_the_tables_above_hold_every_function_that_torch_lists_for_cuda() -> None:
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text()
    cases = {
        "LOWER_PRECISION_FP": {*IN_HALF, "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "convolution"},
        "FP32": IN_FLOAT.keys() | {"native_layer_norm"},
        "FP32_SET_OPT_DTYPE": IN_FLOAT.keys(),
        "PROMOTE": IN_THE_WIDEST.keys() | {"grid_sampler"},  # the CPU's own list has it, in float32
    }
    for macro, known in cases.items():
        lines = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\n", text, re.DOTALL)
        assert lines is not None
        names = set(re.findall(r"_\((\w+)", lines[1].replace("\\", "")))
        assert {n for n in names if not n.startswith(("_", "upsample"))} <= set(known), macro


@pytest.mark.parametrize("layer", [nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers_and_cells_run_in_half_and_train(layer: Any) -> None:
    net = layer(4, 3)
    x = make(2, 4) if "Cell" in layer.__name__ else make(5, 2, 4)
    with casts("cpu", HALF, True):
        result = net(x)
        assert floats(result) == {HALF}
        loss = sum(leaf.float().sum() for leaf in torch.utils._pytree.tree_leaves(result))
    loss.backward()
    exact = sum(leaf.sum() for leaf in torch.utils._pytree.tree_leaves(copy.deepcopy(net)(x)))
    assert loss.item() == pytest.approx(exact.item(), abs=0.02)
    assert all(p.grad is not None and p.grad.dtype is FULL for p in net.parameters())


def test_recurrent_layers_take_packed_sequences() -> None:
    packed = nn.utils.rnn.pack_sequence([make(3, 4), make(1, 4)])
    with casts("cpu", HALF, True):
        assert nn.LSTM(4, 3)(packed)[0].data.dtype is HALF


def test_in_place_functions_keep_their_dtype_and_their_tensor() -> None:
    with casts("cpu", HALF, True):
        x = make(2, 2, dtype=HALF)
        before = x.data_ptr()
        x.exp_().add_(make(2, 2)).mul_(make(2, 2)).pow_(2)
        x **= 2
        assert (x.dtype, x.data_ptr()) == (HALF, before)
        out = torch.empty(2, 2, dtype=HALF)
        assert torch.pow(x, 2, out=out) is out


def test_an_explicit_dtype_is_what_comes_out() -> None:
    with casts("cpu", HALF, True):
        assert make(2, 2, dtype=HALF).sum(dtype=HALF).dtype is HALF
        assert F.softmax(make(2, 2, dtype=HALF), -1, dtype=torch.float64).dtype is torch.float64


def test_a_half_cpu_tensor_leaves_as_float32() -> None:
    patches = FunctionPatches()
    patches.apply()
    with casts("cpu", HALF, True):
        assert make(2, dtype=HALF).cpu().dtype is FULL
    patches.undo()
    assert "cpu" not in vars(Tensor)


def test_integers_and_doubles_are_never_cast() -> None:
    with casts("cpu", HALF, True):
        assert torch.arange(70_000, 70_002).sum().item() == 140_001
        assert (torch.arange(3) ** 2).dtype is torch.int64
        assert torch.softmax(make(2).double(), 0).dtype is torch.float64


def test_nothing_is_cast_where_autocast_is_off() -> None:
    with CpuCasts():
        assert F.softmax(make(2, dtype=HALF), 0).dtype is HALF
        assert torch.mv(make(2, 2), make(2)).dtype is FULL


def test_regions_inside_each_other_look_once_and_leave_nothing() -> None:
    calls: list[Any] = []
    with casts("cpu", HALF, True), casts("cpu", torch.bfloat16, True):
        assert cpu_casts._registration.users == 2
        calls.append(make(2, 2).mv(make(2)).dtype)
    assert calls == [torch.bfloat16]
    assert cpu_casts._registration.users == 0
    assert F.softmax(make(2, dtype=HALF), 0).dtype is HALF


def test_bfloat16_is_cast_likewise() -> None:
    with casts("cpu", torch.bfloat16, True):
        assert make(2, 2).mv(make(2)).dtype is torch.bfloat16
        assert make(2, dtype=torch.bfloat16).softmax(0).dtype is FULL


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).softmax(-1) * F.prelu(x, x.new_ones(1))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_how_a_function_is_reached_makes_no_difference() -> None:
    x, by_name = make(2, dtype=HALF), torch.exp
    with casts("cpu", HALF, True):
        assert {by_name(x).dtype, x.exp().dtype, torch.ops.aten.exp(x).dtype} == {FULL}
    with torch.autocast("cpu", HALF):
        assert by_name(x).dtype is HALF


@pytest.mark.parametrize("error", [None, KeyError("in the step")])
def test_a_training_registers_the_casts_once_and_takes_them_back(error: Exception | None) -> None:
    users: list[int] = []

    def step(module: Any, *_: Any) -> None:
        users.append(cpu_casts._registration.users)
        if error is not None:
            raise error

    with pytest.raises(KeyError) if error else nullcontext():
        fit(Scripted(step, sgd("net"), net=linear(1.0)), plugin("O1"))
    assert set(users) == {1}
    assert cpu_casts._registration.users == 0


@pytest.mark.parametrize("automatic", [False, True])
def test_a_checkpointed_block_is_cast_again_as_it_was(automatic: bool) -> None:
    x = make(2, 4)

    def step(module: Any, *_: Any) -> Any:
        loss = module.net(x).float().square().mean()
        if automatic:
            return loss
        module.manual_backward(loss)
        module.optimizers().step()
        return None

    net = Checkpointed()
    plain = copy.deepcopy(net.block)
    before = [p.detach().clone() for p in net.parameters()]
    for trained in (net, plain):
        fit(Scripted(step, sgd("net"), automatic=automatic, net=trained), plugin("O1"))
    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    assert not any(map(torch.equal, net.parameters(), before))


# Functions that have no half kernel


def test_functions_without_a_half_kernel_run_in_float32() -> None:
    x = make(4, 4, dtype=HALF) + torch.eye(4, dtype=HALF)
    patches = FunctionPatches()
    patches.apply()
    with casts("cpu", HALF, True):
        results = [
            torch.linalg.inv(x),
            torch.linalg.solve_triangular(x, x, upper=True),
            torch.linalg.qr(x),
            torch.inverse(x),
            x.inverse(),
            x.det(),
            torch.fft.irfft(torch.fft.rfft(x)),
            F.ctc_loss(x.log_softmax(-1)[:, None].half(), torch.tensor([[1]]), torch.tensor([4]), torch.tensor([1])),
        ]
        assert floats(results) == {FULL}
        spectrum = torch.stft(make(64, dtype=HALF), 16, window=torch.hann_window(16), return_complex=True)
        assert spectrum.dtype is torch.complex64
        scale_tril = (torch.eye(4) @ torch.eye(4)).half()
        normal = torch.distributions.MultivariateNormal(torch.zeros(4), scale_tril=scale_tril.float())
        assert normal.log_prob(make(4, dtype=HALF)).dtype is FULL
    patches.undo()
    with pytest.raises(RuntimeError, match="Half"):
        torch.linalg.inv(x)
    assert "inverse" not in vars(Tensor)


# Functions of one's own


class Twice(torch.autograd.Function):
    """Has a kernel for one dtype only."""

    wanted = FULL

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float = 2.0) -> Tensor:
        assert x.dtype is Twice.wanted
        assert not torch.is_autocast_enabled("cpu") or Twice.wanted is HALF
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2.0, None


KINDS = {"half": amp.half_function, "float": amp.float_function, "promote": amp.promote_function}


def seen(*args: Any, **kwargs: Any) -> Any:
    """Returns its own arguments."""
    return args, kwargs


def test_decorated_functions_cast_containers_and_keywords_and_nothing_else() -> None:
    generator = (i for i in range(3))
    module = nn.Linear(1, 1)
    ids = torch.tensor([70_000])
    wide, half = make(2), make(2, dtype=HALF)
    for kind, dtype in (("half", HALF), ("float", FULL), ("promote", FULL)):
        with casts("cpu", HALF, True):
            args, kwargs = KINDS[kind](seen)(wide, [half, (wide,)], {"x": half}, ids, generator, module, y=half, n=3)
        assert floats((args[:3], kwargs)) == {dtype}
        assert args[3] is ids
        assert args[4] is generator
        assert list(generator) == [0, 1, 2], "nobody has drawn from it"
        generator = (i for i in range(3))
        assert module.weight.dtype is FULL
        assert kwargs["n"] == 3
        args, kwargs = KINDS[kind](seen)(wide, y=half)
        assert args[0] is wide, "outside of a training nothing is cast"
        assert kwargs["y"] is half


@dataclasses.dataclass(frozen=True)
class Fields:
    x: Any
    ids: Any = None


@pytest.mark.parametrize("kind", KINDS)
def test_decorated_functions_find_tensors_in_dataclasses_alone(kind: str) -> None:
    ids = torch.tensor([70_000])
    given = [Fields(make(2), ids), Fields([make(2, dtype=HALF)])]
    with casts("cpu", HALF, True):
        args, _ = KINDS[kind](seen)(*given)
    assert {leaf.dtype for leaf in (args[0].x, args[1].x[0])} == {HALF if kind == "half" else FULL}
    assert args[0].ids is ids
    assert given[1].x[0].dtype is HALF


def test_a_promoted_operation_of_integers_alone_is_left_alone() -> None:
    with casts("cpu", HALF, True):
        assert torch.dot(torch.arange(3), torch.arange(3)).item() == 5


def test_a_promoted_function_of_one_dtype_is_left_alone() -> None:
    x = make(2, dtype=HALF)
    with casts("cpu", HALF, True):
        (args, _) = amp.promote_function(seen)(x, [x])
    assert args[0] is x


def test_a_decorated_function_keeps_its_name_and_can_be_pickled() -> None:
    assert decorated.__name__ == "decorated"
    assert pickle.loads(pickle.dumps(decorated)) is decorated


@amp.half_function
def decorated(x: Tensor) -> Tensor:
    """Doubles."""
    return x + x


@amp.float_function
def counting(xs: Any) -> Iterator[Tensor]:
    yield from xs


def test_generators_are_left_alone() -> None:
    with casts("cpu", HALF, True):
        results = list(counting(make(2, dtype=HALF) for _ in range(2)))
    assert [r.dtype for r in results] == [HALF, HALF]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", ["float", "half"])
def test_c50_custom_autograd_functions(level: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At O2 a module that is kept float32 casts what goes in and comes out, without any registration."""
    monkeypatch.setattr(Twice, "wanted", HALF if kind == "half" else FULL)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.op, self.last = nn.Linear(4, 4), Op(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.op(self.first(x)))

    class Op(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return Twice.apply(x + self.bias.to(x.dtype))

    if level == "O1":
        getattr(amp, f"register_{kind}_function")(Twice, "apply")
    net = Net()
    exact = copy.deepcopy(net).double()
    exact.last(exact.first(make(2, 4).double()) * 2.0).sum().backward()
    settings = {"keep_fp32": "Op"} if (level, kind) == ("O2", "float") else {}
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0, init_scale=1024.0, **settings)
    with amp.scale_loss(net(make(2, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()
    for p, q in zip(net.first.parameters(), exact.first.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < 0.01 * q.grad.norm()
    amp.deinitialize()
    assert "apply" not in vars(Twice)


def test_custom_fwd_works_as_in_torch() -> None:
    class Exact(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert x.dtype is FULL
            return x * 2.0

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2.0

    with casts("cpu", HALF, True):
        assert Exact.apply(make(2, dtype=HALF)).dtype is FULL


class Ops:
    """A stand-in for a library's module."""

    offset = 1.0

    def method(self, x: Tensor) -> torch.dtype:
        assert isinstance(self, Ops)
        return x.dtype

    @staticmethod
    def static(x: Tensor) -> torch.dtype:
        return x.dtype

    @classmethod
    def of_class(cls, x: Tensor) -> torch.dtype:
        assert cls is Ops
        return x.dtype


alive: list[Any] = []
"""What `start` has returned: a training that nobody holds ends when it is collected, in the middle of a test too."""


def start(level: str = "O1", **settings: Any) -> tuple[nn.Module, Any]:
    net = nn.Linear(2, 1)
    alive.append(amp.initialize(net, torch.optim.SGD(net.parameters(), 1.0), opt_level=level, verbosity=0, **settings))
    return alive[-1]


@pytest.mark.parametrize("name", ["method", "static", "of_class"])
def test_registered_functions_are_cast_in_a_training_and_are_themselves_again_after_it(name: str) -> None:
    before = vars(Ops)[name]
    amp.register_half_function(Ops, name)
    call = getattr(Ops(), name)
    assert call(make(2)) is FULL
    start()
    assert getattr(Ops(), name)(make(2)) is HALF
    if name != "method":
        assert getattr(Ops, name)(make(2)) is HALF
    with amp.disable_casts():
        assert getattr(Ops(), name)(make(2)) is FULL
    amp.deinitialize()
    assert vars(Ops)[name] is before
    assert getattr(Ops(), name)(make(2)) is FULL


@pytest.mark.parametrize(
    ("level", "settings", "dtype"),
    [
        ("O0", {}, FULL),
        ("O1", {}, HALF),
        ("O2", {}, FULL),
        ("O2", {"patch_torch_functions": True}, HALF),
        ("O3", {}, FULL),
    ],
)
def test_registered_functions_are_active_where_functions_are_cast(level: str, settings: Any, dtype: Any) -> None:
    amp.register_half_function(Ops, "static")
    start(level, **settings)
    assert Ops.static(make(2)) is dtype


def test_a_function_of_torch_can_be_registered() -> None:
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(F, "gelu")
    amp.register_float_function(torch, "bmm")
    start()
    assert torch.sigmoid(make(2, dtype=HALF)).dtype is FULL
    assert F.gelu(make(2)).dtype is HALF
    assert torch.bmm(make(1, 2, 2), make(1, 2, 2)).dtype is FULL, "not cast back by autocast"
    assert nn.GELU()(make(2)).dtype is HALF


def test_a_registration_during_a_training_is_refused_and_after_it_is_not() -> None:
    start()
    for register in (amp.register_half_function, amp.register_float_function, amp.register_promote_function):
        with pytest.raises(RuntimeError, match="before"):
            register(Ops, "static")
    assert functions.registry.kinds == {}
    amp.deinitialize()
    amp.register_half_function(Ops, "static")


def test_what_is_no_function_cannot_be_registered() -> None:
    for name in ("nothing", "offset"):
        with pytest.raises(ValueError, match="no such function"):
            amp.register_half_function(Ops, name)


def test_two_trainings_share_a_wrapper_and_the_last_one_takes_it_away() -> None:
    amp.register_half_function(Ops, "static")
    first, second = FunctionPatches(), FunctionPatches()
    before = vars(Ops)["static"]
    for patches in (first, second, second):
        patches.apply()
    first.undo()
    assert vars(Ops)["static"] is not before
    first.undo()
    second.undo()
    assert vars(Ops)["static"] is before
    assert vars(F)["binary_cross_entropy"].__module__ == "torch.nn.functional"
    assert not hasattr(vars(F)["binary_cross_entropy"], "__wrapped__")


def test_two_trainings_that_disagree_are_refused() -> None:
    path = f"{__name__}.Ops.static"
    first, second = FunctionPatches(half=[path]), FunctionPatches(floating=[path])
    first.apply()
    with pytest.raises(ValueError, match="half function in another training"):
        second.apply()
    second.undo()
    first.undo()


def test_somebody_elses_patch_on_top_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    amp.register_half_function(Ops, "static")
    start()
    monkeypatch.setattr(Ops, "static", staticmethod(lambda x: "theirs"))
    amp.deinitialize()
    assert Ops.static(make(2)) == "theirs"


def test_registered_functions_are_put_back_when_a_training_is_dropped() -> None:
    amp.register_half_function(Ops, "static")
    before = vars(Ops)["static"]
    start()
    start()  # sees that the first is gone
    amp.deinitialize()
    assert vars(Ops)["static"] is before


# The plugin


def test_the_plugin_casts_registered_and_named_functions_and_undoes_it() -> None:
    dtypes: list[Any] = []

    def step(module: Any, *_: Any) -> None:
        dtypes.append((Ops.static(make(2)), Ops.of_class(make(2, dtype=HALF)), F.gelu(make(2)).dtype))

    amp.register_half_function(Ops, "static")
    place = find_function("torch.nn.functional.gelu")
    settings = {"half_functions": [f"{__name__}.Ops.static"], "float_functions": [f"{__name__}.Ops.of_class"]}
    run(step, sgd("net"), plugin("O1", **settings, promote_functions=["torch.nn.functional.gelu"]), net=linear(1.0))
    assert dtypes == [(HALF, FULL, FULL)]
    assert Ops.of_class(make(2, dtype=HALF)) is HALF
    assert not hasattr(getattr(*place), "__wrapped__")


def test_registrations_are_refused_while_the_trainer_runs() -> None:
    def step(module: Any, *_: Any) -> None:
        with pytest.raises(RuntimeError, match=r"before amp\.initialize"):
            amp.register_half_function(Ops, "static")

    run(step, sgd("net"), plugin("O1"), net=linear(1.0))


@pytest.mark.parametrize("path", ["nothing", "torch.nothing", "torch.nn.functional.nothing.deep", "torch.pi", ""])
def test_a_name_that_leads_nowhere_is_refused_when_the_plugin_is_made(path: str) -> None:
    with pytest.raises(ValueError, match="full dotted name"):
        plugin("O1", half_functions=[path])


def test_a_name_that_is_no_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 is no name.*full dotted name"):
        plugin("O1", half_functions=[3])


def test_one_name_alone_is_one_name() -> None:
    assert plugin("O1", half_functions="torch.sigmoid")._functions._named == {"torch.sigmoid": "half"}


def test_named_functions_need_a_level_that_casts() -> None:
    with pytest.raises(ValueError, match="patch_torch_functions=True"):
        plugin("O2", float_functions=["torch.sigmoid"])
    plugin("O2", float_functions=["torch.sigmoid"], patch_torch_functions=True)


def test_named_functions_come_from_yaml() -> None:
    jsonargparse = pytest.importorskip("jsonargparse", reason="jsonargparse reads YAML for LightningCLI")
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(lightning_amp.AmpPrecision, "plugin")
    text = "{class_path: lightning_amp.AmpPrecision, init_args: {opt_level: O1, half_functions: [torch.sigmoid]}}"
    made = parser.instantiate(parser.parse_args(["--plugin", text])).plugin
    assert made._functions._named == {"torch.sigmoid": "half"}
    copy.deepcopy(pickle.loads(pickle.dumps(made)))


# Binary cross-entropy


@pytest.mark.parametrize("loss", [F.binary_cross_entropy, nn.BCELoss()])
def test_c57_binary_cross_entropy_on_half_is_refused_with_the_remedy(loss: Any) -> None:
    loss = loss if isinstance(loss, nn.Module) else lambda *args: F.binary_cross_entropy(*args)
    net, _ = start()
    probability = torch.sigmoid(net(make(3, 2)))
    assert probability.dtype is HALF
    with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        loss(probability, torch.ones(3, 1))
    exact = loss(probability.float(), torch.ones(3, 1))
    assert exact.dtype is FULL
    assert F.binary_cross_entropy_with_logits(net(make(3, 2)), torch.ones(3, 1)).item() == pytest.approx(
        exact.item(), abs=1e-3
    )


def test_c57_binary_cross_entropy_is_cast_to_float32_on_request() -> None:
    amp.register_float_function(F, "binary_cross_entropy")
    net, _ = start()
    assert nn.BCELoss()(torch.sigmoid(net(make(3, 2))), torch.ones(3, 1)).dtype is FULL


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_c57_losses_get_float32_outputs_where_weights_are_half(level: str) -> None:
    net, _ = start(level)
    assert nn.BCELoss()(torch.sigmoid(net(make(3, 2))), torch.ones(3, 1)).dtype is FULL


def test_c57_the_plugin_refuses_it_likewise() -> None:
    def step(module: Any, *_: Any) -> None:
        with pytest.raises(RuntimeError, match="BCEWithLogitsLoss"):
            nn.BCELoss()(torch.sigmoid(module.net(make(3, 1))), torch.ones(3, 1))

    run(step, sgd("net"), plugin("O1"), net=linear(1.0))


def test_every_cpu_cast_is_an_operation_that_the_cpu_does_not_cast_by_itself() -> None:
    assert set(CPU_CASTS.values()) == {"half", "float", "promote"}
    missing = [
        name for name in CPU_CASTS if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")
    ]
    assert not missing
