"""What a CUDA graph's capture forbids does not happen in a step: tried without a GPU, by watching for each."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.launch_counts import no_driver
from lightning_amp import Engine, resolve
from lightning_amp.kernels import plans, triton_backend
from lightning_amp.kernels.launches import Launcher, counting
from lightning_amp.kernels.plans import PUT_BY, Place
from lightning_amp.master_weights import MasterWeights
from lightning_amp.outcomes import OutcomeRecord

pytestmark = pytest.mark.usefixtures("device_chooses")


class OnDevice(TorchDispatchMode):
    """Fails at an operation that has to do with the host's memory, once it is strict."""

    strict = False

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        assert not self.strict or all(t.device.type == "cuda" for t in tensors), f"{function} in a capture"
        return out


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("not in a capture")


@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_can_be_captured(
    level: Literal["O1", "O2"], algorithm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode(), no_driver(), OnDevice() as operations:
        params = [nn.Parameter(torch.empty(n, device="cuda")) for n in (3, 40)]
        adam = torch.optim.Adam(params, fused=True, capturable=True)
        for p in params:
            p.grad = torch.empty_like(p)
        adam.step()
        config = resolve(level)
        masters = MasterWeights(config.master_weights)
        for p in params if config.master_weights else ():
            masters.convert(p, torch.float16)
        engine = Engine(config, [adam], masters=masters, device="cuda")
        loss = torch.empty((), device="cuda")
        # A graph's pool hands out the same memory at each replay.
        static = [torch.empty_like(p) for p in params]
        homes = {id(g): torch.empty_like(g, dtype=torch.float32) for g in static}
        monkeypatch.setattr(triton_backend, "_home", lambda new, *_: homes[id(new)] if level == "O2" else new)

        def differentiate(_: Tensor) -> None:
            for p, g in zip(params, static, strict=True):
                p.grad = g

        def step() -> None:
            adam.zero_grad()
            engine.backward(loss, differentiate)
            if algorithm is not None:
                engine.clip(adam, 1.0, algorithm)
            engine.step(adam)

        for _ in range(2):
            step()
        with monkeypatch.context() as patch:  # undone before `no_driver` undoes its own
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            patch.setattr(torch.cuda, "Event", refuse)
            patch.setattr(Place, "upload", refuse)
            patch.setattr(Launcher, "__init__", refuse)  # a plan comes with tables and scratch
            patch.setattr(OutcomeRecord, "settle", refuse)
            operations.strict = True
            with counting() as log:
                step()
    names = ["collect", "read", *["clip"] * (algorithm is not None), *["adopt", "refresh"] * (level == "O2")]
    assert [launch.name for launch in log] == names


def test_a_row_in_a_capture_comes_out_of_memory_put_by(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda t: pinned.append(t.nbytes) or t.clone())
    monkeypatch.setattr(plans, "_captured", kept := [])
    place = Place(torch.device("cpu"), 0, fake=False)
    place._is_cuda = True
    monkeypatch.setattr(Place, "capturing", lambda self: False)
    like = torch.empty(1)
    for n in (5, 3):
        assert place.upload(list(range(n)), like).tolist() == list(range(n))
    place.upload(torch.arange(99), like)  # a table: a plan is not built in a capture
    assert pinned == [PUT_BY * 40, 40, 24, 99 * 8]
    monkeypatch.setattr(Place, "capturing", lambda self: True)
    chunks = torch.arange(3, dtype=torch.int32).view(1, 3)
    rows = [place.upload(chunks, like), *(place.upload([i] * 5, like) for i in range(PUT_BY - 2))]
    assert torch.equal(rows[0], chunks)
    assert [row.tolist() for row in rows[1:]] == [[i] * 5 for i in range(PUT_BY - 2)]
    assert len(pinned) == 4
    assert len(kept) == PUT_BY - 1
    assert place.upload(list(range(50)), like).tolist() == list(range(50))  # more than there is
    assert pinned[4:] == [400]
