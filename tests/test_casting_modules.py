"""What modules see and return once weights are half: boundaries, trees of arguments, torch's own particular modules."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.casting import models_below
from tests.helpers.engines import converted, halves
from tests.helpers.modules import amp, run, sgd

HALF, FULL = torch.float16, torch.float32


class Seen(nn.Module):
    """Passes a tensor on and remembers its dtype."""

    dtype: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.dtype = x.dtype
        return x


def gan() -> nn.Module:
    module = nn.Module()
    module.g = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    module.ds = nn.ModuleList([nn.Linear(2, 1), nn.ModuleDict({"deep": nn.Sequential(Seen(), nn.Linear(2, 1))})])
    module.loss, module.norm = nn.MSELoss(), nn.BatchNorm1d(2)
    return module


def test_c54_models_return_float32_and_what_lies_below_them_half() -> None:
    module = gan()
    converted(module, inside=True)
    noise = torch.randn(4, 2)
    assert models_below(module) == [module.g, module.ds[0], module.ds[1]["deep"], module.loss, module.norm]
    for model in (module.g, module.ds[0], module.ds[1]["deep"]):
        assert model(noise).dtype is FULL
    for inner in (module.g[0], module.ds[1]["deep"][1], module.g[1]):
        assert inner(torch.ones(1, inner[1].in_features if inner is module.g[1] else 2).to(HALF)).dtype is HALF
    assert module.g[0](noise).dtype is HALF
    assert module.ds[1]["deep"][0].dtype is HALF
    assert module.norm(noise).dtype is FULL


@pytest.mark.parametrize(("outputs", "dtype"), [(None, FULL), ("float16", HALF), ("bfloat16", torch.bfloat16)])
def test_outputs_have_the_dtype_asked_for(outputs: str | None, dtype: torch.dtype) -> None:
    model = nn.Linear(2, 1)
    converted(model, cast_model_outputs=outputs)
    assert model(torch.ones(1, 2)).dtype is dtype


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_outputs_are_cast_where_weights_stay_float32_too(level: str) -> None:
    module = gan()
    module.lazy, x = nn.LazyLinear(1), torch.ones(1, 2)
    conversion = converted(module, level, inside=True, cast_model_outputs="bfloat16")
    assert (halves(module), conversion.kept) == (set(), [])
    assert module.g(x).dtype is module.ds[0](x).dtype is torch.bfloat16
    assert module.loss(x, x).dtype is FULL
    assert module.g[0](x).dtype is FULL
    conversion.undo()
    assert module.g(x).dtype is FULL


@pytest.mark.parametrize(
    ("level", "asked", "given"), [("O1", None, HALF), ("O1", "float32", FULL), ("O0", "float16", HALF)]
)
def test_a_trainer_casts_outputs_at_levels_with_float32_weights(level: str, asked: str | None, given: Any) -> None:
    seen: list[torch.dtype] = []

    def step(module: Any, *_: Any) -> None:
        out = module.net(torch.ones(1, 1))
        seen.append(out.dtype)
        module.manual_backward(out.float().sum())

    module = run(step, sgd("net"), amp(level, cast_model_outputs=asked), net=nn.Linear(1, 1))
    assert seen == [given]
    assert not module.net._forward_hooks


def test_c66_loss_targets_are_never_cast() -> None:
    module = gan()
    module.loss = nn.Sequential(seen := Seen())
    converted(module, inside=True)
    target = torch.full((4, 2), 70000.0)
    assert torch.isfinite(nn.MSELoss()(module.loss(target), module.g(torch.randn(4, 2))))
    assert seen.dtype is FULL


def test_whole_argument_trees_are_cast_and_integers_are_not() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = nn.Linear(2, 2), []

        def forward(self, batch: Any, *more: Any, extra: Any) -> Any:
            self.seen += [batch["x"], *batch["many"], *more, extra]
            return {"out": self.net(batch["x"]), "ids": more[0]}

    model = Tree()
    converted(model)
    x = torch.ones(1, 2)
    out = model({"x": x, "many": [x, (x,)]}, torch.tensor([70000]), extra=x.double())
    assert [getattr(t, "dtype", t[0].dtype if isinstance(t, tuple) else t) for t in model.seen] == [
        *[HALF] * 3,
        torch.int64,
        HALF,
    ]
    assert (out["out"].dtype, out["ids"].tolist()) == (FULL, [70000])


def test_a_kept_module_gets_float32_between_half_ones() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(Seen(), nn.LayerNorm(3)), Seen(), nn.Linear(3, 1))
    converted(model, keep_fp32="1")
    inputs: list[Any] = []
    model[1][1].register_forward_pre_hook(lambda _, args: inputs.append(args[0].dtype))
    assert model(torch.ones(2, 2)).dtype is FULL
    assert (inputs, model[2].dtype) == ([FULL], FULL)
    model(torch.ones(2, 2)).sum().backward()


def test_a_model_with_a_float32_weight_of_its_own_keeps_to_its_own_dtype() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2, bias=False)
            self.tied, self.net = self.head.weight, nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x @ self.tied)

    model = Model()
    converted(model, keep_fp32="head")
    assert halves(model) == {"net.weight", "net.bias"}
    assert model(torch.ones(1, 2)).dtype is FULL


# Modules of torch that look at dtypes themselves


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("hidden", [True, False])
def test_recurrent_modules_with_and_without_a_hidden_state(kind: Any, hidden: bool) -> None:
    cell = "Cell" in kind.__name__
    model = nn.ModuleDict(
        {"rnn": kind(3, 4) if cell else kind(3, 4, num_layers=2, batch_first=True, bidirectional=True)}
    )
    x = torch.randn(2, 3) if cell else torch.randn(2, 5, 3)
    h = torch.randn(2, 4) if cell else torch.randn(4, 2, 4)
    state: Any = (h, h.clone()) if "LSTM" in kind.__name__ else h
    plain = copy.deepcopy(model["rnn"])
    conversion = converted(model, inside=True)
    args = (x, state) if hidden else (x,)
    out, wanted = model["rnn"](*args), plain(*args)
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)
    torch.stack([t.sum() for t in torch.utils._pytree.tree_leaves(out)]).sum().backward()
    conversion.undo()
    torch.testing.assert_close(model["rnn"](*args), wanted)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_and_transformers(train: bool, masked: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoder(layer, 2),
            "cross": nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=4),
        }
    ).train(train)
    plain = copy.deepcopy(model)
    converted(model, inside=True)
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 3, 6)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    with torch.set_grad_enabled(train):
        outs = []
        for m in (model, plain):
            encoded = m["encoder"](x, src_key_padding_mask=mask)[:, :3]
            outs.append(m["cross"](encoded, memory, memory[..., :4])[0])
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
    if train:
        outs[0].sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_runs_inner_modules_again(reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))

        def forward(self, x: Tensor, again: bool) -> Any:
            x = self.stem(x)
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=reentrant) if again else self.block(x)

    model = Block()
    converted(model, keep_fp32="LayerNorm")
    grads = []
    for again in (False, True):
        model.zero_grad()
        model(torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), again).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
