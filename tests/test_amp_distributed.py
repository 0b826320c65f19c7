"""A plain DDP script over gloo: two processes train as one does, and agree to the bit."""

import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_amp import Outcome, amp
from tests.helpers.clean_process import context

WORLD = 2
WINDOW = 2
STEPS = 4


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(rank: int, n: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + n))


CONFIGS = {
    "O1 with windows": ("O1", False, True),
    "O1 with bucket views": ("O1", True, False),
    "O2": ("O2", False, False),
    "O2 with bucket views and windows": ("O2", True, True),
}


def train(rank: int, level: str, bucket_view: bool, windows: bool) -> dict[str, Any]:
    """What one process does: weights that differ at first, one overflow on one rank, windows without reduction."""
    model = network(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, init_scale=1024.0)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    outcomes = []
    for n in range(STEPS):
        optimizer.zero_grad()
        for i in range(WINDOW):
            silent = windows and i < WINDOW - 1
            with wrapped.no_sync() if silent else nullcontext():
                loss = (wrapped(batch(rank, WINDOW * n + i)).float() ** 2).mean() / WINDOW
                with amp.scale_loss(loss, optimizer, delay_unscale=silent) as scaled:
                    (scaled * (float("inf") if (rank, n, i) == (1, 2, WINDOW - 1) else 1.0)).backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        outcomes.append(amp.outcome(optimizer))
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    with pytest.raises(ValueError, match="wrap it afterwards"):
        amp.initialize(wrapped, verbosity=0)
    amp.deinitialize()
    return {"weights": list(model.parameters()), "scale": scale, "outcomes": [str(o) for o in outcomes]}


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
        torch.save({name: train(rank, *config) for name, config in CONFIGS.items()}, folder / f"{rank}.pt")
        distributed.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process reports, by configuration."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [context.Process(target=work, args=(rank, folder)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        if process.is_alive():
            process.kill()
    errors = "".join(file.read_text() for file in folder.glob("*.error"))
    assert not errors, errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def reference() -> list[Tensor]:
    """One float32 process that sees the batches of both, and skips what they skip."""
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for n in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            for i in range(WINDOW):
                ((model(batch(rank, WINDOW * n + i)) ** 2).mean() / WINDOW / WORLD).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if n != 2:
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("config", CONFIGS)
def test_c86_two_processes_train_as_one(reports: list[dict[str, Any]], config: str) -> None:
    first, second = (report[config] for report in reports)
    assert first["outcomes"] == second["outcomes"]
    assert [o == str(Outcome.STEPPED) for o in first["outcomes"]] == [True, True, False, True]
    assert first["scale"] == second["scale"] == 512.0
    for mine, theirs, wanted in zip(first["weights"], second["weights"], reference(), strict=True):
        assert mine.dtype is torch.float32
        assert torch.equal(mine, theirs), "masters too, which DDP does not know"
        torch.testing.assert_close(mine, wanted, rtol=5e-3, atol=5e-3)
