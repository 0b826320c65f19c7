"""Optimizers whose parameters live on several devices: one launch a device, and no look at a value."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.launch_counts import count_step
from lightning_amp import Engine, collecting, resolve
from lightning_amp.kernels import devices
from lightning_amp.kernels.devices import Backends, by_device, makes_a_list
from lightning_amp.outcomes import Outcome

CPU, AGAIN = torch.device("cpu"), torch.device("cpu", 0)
"""The same memory as two devices."""


@pytest.mark.usefixtures("device_chooses")
@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_kernel_runs_once_a_device(level: Literal["O1", "O2"], clip: Literal["norm", "value"] | None) -> None:
    names = ["collect", "read", *["clip"] * (clip is not None), *["adopt", "refresh"] * (level == "O2")]
    for several in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:3", "cuda:0")):
        step = count_step(level, [(5,)] * 40, clip, devices=several)
        wanted = [name for name in names for _ in several]
        wanted.insert(len(several), "update")
        assert list(step.kernels) == wanted
        assert step.rows == len(several) * (2 if level == "O2" else 1)
        assert step.nbytes == {"O1": 40, "O2": 46}[level] + 4 * (clip == "value")


@pytest.mark.usefixtures("device_chooses")
def test_the_norm_is_on_the_first_device() -> None:
    with FakeTensorMode():
        grads = [torch.empty(4, device=f"cuda:{i}") for i in (1, 0, 1)]
        reading = Backends().read_and_clip(grads, "value", 1.0)
        assert str(reading.norm.device) == str(reading.found_inf.device) == "cuda:1"
        assert Backends().found_inf(grads).device.index == 1


def test_lists_are_sorted_by_device() -> None:
    a, b, c = torch.zeros(2), torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.float64)
    whole = [a, c]
    assert by_device(whole)[0] is whole
    groups = by_device([b, a, b, c])
    assert [[t.device.type for t in group] for group in groups] == [["meta", "meta"], ["cpu", "cpu"]]
    assert makes_a_list([a, c], CPU)
    assert makes_a_list([], CPU)
    for other in (b, a.to_sparse(), a.to(torch.complex64)):
        assert not makes_a_list([a, other], CPU)


@pytest.fixture
def _halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every list for one whose second half is on another device."""

    def halves(tensors: list[Tensor]) -> list[list[Tensor]]:
        middle = len(tensors) // 2
        return [part for part in (tensors[:middle], tensors[middle:]) if part]

    def sort(fresh: list[collecting.Fresh]) -> dict[torch.device, list[collecting.Fresh]]:
        middle = len(fresh) // 2
        return {CPU: fresh[:middle], AGAIN: fresh[middle:]}

    monkeypatch.setattr(devices, "by_device", halves)
    monkeypatch.setattr(collecting, "makes_a_list", lambda tensors, device: False)
    monkeypatch.setattr(collecting, "_by_device", sort)


@pytest.mark.usefixtures("_halves")
@pytest.mark.parametrize("bound", [0.5, 1e9])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_clip_goes_by_all_devices(algorithm: str, bound: float) -> None:
    grads = [torch.randn(n) for n in (3, 40, 7)]
    before = [g.double() for g in grads]
    norm = math.sqrt(sum(float(g.square().sum()) for g in before))
    reading = Backends().read_and_clip(grads, algorithm, bound, torch.ones(()))
    assert reading.norm.item() == pytest.approx(norm, rel=1e-6)
    assert reading.found_inf.item() == 1.0, "what else speaks against the step, and not against the clip"
    for g, was in zip(grads, before, strict=True):
        wanted = was.clamp(-bound, bound) if algorithm == "value" else was * min(1.0, bound / (norm + 1e-6))
        torch.testing.assert_close(g.double(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("_halves")
@pytest.mark.parametrize("which", [0, 2])
def test_a_bad_value_on_any_device_counts_for_all(which: int) -> None:
    grads = [torch.randn(n) for n in (3, 40, 7)]
    grads[which][1] = math.nan
    before = [g.clone() for g in grads]
    for algorithm in ("norm", "value"):
        assert Backends().read_and_clip(grads, algorithm, 0.1).found_inf.item() == 1.0
    assert Backends().found_inf(grads).item() == 1.0
    assert all(torch.equal(g, was) or i == which for i, (g, was) in enumerate(zip(grads, before, strict=True)))


@pytest.mark.usefixtures("_halves")
@pytest.mark.parametrize("bad", [None, 0, 3])
def test_a_backward_pass_over_several_devices(bad: int | None) -> None:
    params = [nn.Parameter(torch.randn(n)) for n in (3, 4, 5, 6)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    engine = Engine(resolve("O1", init_scale=2.0**10), [optimizer], device="cpu")
    factors = [torch.full_like(p, math.inf if i == bad else i + 1.0) for i, p in enumerate(params)]
    for _ in range(2):  # the second pass adds to the first
        engine.backward(sum((p * f).sum() for p, f in zip(params, factors, strict=True)))
    (scaler,) = engine.scalers
    for i, (p, f) in enumerate(zip(params, factors, strict=True)):
        assert p.grad is not None
        if bad is None:
            assert torch.equal(p.grad, 2 * f)
        assert bool(p.grad.isfinite().all()) == (i != bad)
    state = scaler.read()
    assert (state.overflows, state.last_bad) == ((0, -1) if bad is None else (2, bad))
    before = [p.detach().clone() for p in params]
    engine.step(optimizer)
    assert engine.outcome(optimizer) is (Outcome.STEPPED if bad is None else Outcome.SKIPPED)
    assert all(torch.equal(p, was) == (bad is not None) for p, was in zip(params, before, strict=True))
