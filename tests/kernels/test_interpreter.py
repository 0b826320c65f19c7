"""The Triton kernels in Triton's interpreter: what is asked of the reference is asked of them, by the same tests.

The interpreter is chosen when Triton is imported, so these run in a process of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

ENGINE = ("test_engine_model.py", "test_readings.py", "test_liability.py", "test_counterexamples.py")


def run(*files: Path, **environment: str) -> int:
    """Runs test files with the kernels in the interpreter, and returns how many tests passed."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "LIGHTNING_AMP_KERNELS": "triton", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    done = subprocess.run(
        [*command, *map(str, files)],
        cwd=TESTS.parent,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert "skipped" not in done.stdout, done.stdout
    return int(passed[1])


def test_numerics_and_plans() -> None:
    assert run(TESTS / "kernels" / "test_numerics.py", TESTS / "kernels" / "interpreted_plans.py") > 140


def test_the_engine_on_triton_kernels() -> None:
    assert run(*(TESTS / name for name in ENGINE), ENGINE_MODEL="40") > 40
