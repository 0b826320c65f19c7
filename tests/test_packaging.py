"""What a wheel holds, and what importing the package brings in."""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FRONT_ENDS = {"__init__", "precision", "precision_checks", "trainer_arguments"}
KERNELS = sorted(path.name for path in (ROOT / "kernels").glob("*.py"))
CORE = sorted(path.stem for path in (ROOT / "lightning_amp").glob("*.py") if path.stem not in FRONT_ENDS)


def python(code: str, *options: str, cwd: Path | None = None) -> str:
    """Runs ``code`` in a fresh interpreter and returns what it printed."""
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package built as a wheel, from a copy, since building writes into the source tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "lightning_amp", "kernels"):
        (source / name).symlink_to(ROOT / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    python(build, cwd=source)
    return next(out.glob("*.whl"))


def test_wheel_holds_the_kernels_inside_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"lightning_amp/kernels/{name}" for name in KERNELS} <= names
    assert {"lightning_amp/py.typed", "lightning_amp/__init__.py", "lightning_amp/callbacks/__init__.py"} <= names


def test_wheel_holds_nothing_else_at_the_top(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"lightning_amp", f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"}


def test_wheel_has_the_whole_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (licence,) = [name for name in archive.namelist() if name.endswith("LICENSE")]
    assert archive.read(licence).decode() == (ROOT / "LICENSE").read_text()
    assert "END OF TERMS AND CONDITIONS" in (ROOT / "LICENSE").read_text()


def test_kernels_are_importable_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """A wheel that is not installed but lies first on the path must win over the editable install."""
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import lightning_amp.kernels as k; print(k.__file__)"
    assert str(wheel) in python(code, cwd=tmp_path)


def test_kernels_are_importable_from_this_install(tmp_path: Path) -> None:
    code = "import lightning_amp.kernels.reference as r, lightning_amp as a; print(r.__name__, a.__path__[0])"
    assert python(code, cwd=tmp_path).split()[0] == "lightning_amp.kernels.reference"


def test_core_imports_no_lightning(tmp_path: Path) -> None:
    """`lightning_amp` itself names the plugin, so an empty stand-in takes its place."""
    kernels = [f"kernels.{Path(name).stem}" for name in KERNELS if name != "__init__.py"]
    code = f"""
import importlib, importlib.util, sys, types
package = types.ModuleType("lightning_amp")
package.__path__ = importlib.util.find_spec("lightning_amp").submodule_search_locations
sys.modules["lightning_amp"] = package
for module in {[*CORE, "kernels", *kernels]!r}:
    importlib.import_module("lightning_amp." + module)
    if any(name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric") for name in sys.modules):
        sys.exit(module + " imports Lightning")
"""
    python(code, cwd=tmp_path)


def test_metadata_asks_for_what_the_design_needs() -> None:
    wants = metadata.requires("lightning-amp") or []
    assert {"torch>=2.10", "lightning>=2.6.6"} <= set(wants)
    assert {"examples", "dev"} <= set(metadata.metadata("lightning-amp").get_all("Provides-Extra") or [])
