"""Which kernels run where, and what is said when it is not the ones asked for."""

import subprocess
import sys
import types
import warnings

import pytest
import torch

from lightning_amp import kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch, device_chooses: None) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def name(device: torch.device, choice: str | None = None) -> str:
    return kernels.backend(device, choice).__name__.removeprefix("lightning_amp.kernels.")


def test_the_device_chooses() -> None:
    assert name(CPU) == "reference"
    assert name(CUDA) == "triton_backend"
    assert name(torch.device("meta")) == "reference"


def test_the_environment_and_the_argument_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name(CUDA, "reference") == "reference"
    monkeypatch.setenv("LIGHTNING_AMP_KERNELS", "reference")
    assert name(CUDA) == "reference"
    assert name(CUDA, "triton") == "triton_backend"
    monkeypatch.setenv("LIGHTNING_AMP_KERNELS", "cuda")
    with pytest.raises(ValueError, match=r"'cuda' are not known.*auto, reference, triton"):
        kernels.backend(CPU)


def test_triton_on_the_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="TRITON_INTERPRET=1"):
        assert name(CPU, "triton") == "reference"
    kernels._backend.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert name(CPU, "triton") == "triton_backend"


def test_old_triton_falls_back_with_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.1.0+git"))
    with pytest.warns(UserWarning, match=r"Triton 3\.1\.0\+git is too old") as caught:
        assert name(CUDA) == name(CUDA) == "reference"
    assert len(caught) == 1


def test_missing_triton_falls_back_with_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="not installed") as caught:
        assert name(CUDA) == name(CUDA) == "reference"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert name(CPU) == "reference"


def test_an_old_gpu_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    with pytest.warns(UserWarning, match=r"compute capability 7\.0"):
        assert name(CUDA) == "reference"


def test_triton_is_imported_only_where_it_runs() -> None:
    code = """
import sys, torch, lightning_amp
lightning_amp.kernels.backend(torch.device("cpu"))
assert "triton" not in sys.modules
lightning_amp.kernels.backend(torch.device("cuda"))
assert "triton" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
