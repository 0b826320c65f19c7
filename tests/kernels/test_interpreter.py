"""The Triton kernels in Triton's interpreter: what is asked of the reference is asked of them, by the same tests.

The interpreter is chosen when Triton is imported, so these run in a process of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

ENGINE = {
    "passes": """
        engine engine_model gradients gradient_kinds readings liability hidden_overflows counterexamples scaler_choice
        late_parameters
    """,
    "steps": "stepper stepper_hooks master_weights loss_scaler skips outcomes grad",
    "front end": "amp_semantics amp_blocks",
}
"""All tests of the engine and its parts, in groups that take about as long."""


def run(*files: Path, **environment: str) -> int:
    """Runs test files with the kernels in the interpreter, and returns how many tests passed."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "LIGHTNING_AMP_KERNELS": "triton", "OMP_NUM_THREADS": "1"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "tests.kernels.quick_interpreter", "--hypothesis-seed=0"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, files)],
        cwd=TESTS.parent,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert "skipped" not in done.stdout, done.stdout
    return int(passed[1])


def test_numerics_and_plans() -> None:
    assert run(TESTS / "kernels" / "test_numerics.py", TESTS / "kernels" / "interpreted_plans.py") > 140


@pytest.mark.parametrize("group", ENGINE)
def test_the_engine_on_triton_kernels(group: str) -> None:
    assert run(*(TESTS / f"test_{name}.py" for name in ENGINE[group].split()), ENGINE_MODEL="15") > 100
