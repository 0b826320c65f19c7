"""Everything worth knowing about the kernels on a GPU, in one command and at most seven minutes.

Prints tables and writes JSON after every section::

    python -m benchmarks.gpu --out results
    python -m benchmarks.gpu --dry          # on the CPU, small, to see that it runs to the end

Rates are counted bytes over time, with the count beside; shares are of the ceiling measured first in the same run.
"""

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_dcgan import dcgan
from benchmarks.gpu_kernels import ceilings, check, rates
from benchmarks.gpu_sequences import sequences
from benchmarks.gpu_timing import Setting
from lightning_amp import kernels

Row = dict[str, Any]

KERNEL_LISTS = ("gpt2", "resnet50", "dcgan", "tiny2000", "big")
SEQUENCE_LISTS = ("gpt2", "resnet50", "dcgan", "tiny2000")


class Report:
    """The results so far, the time that is left, and where both go.

    Args:
        path: The JSON file.
        budget: Seconds.
    """

    def __init__(self, path: Path, budget: float) -> None:
        self._path = path
        self._end = time.monotonic() + budget
        self.data: dict[str, Any] = {}

    def more_time(self, needed: float = 0.0) -> bool:
        """Whether there are ``needed`` seconds left."""
        return time.monotonic() + needed < self._end

    def add(self, section: str, result: Any) -> None:
        """Prints a section and writes the file."""
        self.data[section] = result
        print(f"\n{section}")
        if isinstance(result, list) and result:
            _print_table(result)
        else:
            print(result)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.data, indent=2) + "\n")

    def each(self, section: str, names: tuple[str, ...], measure: Callable[[str], list[Row]], needed: float) -> None:
        """Adds a section of one part a list, and says which were left out for want of time."""
        for name in names:
            if self.more_time(needed):
                self.add(f"{section}, {name}", measure(name))
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            else:
                self.add(f"{section}, {name}", "left out: no time")


def _print_table(rows: list[Row]) -> None:
    columns = list(rows[0])
    cells = [[f"{row[c]:.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in [columns, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def machine(setting: Setting) -> Row:
    """Returns what the numbers depend on."""
    found: Row = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": kernels.backend(setting.device).__name__.rsplit(".", 1)[-1],
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn tf32": torch.backends.cudnn.allow_tf32,
    }
    if setting.is_cuda:
        import triton

        properties = torch.cuda.get_device_properties(setting.device)
        found |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return found


def main() -> None:
    """Runs all sections."""
    parser = argparse.ArgumentParser(description="Measures the kernels on a GPU.")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the JSON file")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which no section starts")
    parser.add_argument("--dry", action="store_true", help="run on the CPU with small lists")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry runs on the CPU, to see that everything does.")
    setting = Setting(torch.device("cpu") if args.dry else torch.device("cuda", 0), args.dry)
    report = Report(args.out / "gpu.json", args.budget)
    torch.manual_seed(0)
    report.add("machine", machine(setting))
    checked = check(setting)
    report.add("check against float64", checked)
    if not all(row["ok"] for row in checked):
        raise SystemExit("The kernels are wrong here; nothing was timed.")
    ceiling = ceilings(setting)
    report.add("ceilings, GB/s", ceiling)
    report.each("kernels", KERNEL_LISTS, lambda name: rates(setting, name, ceiling), 20)
    report.each("after backward", SEQUENCE_LISTS, lambda name: sequences(setting, name), 25)
    report.add("DCGAN 64x64", dcgan(setting, lambda: report.more_time(10)))


if __name__ == "__main__":
    main()
