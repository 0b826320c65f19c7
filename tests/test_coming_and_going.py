"""Networks of every kind, parameters that come and go, and weights that others write, at every level with a scale."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.checkpoint import checkpoint

from tests.helpers.modules import HALF_LEVELS, Batches, Scripted, amp, fit
from tests.helpers.modules import trainer as make_trainer

BATCHES = [torch.randn(6, 8, generator=torch.Generator().manual_seed(i)) for i in range(8)]


class Tied(nn.Module):
    """An output layer that shares its weight with an input layer, behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


class Recurrent(nn.Module):
    """An LSTM with its hidden state handed in."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(1, len(x), 8)
        return self.rnn(x.unsqueeze(1), (zeros, zeros) if isinstance(self.rnn, nn.LSTM) else zeros)[0]


class Attention(nn.Module):
    """Self-attention over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[None], x[None], x[None], need_weights=False)[0]


class Checkpointed(nn.Module):
    """Two layers whose activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.body = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)


def frozen_batchnorm() -> nn.Module:
    norm = nn.BatchNorm1d(8)
    norm.requires_grad_(False).eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign]
    return nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "tied": Tied,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "checkpoint": lambda: Checkpointed(False),
    "checkpoint reentrant": lambda: Checkpointed(True),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "spectral norm, old": lambda: old_spectral_norm(nn.Linear(8, 8)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "weight norm, old": lambda: old_weight_norm(nn.Linear(8, 8)),
    "batchnorm frozen": frozen_batchnorm,
    "batchnorm not affine": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8)),
    "batchnorm synchronised": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), None
    ),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="eager"),  # type: ignore[dict-item]
}


def build(make: Callable[[], nn.Module]) -> Scripted:
    torch.manual_seed(0)
    net = make()
    return Scripted(
        lambda module, batch, i: (module.net(batch) - 1).square().mean(),
        lambda module: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.5),
        automatic=True,
        net=net,
    )


def moves(make: Callable[[], nn.Module], plugin: Any, **settings: Any) -> Tensor:
    module = build(make)
    before = [p.detach().clone() for p in module.parameters()]
    fit(module, plugin, BATCHES, **settings)
    return torch.cat([(p.detach() - b).flatten() for p, b in zip(module.parameters(), before, strict=True)])


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore:dropout option adds dropout")
@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "batchnorm synchronised"])
def test_networks_of_every_kind_move_as_in_fp32(name, level):
    wanted, given = moves(NETWORKS[name], None), moves(NETWORKS[name], amp(level))
    assert ((given - wanted).norm() / wanted.norm()).item() < 0.01


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("how", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_weights_stay_float32_since_half_has_no_functions_for_them(level, how):
    def make() -> nn.Module:
        return nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map=how), nn.Linear(8, 8))

    wanted, given = moves(make, None), moves(make, amp(level))
    assert ((given - wanted).norm() / wanted.norm()).item() < 0.02


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_synchronised_batchnorm_counts_as_batchnorm(level):
    """It trains on GPUs alone; what can be seen here is what is converted, and that evaluation works."""
    module = build(NETWORKS["batchnorm synchronised"])
    module.net.eval()
    wanted = module.net(BATCHES[0])
    plugin = amp(level)
    plugin.convert_module(module)
    half = level in ("O2", "O3")
    assert module.net[0].weight.dtype is (torch.float16 if half else torch.float32)
    assert module.net[1].weight.dtype is (torch.float16 if level == "O3" else torch.float32)
    with plugin.forward_context():
        torch.testing.assert_close(module.net(BATCHES[0]).float(), wanted, rtol=5e-3, atol=5e-3)
    plugin.teardown()
    assert module.net[0].weight.dtype is torch.float32


def test_lazy_modules_are_refused_by_name_where_weights_are_converted():
    with pytest.raises(ValueError, match=r"'net.weight' is lazy.*Run the module once"):
        fit(build(lambda: nn.LazyLinear(8)), amp("O2"), BATCHES)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c85_sparse_embedding_gradients_are_true_and_checked_after_duplicates_are_summed(level):
    def embedding(factor: float) -> Scripted:
        torch.manual_seed(0)
        module = Scripted(
            lambda m, batch, i: m.net(torch.tensor([1, 1, 3])).float().sum() * factor,
            lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
            automatic=True,
            net=nn.Embedding(5, 2, sparse=True),
        )
        module.before = module.net.weight.detach().clone()
        return module

    module = embedding(1.0)
    fit(module, amp(level), BATCHES[:1])
    expected = torch.zeros(5, 2)
    expected[1], expected[3] = 2 * 0.5, 0.5
    torch.testing.assert_close(
        module.before - module.net.weight, expected, rtol=1e-3, atol=1e-3 if level == "O3" else 1e-6
    )
    huge = embedding(40000.0)
    plugin = amp(level, init_scale=1.0)
    trainer = fit(huge, plugin, BATCHES[:1])
    finite = level == "O1"  # its embedding gradients are float32, where 80,000 is a number; in half it is not
    assert (plugin.outcome(trainer.optimizers[0]).value == "stepped") is finite


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c85_sparse_adam_moves_as_in_fp32(level):
    def weight(plugin: Any) -> Tensor:
        torch.manual_seed(0)
        module = Scripted(
            lambda m, batch, i: (m.net(torch.tensor([i % 5, 2])) - 1).float().square().sum(),
            lambda m: torch.optim.SparseAdam(m.parameters(), lr=0.01, eps=1e-4),
            automatic=True,
            net=nn.Embedding(5, 2, sparse=True),
        )
        fit(module, plugin, BATCHES)
        return module.net.weight.detach()

    torch.testing.assert_close(weight(amp(level)), weight(None), rtol=5e-3, atol=1e-2 if level == "O3" else 1e-3)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c85_lbfgs_is_refused_with_its_reason(level):
    module = build(NETWORKS["linear"])
    module._optimizers = lambda m: torch.optim.LBFGS(m.parameters())
    with pytest.raises(MisconfigurationException, match=r"LBFGS cannot be used.*Use opt_level='O0'"):
        fit(module, amp(level), BATCHES)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c84_what_is_frozen_stays_frozen_through_a_toggle_cycle(level):
    def step(module: Any, batch: Tensor, i: int) -> None:
        for k, optimizer in enumerate(module.optimizers()):
            module.toggle_optimizer(optimizer)
            module.manual_backward((module.b if k else module.a)(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            module.untoggle_optimizer(optimizer)

    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    a[0].requires_grad_(False)
    module = Scripted(
        step, lambda m: [torch.optim.SGD(n.parameters(), lr=0.1) for n in (m.a, m.b)], a=a, b=nn.Linear(8, 8)
    )
    before = copy.deepcopy(module.state_dict())
    fit(module, amp(level), BATCHES)
    after = module.state_dict()
    assert torch.equal(before["a.0.weight"], after["a.0.weight"])
    assert not module.a[0].weight.requires_grad
    assert not torch.equal(before["a.1.weight"], after["a.1.weight"])
    assert not torch.equal(before["b.weight"], after["b.weight"])


class Backbone(Scripted):
    """A backbone that a callback unfreezes at epoch 1, and a head."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            lambda m, batch, i: (m.head(m.backbone(batch)) - 1).square().mean(),
            lambda m: torch.optim.SGD(m.head.parameters(), lr=0.05, momentum=0.5),
            automatic=True,
            backbone=nn.Linear(8, 8),
            head=nn.Linear(8, 1),
        )


def finetuning() -> BackboneFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, initial_denom_lr=1.0, verbose=False)


@pytest.mark.filterwarnings("ignore:.*does not have any lr scheduler", "ignore:The dirpath")
@pytest.mark.parametrize("level", HALF_LEVELS)
def test_c79_c81_a_backbone_unfrozen_in_mid_run_goes_on_after_a_resume(level, tmp_path):
    def go_on(plugin: Callable[[], Any], file: Any) -> list[Tensor]:
        """Trains two epochs, and two more in a new Trainer, where Lightning itself freezes the backbone again."""
        first = fit(Backbone(), plugin(), BATCHES, max_epochs=2, callbacks=[finetuning()])
        assert len(first.optimizers[0].param_groups) == 2
        first.save_checkpoint(file)
        module = Backbone()
        second = make_trainer(plugin(), max_epochs=4, callbacks=[finetuning()])
        second.fit(module, Batches(BATCHES), ckpt_path=file)
        assert len(second.optimizers[0].param_groups) == 2
        return [p.detach() for p in module.parameters()] + [
            torch.tensor([p.requires_grad for p in module.parameters()])
        ]

    wanted = go_on(lambda: None, tmp_path / "fp32.ckpt")
    given = go_on(lambda: amp(level), tmp_path / "half.ckpt")
    for w, g in zip(wanted, given, strict=True):
        torch.testing.assert_close(g, w, rtol=5e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore:.*Swapping scheduler")
@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize(
    "average", [lambda: EMAWeightAveraging(decay=0.9), lambda: StochasticWeightAveraging(0.05, swa_epoch_start=2)]
)
def test_lightnings_own_averaging_ends_as_in_fp32(level, average):
    wanted = moves(NETWORKS["linear"], None, callbacks=[average()], max_epochs=4)
    given = moves(NETWORKS["linear"], amp(level), callbacks=[average()], max_epochs=4)
    assert ((given - wanted).norm() / wanted.norm()).item() < 0.01


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_wgan_clamping_in_place_is_honoured_at_every_step(level):
    def step(module: Any, batch: Tensor, i: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(-module.net(batch).mean())
        optimizer.step()
        for p in module.net.parameters():
            p.data.clamp_(-0.01, 0.01)

    weights = []
    for plugin in (None, amp(level)):
        torch.manual_seed(0)
        module = Scripted(step, lambda m: torch.optim.RMSprop(m.parameters(), lr=5e-4, eps=1e-4), net=nn.Linear(8, 1))
        fit(module, plugin, BATCHES * 3)
        weights.append(module.net.weight.detach())
    assert weights[1].abs().max() <= 0.01 * 1.001
    torch.testing.assert_close(weights[1], weights[0], rtol=0.0, atol=4e-4)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_requires_grad_flipped_in_mid_run(level):
    def step(module: Any, batch: Tensor, i: int) -> None:
        module.net[0].requires_grad_(i % 2 == 0)
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.net(batch).square().mean())
        optimizer.step()

    weights = []
    for plugin in (None, amp(level)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        module = Scripted(step, lambda m: torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-3), net=net)
        fit(module, plugin, BATCHES)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=5e-3, atol=0.05 if level == "O3" else 1e-3)
