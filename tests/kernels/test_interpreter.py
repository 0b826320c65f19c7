"""The Triton kernels in Triton's interpreter: the same numbers as the reference, asked for in the same tests.

The interpreter is chosen when Triton is imported, so these run in a process of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def run(*files: Path) -> int:
    """Runs test files with the kernels in the interpreter, and returns how many tests passed."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "LIGHTNING_AMP_KERNELS": "triton", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert "skipped" not in done.stdout, done.stdout
    return int(passed[1])


def test_numerics_and_plans() -> None:
    assert run(HERE / "test_numerics.py", HERE / "interpreted_plans.py") > 100
