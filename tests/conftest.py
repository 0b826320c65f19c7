"""What holds for every test: nothing that a training switches on stays on."""

import os
from collections.abc import Iterator

import pytest
import torch

LEFT_BY_LIGHTNING = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
)
"""What a training leaves in the environment for processes it might start: those of a later one would heed it."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "filterwarnings", "ignore:`isinstance.treespec, LeafSpec.` is deprecated"
    )  # Lightning's own
    config.addinivalue_line("filterwarnings", "ignore:.training_step. returned .None.")


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    yield
    leaks = {
        "autocast": torch.is_autocast_enabled("cpu"),
        "no_grad": not torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype() is not torch.float32,
    }
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.clear_autocast_cache()
    assert not any(leaks.values()), f"left switched on: {[name for name, on in leaks.items() if on]}"


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    before = {name: os.environ[name] for name in LEFT_BY_LIGHTNING if name in os.environ}
    yield
    for name in LEFT_BY_LIGHTNING:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
