"""FP32 originals from before the cast, their loan to an optimizer, and the way back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.loan import Loan
from lightning_amp.master_weights import MasterWeights, merged
from tests.helpers.engines import grad_of, param

HALF = torch.float16
FINE = 1.0001
"""Not a half number: half(FINE) is 1."""


def kept(*params: Tensor, lend: bool = True, dtype: torch.dtype = HALF) -> MasterWeights:
    """Converts parameters and returns their masters."""
    masters = MasterWeights(lend)
    for p in params:
        masters.convert(p, dtype)
    return masters


def master_of(masters: MasterWeights, p: Tensor) -> nn.Parameter:
    master = masters.of(p)
    assert master is not None
    return master


def lent(masters: MasterWeights, optimizer: Any) -> Loan:
    loan = Loan(masters, optimizer)
    loan.take()
    return loan


def numbers(tensor: Tensor) -> list[float]:
    return tensor.detach().double().tolist()


@pytest.mark.parametrize("lend", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_originals_are_kept_from_before_the_cast(dtype: torch.dtype, lend: bool) -> None:
    p = nn.Parameter(torch.randn(64))
    original, same = p.detach().clone(), p
    masters = kept(p, lend=lend, dtype=dtype)
    masters.convert(p, dtype)
    assert p is same
    assert torch.equal(p, original.to(dtype))
    assert torch.equal(master_of(masters, p), original)
    assert len(masters) == 1
    masters.restore()
    assert torch.equal(p, original)
    assert (p.dtype, p.grad_dtype, len(masters)) == (torch.float32, torch.float32, 0)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_converted_parameter_keeps_its_flags_layout_and_gradient(trainable: bool) -> None:
    p = nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), requires_grad=trainable)
    p.grad = grad = torch.ones_like(p)
    masters = kept(p)
    for _ in range(2):
        assert p.requires_grad is trainable
        assert p.is_contiguous(memory_format=torch.channels_last)
        assert p.grad is grad
        assert grad.dtype is torch.float32
        masters.restore()


@pytest.mark.parametrize(("lend", "dtype"), [(True, torch.float32), (False, HALF)])
def test_a_gradient_may_be_float32_where_masters_are_lent(lend: bool, dtype: torch.dtype) -> None:
    p = param(1.0, 2.0)
    kept(p, lend=lend)
    (p * torch.ones(2, dtype=HALF)).sum().backward()
    assert grad_of(p).dtype is HALF
    if lend:
        p.grad = torch.ones(2)
        assert p.grad.dtype is torch.float32
    else:
        with pytest.raises(RuntimeError, match=r"dtype|type"):
            p.grad = torch.ones(2)


def test_restore_gives_true_gradients_back_in_float32() -> None:
    p = param(FINE)
    masters = kept(p, lend=False)
    p.grad = torch.full_like(p, 3.0)
    masters.restore()
    assert grad_of(p).dtype is torch.float32
    assert numbers(grad_of(p)) == [3.0]


# The loan


def trained(*params: Tensor, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [p]} for p in params], **{"lr": 1.0, "momentum": 0.5} | settings)


def test_a_loan_changes_entries_and_leaves_the_objects() -> None:
    p, q, free = param(FINE), param(FINE), param(1.0)
    masters = kept(p, q)
    optimizer = trained(p, q, free)
    optimizer.state[p]["momentum_buffer"] = buffer = torch.ones(1)
    groups, state = optimizer.param_groups, optimizer.state
    dicts, lists = list(groups), [group["params"] for group in groups]
    loan = lent(masters, optimizer)
    held = [group["params"][0] for group in groups]
    assert held[0] is masters.of(p)
    assert held[1] is masters.of(q)
    assert held[2] is free
    assert state[held[0]]["momentum_buffer"] is buffer
    assert p not in state
    for _ in range(2):
        loan.give_back()
        assert [group["params"][0] for group in groups] == [p, q, free]
        assert state[p]["momentum_buffer"] is buffer
    assert (optimizer.param_groups, optimizer.state) == (groups, state)
    assert all(g is d and g["params"] is x for g, d, x in zip(groups, dicts, lists, strict=True))


def test_a_gradient_is_one_tensor_on_both_sides() -> None:
    p = param(1.0)
    masters = kept(p)
    p.grad = grad = torch.ones(1)
    loan = lent(masters, trained(p))
    master = master_of(masters, p)
    assert master.grad is grad
    for _ in range(2):
        loan.give_back()
        assert p.grad is grad
        assert master.grad is None


@pytest.mark.parametrize("cleared", ["master", "param"])
def test_a_gradient_cleared_during_the_loan_stays_cleared(cleared: str) -> None:
    p = param(1.0)
    masters = kept(p)
    p.grad = torch.ones(1)
    loan = lent(masters, trained(p))
    (p if cleared == "param" else master_of(masters, p)).grad = None
    loan.give_back()
    assert p.grad is None


def test_c60_a_gradient_assigned_in_half_is_converted() -> None:
    p = param(1.0)
    masters = kept(p)
    p.grad = torch.full((1,), 2.0, dtype=HALF)
    lent(masters, trained(p))
    assert grad_of(master_of(masters, p)).dtype is torch.float32


def test_c59_small_updates_accumulate_in_the_master() -> None:
    p = param(1.0)
    masters = kept(p)
    for _ in range(200):
        loan = lent(masters, optimizer := trained(p, lr=1e-4, momentum=0.0))
        master_of(masters, p).grad = torch.ones(1)
        optimizer.step()
        loan.give_back()
    assert numbers(master_of(masters, p)) == pytest.approx([0.98], rel=1e-5)
    assert torch.equal(p, master_of(masters, p).half())


def test_edits_of_half_weights_are_taken_over_and_low_bits_elsewhere_kept() -> None:
    p = param(FINE, FINE, -2.0003, 0.5)
    masters = kept(p)
    with torch.no_grad():
        p[0] = 3.0
        p.clamp_(min=-1.0)
    assert numbers(master_of(masters, p)) == numbers(torch.tensor([FINE, FINE, -2.0003, 0.5])), "not before the loan"
    lent(masters, trained(p)).give_back()
    assert numbers(master_of(masters, p)) == numbers(torch.tensor([3.0, FINE, -1.0, 0.5]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_edit_is_honoured_too(value: float) -> None:
    p = param(FINE, FINE)
    masters = kept(p)
    p.data[0] = value
    lent(masters, trained(p)).give_back()
    assert torch.equal(master_of(masters, p).isfinite(), torch.tensor([False, True]))


def test_an_edited_master_refreshes_the_half_weight_and_makes_a_stale_graph_raise() -> None:
    p = param(FINE)
    masters = kept(p)
    stale = (p * p).sum()
    loan = lent(masters, trained(p))
    master_of(masters, p).data.fill_(7.0)
    loan.give_back()
    assert numbers(p) == [7.0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_freezing_follows_the_parameter_into_the_loan() -> None:
    p = param(1.0)
    masters = kept(p)
    for trainable in (False, True):
        p.requires_grad_(trainable)
        lent(masters, trained(p)).give_back()
        assert master_of(masters, p).requires_grad is trainable


def test_c79_a_half_parameter_of_a_later_group_gets_a_master_on_demand() -> None:
    p, late = param(1.0), param(0.5, dtype=HALF)
    masters = kept(p)
    optimizer = trained(p)
    optimizer.add_param_group({"params": [late]})
    loan = lent(masters, optimizer)
    assert optimizer.param_groups[1]["params"][0] is masters.of(late)
    assert master_of(masters, late).dtype is torch.float32
    loan.give_back()


def test_without_masters_nothing_is_lent() -> None:
    p = param(FINE)
    masters = kept(p, lend=False)
    optimizer = trained(p)
    loan = lent(masters, optimizer)
    assert optimizer.param_groups[0]["params"][0] is p
    masters.ensure([late := param(0.5, dtype=HALF)])
    assert masters.of(late) is None
    loan.give_back()


# Buffers, and the way back


def owner(**buffers: Tensor) -> nn.Module:
    module = nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def test_buffers_come_back_with_edits_taken_over() -> None:
    module = owner(a=torch.tensor([FINE, FINE]))
    masters = MasterWeights(True)
    for _ in range(2):
        masters.convert_buffer(module, "a", HALF)
    module.a[1] = 4.0
    masters.restore()
    assert numbers(module.a) == numbers(torch.tensor([FINE, 4.0]))
    assert masters.of_buffer(module, "a") is None


def test_a_buffer_shared_by_two_modules_has_one_original() -> None:
    shared = torch.tensor([FINE])
    first, second = owner(a=shared), owner(b=shared)
    masters = MasterWeights(True)
    masters.convert_buffer(first, "a", HALF)
    masters.convert_buffer(second, "b", HALF)
    assert numbers(shared) == [1.0]
    assert masters.of_buffer(second, "b") is masters.of_buffer(first, "a")
    masters.restore()
    assert numbers(second.b) == numbers(torch.tensor([FINE]))


@pytest.mark.parametrize("fate", ["removed", "emptied", "outgrown", "float32"])
def test_restore_copes_with_buffers_that_are_no_longer_what_they_were(fate: str) -> None:
    module = owner(a=torch.tensor([FINE]), b=torch.tensor([FINE]))
    masters = MasterWeights(True)
    masters.convert_buffer(module, "a", HALF)
    masters.convert_buffer(module, "b", HALF)
    if fate == "removed":
        del module.a
    else:
        module.a = {"emptied": None, "outgrown": torch.ones(3).half(), "float32": torch.full((1,), 9.0)}[fate]
    masters.restore()
    assert numbers(module.b) == numbers(torch.tensor([FINE]))
    if fate in ("outgrown", "float32"):
        assert module.a.dtype is torch.float32
        assert module.a.tolist() == ([1.0, 1.0, 1.0] if fate == "outgrown" else [9.0])


def test_merging_reads_and_never_writes() -> None:
    half, master = torch.tensor([1.0, 5.0]).half(), torch.tensor([FINE, 2.0])
    before = (half.clone(), master.clone())
    value = merged(half, master)
    assert numbers(value) == numbers(torch.tensor([FINE, 5.0]))
    assert torch.equal(half, before[0])
    assert torch.equal(master, before[1])
    value.zero_()
    assert torch.equal(master, before[1]), "a fresh tensor"
