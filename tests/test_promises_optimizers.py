"""Promises 3 and 7: optimizers keep the model's own parameters, and edits of weights between steps are honoured."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from lightning_amp import Outcome
from tests.helpers.modules import HALF_LEVELS, LEVELS, Scripted, amp, fit, linear, run, sgd, weights

# 3. The optimizer keeps the model's own parameters.


def ids(optimizer: Any) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused", [False, True])
def test_promise_3_groups_and_state_name_the_models_parameters(level: str, fused: bool) -> None:
    """Before, between and after steps; the groups, their lists and the state stay the same objects."""

    def make(module: Any) -> Any:
        return torch.optim.Adam(module.net.parameters(), 0.1, eps=1e-4, fused=fused)

    kept: list[Any] = []

    def step(module: Any, *_: Any) -> None:
        optimizer = module.optimizers()
        mine = list(map(id, module.net.parameters()))
        kept.append((optimizer.param_groups, [g["params"] for g in optimizer.param_groups], optimizer.state))
        assert ids(optimizer) == mine
        module.manual_backward(module.net(torch.ones(2, 3)).mean())
        optimizer.step()
        assert ids(optimizer) == mine
        assert list(map(id, optimizer.state)) == mine
        assert list(map(id, (p for p in optimizer.state if p.grad is not None))) == mine

    module = run(step, make, amp(level), 2, net=nn.Linear(3, 2))
    (groups, lists, state), again = kept
    assert groups is again[0]
    assert all(a is b for a, b in zip(lists, again[1], strict=True))
    assert state is again[2]
    assert list(map(id, module.net.parameters())) == list(map(id, state))


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_promise_3_also_when_the_step_raises(level: str) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError

    def step(module: Any, *_: Any) -> None:
        module.manual_backward(module.net(torch.ones(2, 3)).mean())
        with pytest.raises(ArithmeticError):
            module.optimizers().step()
        assert ids(module.optimizers()) == list(map(id, module.net.parameters()))

    run(step, lambda m: Failing(m.net.parameters(), 1.0), amp(level), net=nn.Linear(3, 2))


@pytest.mark.parametrize("level", LEVELS)
def test_promise_3_toggling_freezes_the_other_optimizers_parameters(level: str) -> None:
    def step(module: Any, *_: Any) -> None:
        a, b = module.optimizers()
        for mine, others in ((a, module.b), (b, module.a)):
            module.toggle_optimizer(mine)
            assert not any(p.requires_grad for p in others.parameters())
            module.manual_backward(module.b(module.a(torch.ones(1, 1))).mean())
            assert all(p.grad is None for p in others.parameters())
            mine.step()
            mine.zero_grad()
            module.untoggle_optimizer(mine)
        assert all(p.requires_grad for p in module.parameters())

    module = run(step, sgd("a", "b", lr=0.5), amp(level), a=linear(1.0), b=linear(2.0))
    assert (module.a.weight.item(), module.b.weight.item()) == (0.0, 2.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spelling", ["wrapper", "raw", "module", "net", "keep zeros", "by hand"])
def test_promise_3_every_spelling_of_zero_grad_clears(level: str, spelling: str) -> None:
    def clear(module: Any) -> None:
        optimizer = module.optimizers()
        match spelling:
            case "wrapper":
                optimizer.zero_grad()
            case "raw":
                optimizer.optimizer.zero_grad()
            case "module":
                module.zero_grad()
            case "net":
                module.net.zero_grad()
            case "keep zeros":
                optimizer.zero_grad(set_to_none=False)
            case "by hand":
                module.net.weight.grad = None

    def step(module: Any, *_: Any) -> None:
        for _ in range(2):  # what the second pass leaves must not hold what the first one left
            clear(module)
            module.manual_backward(module.net(torch.ones(1, 1)).sum())
        module.optimizers().step()

    assert run(step, sgd("net"), amp(level), net=linear(3.0)).net.weight.item() == 2.0


class Unfreeze(BaseFinetuning):
    """Trains the head alone, and the body as well from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_promise_3_base_finetuning_unfreezes_and_adds_a_group(level: str) -> None:
    def make(module: Any) -> Any:
        return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1.0)

    layers = {"body": linear(1.0), "head": linear(4.0)}
    module = Scripted(lambda m, *_: m.head(m.body(torch.ones(1, 1))).sum(), make, automatic=True, **layers)
    fit(module, amp(level), [0], max_epochs=2, callbacks=[Unfreeze()])
    assert (module.body.weight.item(), module.head.weight.item()) == (-2.0, 2.0)


@pytest.mark.parametrize("level", LEVELS)
def test_promise_3_a_scheduler_and_a_late_group_reach_the_weights(level: str) -> None:
    """The scheduler holds the group's dict from before the first step."""

    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.a.parameters(), lr=2.0)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        if batch_idx == 1:
            optimizer.add_param_group({"params": list(module.b.parameters()), "lr": 4.0})
        optimizer.zero_grad()
        module.manual_backward((module.a(torch.ones(1, 1)) + module.b(torch.ones(1, 1))).sum())
        optimizer.step()
        if batch_idx == 0:
            module.lr_schedulers().step()

    module = run(step, make, amp(level), 2, a=linear(8.0), b=linear(8.0))
    assert (module.a.weight.item(), module.b.weight.item()) == (5.0, 4.0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_promise_3_a_late_group_is_a_full_member(level: str) -> None:
    """It has a master, which steps below half resolution reach, and its gradients count for a skip."""
    plugin = amp(level)
    outcomes: list[Outcome | None] = []

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        if batch_idx == 1:
            optimizer.add_param_group({"params": list(module.late.parameters())})
        optimizer.zero_grad()
        module.manual_backward((module.net(torch.ones(1, 1)) + module.late(torch.ones(1, 1))).sum())
        if batch_idx == 3:
            module.late.weight.grad.fill_(torch.nan)
        optimizer.step()
        outcomes.append(plugin.outcome(optimizer))

    module = run(step, sgd("net", lr=2.0**-14), plugin, 4, net=linear(1.0), late=linear(1.0))
    assert (module.net.weight.item(), module.late.weight.item()) == (1 - 3 * 2.0**-14, 1 - 2 * 2.0**-14)
    assert outcomes == [*[Outcome.STEPPED] * 3, Outcome.SKIPPED]


# 7. Edits of half weights are honoured.


def trained(edit: Callable[[Any], None] = lambda module: None, steps: int = 2) -> Any:
    """Trains a layer at O2 with ``edit`` between steps; gradients are one, lr 2^-14: a half weight near one stays."""
    plugin = amp("O2")

    def step(module: Any, *_: Any) -> None:
        module.plugin = plugin
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.net(torch.ones(1, 2)).sum())
        optimizer.step()
        edit(module)

    return run(step, sgd("net", lr=2.0**-14), plugin, steps, net=linear(1.0, -1.0)).net


def test_promise_7_steps_below_half_resolution_add_up_in_the_master() -> None:
    assert trained(steps=16).weight.tolist() == [[1.0 - 2.0**-10, -1.0 - 2.0**-10]]


def test_promise_7_a_clamp_of_half_weights_is_taken_over() -> None:
    """It starts the master afresh from the edge; what the clamp leaves alone keeps its low bits."""

    def clamp(module: Any) -> None:
        module.net.weight.data.clamp_(-0.25, 2.0)

    assert trained(clamp, steps=3).weight.tolist() == [[1.0 - 3 * 2.0**-14, -0.25 - 2 * 2.0**-14]]


EDITS: dict[str, Callable[[Any], Any]] = {
    "data": lambda net: net.weight.data.fill_(0.5),
    "no_grad": lambda net: torch.no_grad()(net.weight.fill_)(0.5),
    "init": lambda net: nn.init.constant_(net.weight, 0.5),
    "assigned data": lambda net: setattr(net.weight, "data", torch.full_like(net.weight, 0.5)),
    "load_state_dict": lambda net: net.load_state_dict({"weight": torch.full((1, 2), 0.5)}),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_promise_7_any_way_to_write_a_weight_is_taken_over(edit: Callable[[Any], Any]) -> None:
    net = trained(lambda m: edit(m.net) if m.global_step == 1 else None)
    assert net.weight.tolist() == [[0.5 - 2.0**-14] * 2]


def test_promise_7_a_loaded_state_dict_is_taken_over_to_the_last_bit() -> None:
    fine = torch.tensor([[0.1, 0.7]])
    net = trained(lambda m: m.net.load_state_dict({"weight": fine}) if m.global_step == 2 else None)
    assert torch.equal(net.weight, fine)


def test_promise_7_an_ema_swap_and_back() -> None:
    """The average is used for a while, then the training weights return: nothing is lost, nothing is undone."""
    average = torch.tensor([[0.75, 0.125]])

    def swap(module: Any) -> None:
        kept = {k: v.clone() for k, v in module.net.state_dict().items()}
        module.net.load_state_dict({"weight": average})
        assert module.net(torch.ones(1, 2)).item() == 0.875
        module.net.load_state_dict(kept)

    assert torch.equal(trained(swap).weight, trained().weight)


def test_promise_7_perturb_and_restore_costs_no_low_bits() -> None:
    def perturb(module: Any) -> None:
        kept = module.net.weight.detach().clone()
        module.net.weight.data.add_(1.0)
        module.manual_backward(module.net(torch.ones(1, 2)).sum())
        module.net.weight.data.copy_(kept)

    assert torch.equal(trained(perturb).weight, trained().weight)


def test_promise_7_finer_edits_are_made_inside_masters() -> None:
    def refine(module: Any) -> None:
        optimizer = module.optimizers()
        with module.plugin.masters(optimizer):
            (master,) = optimizer.param_groups[0]["params"]
            master.data += 2.0**-20
        assert torch.equal(module.net.weight, master.to(torch.float16))

    assert trained(refine, steps=3).weight.tolist() == [
        [1.0 + 3 * (2.0**-20 - 2.0**-14), -1.0 + 3 * (2.0**-20 - 2.0**-14)]
    ]


def test_promise_7_a_converted_network_that_no_optimizer_owns() -> None:
    """A target network that is written by hand keeps what was written, and one that is not keeps its low bits."""
    fine = torch.tensor([[0.1, 0.7]])

    def step(module: Any, *_: Any) -> None:
        assert module.target.weight.dtype is torch.float16
        module.target.weight.data.copy_(module.net.weight.data)

    module = run(
        step, sgd("net"), amp("O2"), net=linear(0.3, 0.9), target=linear(5.0, 5.0), teacher=linear(*fine[0].tolist())
    )
    assert torch.equal(module.target.weight, torch.tensor([[0.3, 0.9]]).half().float())
    assert torch.equal(module.teacher.weight, fine)


def test_promise_7_reading_never_writes_a_master(tmp_path: Path) -> None:
    def read(module: Any) -> None:
        copy.deepcopy(module.net)
        module.net.state_dict()
        module.trainer.save_checkpoint(tmp_path / "saved.ckpt")
        module.plugin.grad_norm(module.optimizers())
        with module.plugin.masters(module.optimizers()):
            pass

    assert torch.equal(trained(read, steps=4).weight, trained(steps=4).weight)


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_promise_7_wgan_clamping_matches_float32(level: str) -> None:
    """The critic of a WGAN: RMSprop, then weights clamped into ±0.01, 20 times.

    The two sides change places half way: a master that had gone on beyond the clamp would first have to come back.
    """

    def step(module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)
        optimizer = module.optimizers()
        optimizer.zero_grad()
        loss = module.net(torch.randn(8, 4)).mean() - module.net(torch.randn(8, 4) + 1).mean()
        module.manual_backward(loss if batch_idx < 10 else -loss)
        optimizer.step()
        for p in module.net.parameters():
            p.data.clamp_(-0.01, 0.01)

    results: list[list[Tensor]] = []
    for plugin in (None, amp(level, loss_scale=64.0)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        for p in net.parameters():
            p.data.clamp_(-0.01, 0.01)
        module = run(step, lambda m: torch.optim.RMSprop(m.net.parameters(), 1e-3, eps=1e-4), plugin, 20, net=net)
        results.append(weights(module))
    for ours, plain in zip(*results, strict=True):
        assert ours.abs().max() <= 0.01 + 1e-5
        assert (ours - plain).abs().max() <= 5e-4
