"""Compiles the kernels for GPUs that are not there, as the backend would launch them, and reads what came out.

``python -m tests.kernels.codegen`` writes the table of registers that the tests hold against.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_amp.kernels import triton_backend as ops
from lightning_amp.kernels.launches import Launcher
from lightning_amp.kernels.scale_rule import ScaleRule

ARCHITECTURES = (75, 80, 90, 100)
TABLE = Path(__file__).with_name("registers.json")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Call(NamedTuple):
    """One launch: the kernel with its arguments, constants and warps."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int


class Build(NamedTuple):
    """What the compiler made of a launch.

    Attributes:
        registers: Registers of a thread.
        spilled: Bytes of stack and local memory of a thread.
        loads: 128-bit loads from global memory, in the PTX.
        stores: 128-bit stores to it.
    """

    registers: int
    spilled: int
    loads: int
    stores: int


def compiled(call: Call, architecture: int) -> Any:
    """Compiles one launch for a compute capability, given as ``10 * major + minor``."""
    names = call.kernel.arg_names
    unaligned = {p.name for p in call.kernel.params if p.do_not_specialize_on_alignment}
    signature: dict[str, str] = dict.fromkeys(names, "constexpr")
    attributes = {}
    for i, (name, value) in enumerate(zip(names, call.args, strict=False)):
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            if name not in unaligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    constants = {(names.index(name),): value for name, value in call.constants.items()}
    source = ASTSource(fn=call.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": call.warps})


def build(call: Call, architecture: int) -> Build:
    """Compiles one launch and reads what came out."""
    asm = compiled(call, architecture).asm
    registers, stack, local = usage(asm["cubin"])
    return Build(registers, stack + local, wide("ld", asm["ptx"]), wide("st", asm["ptx"]))


def wide(operation: str, ptx: str) -> int:
    """Counts the 128-bit accesses of one kind to global memory."""
    return len(re.findall(rf"\b{operation}\.global(?:\.\w+)*\.v(?:4\.b32|2\.b64)\b", ptx))


def usage(cubin: bytes) -> tuple[int, int, int]:
    """Returns registers, stack and local memory of the only kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(n) for key in ("REG", "STACK", "LOCAL") for n in re.findall(rf"\b{key}:(\d+)", text))
    return registers, stack, local


def _grads(dtypes: list[torch.dtype]) -> list[Tensor]:
    return [torch.empty(4096, device="cuda", dtype=dtype) for dtype in dtypes]


def _collect(
    *dtypes: torch.dtype, add: torch.dtype | None = None, scaled: bool = True, widen: bool = True
) -> Callable[[], object]:
    """Returns a call of `collect` on one gradient of each type."""

    def call() -> object:
        into = [None if add is None else torch.empty(4096, device="cuda", dtype=add) for _ in dtypes]
        inv_scale = torch.empty((), device="cuda") if scaled else None
        first_bad = torch.empty((), device="cuda", dtype=torch.int32)
        return ops.collect(_grads(list(dtypes)), into, inv_scale, first_bad, widen=widen)

    return call


def _collect_and_update(*dtypes: torch.dtype) -> Callable[[], object]:
    def call() -> object:
        grads, state = _grads(list(dtypes)), torch.empty(10, device="cuda")
        first_bad, loss = torch.empty((), device="cuda", dtype=torch.int32), torch.empty((), device="cuda")
        return ops.collect_and_update(grads, [None] * len(grads), state[1], first_bad, state, loss, ScaleRule())

    return call


def _weights(dtype: torch.dtype, name: str) -> Callable[[], object]:
    return lambda: getattr(ops, name)(_grads([dtype]), _grads([torch.float32]))


f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

CALLS: dict[str, tuple[Callable[[], object], int, int]] = {
    # name: (call, 128-bit loads, 128-bit stores); a chunk is 16 elements a thread
    "collect f32": (_collect(f32), 4, 4),
    "collect f32, check only": (_collect(f32, scaled=False), 4, 0),
    "collect f32 + f32": (_collect(f32, add=f32), 8, 4),
    "collect f16 -> f32": (_collect(f16), 0, 4),
    "collect bf16 -> f32": (_collect(bf16), 0, 4),
    "collect f16 -> f32 + f32": (_collect(f16, add=f32), 4, 4),
    "collect f16 -> f32 and f32": (_collect(f16, f32), 4, 8),
    "collect f16": (_collect(f16, widen=False), 2, 2),
    "collect bf16": (_collect(bf16, widen=False), 2, 2),
    "collect f64": (_collect(f64), 8, 8),
    "collect f32, update": (_collect_and_update(f32), 4, 4),
    "collect f16 -> f32 and f32, update": (_collect_and_update(f16, f32), 4, 8),
    "read f32": (lambda: ops.read(_grads([f32])), 4, 0),
    "read f16": (lambda: ops.read(_grads([f16])), 2, 0),
    "read bf16 and f32": (lambda: ops.read(_grads([bf16, f32])), 6, 0),
    "read f64": (lambda: ops.read(_grads([f64])), 8, 0),
    "clip norm f32": (lambda: ops.clip_norm(_grads([f32]), torch.empty((), device="cuda"), 1.0), 4, 4),
    "clip norm f16": (lambda: ops.clip_norm(_grads([f16]), torch.empty((), device="cuda"), 1.0), 2, 2),
    "clip value f32": (lambda: ops.clip_value(_grads([f32]), torch.empty((), device="cuda"), 1.0), 4, 4),
    "refresh f16": (_weights(f16, "refresh"), 4, 0),
    "refresh bf16": (_weights(bf16, "refresh"), 4, 0),
    "adopt f16": (_weights(f16, "adopt"), 4, 4),
    "adopt bf16": (_weights(bf16, "adopt"), 4, 4),
    "update": (
        lambda: ops.update(
            torch.empty(10, device="cuda"),
            torch.empty((), device="cuda", dtype=torch.int32),
            torch.empty((), device="cuda"),
            ScaleRule(),
        ),
        0,
        0,
    ),
}


@cache
def launches() -> dict[str, Call]:
    """Returns the last launch of each call, caught on its way to the device."""
    caught: dict[str, Call] = {}
    launch = Launcher.__call__
    with FakeTensorMode():
        for name, (call, _, _) in CALLS.items():

            def catch(launcher: Any, *args: Any, name: str = name) -> None:
                caught[name] = Call(launcher._kernel, args, launcher._constants, launcher._warps)

            Launcher.__call__ = catch  # type: ignore[assignment, method-assign]
            try:
                call()
            finally:
                Launcher.__call__ = launch  # type: ignore[method-assign]
    return caught


def main() -> None:
    """Writes the table of registers."""
    table = {
        name: {str(architecture): build(call, architecture).registers for architecture in ARCHITECTURES}
        for name, call in launches().items()
    }
    TABLE.write_text(json.dumps({"triton": triton.__version__, "registers": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
