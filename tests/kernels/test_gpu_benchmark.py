"""The benchmark for GPUs runs to its end where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

ROOT = Path(__file__).parents[2]


def test_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    lists = ("gpt2", "resnet50", "dcgan", "tiny2000")
    assert list(found) == [
        "machine",
        "check against float64",
        "ceilings, GB/s",
        *(f"kernels, {name}" for name in (*lists, "big")),
        *(f"after backward, {name}" for name in lists),
        "DCGAN 64x64",
    ]
    assert all(row["ok"] for row in found["check against float64"])
    assert {row["precision"] for row in found["DCGAN 64x64"]} >= {"32-true", "bf16-mixed", "O0", "O1", "O2", "O3"}
    assert all(row["GB/s"] > 0 for row in found["kernels, big"] if row["B/element"])


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--dry" in capsys.readouterr().err
