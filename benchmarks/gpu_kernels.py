"""Each kernel's rate as a share of the device's own, and torch's own calls beside."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import Setting, device_time, randoms
from benchmarks.shapes import LISTS, Shape
from lightning_amp import kernels
from lightning_amp.kernels import reference
from lightning_amp.kernels.scale_rule import FIRST_BAD_NONE, ScaleRule, initial_state

Row = dict[str, Any]
Work = Callable[[], object]


def check(setting: Setting) -> list[Row]:
    """Compares every kernel with float64 on fresh data, misaligned and ragged; nothing is to be timed if this fails."""
    ops = kernels.backend(setting.device)
    shapes = [(n + 3,) for n in (1, 5, 17, 1000, 2050, 4097, 70001)]
    rows: list[Row] = []
    rule = ScaleRule()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for skip in (0, 1, 3):
            new = [g[skip:] for g in randoms(shapes, setting, dtype)]
            first_bad = torch.full((), FIRST_BAD_NONE, dtype=torch.int32, device=setting.device)
            wanted = [g.double() / 96 for g in new]
            state = torch.tensor(initial_state(96.0, rule), device=setting.device)
            for _ in range(3):  # the ticket by which the last program is known is at zero again each time
                fresh = [torch.cat([g.new_zeros(skip), g])[skip:] for g in new]
                out = ops.collect_and_update(fresh, [None] * len(new), state[1], first_bad, state, None, rule)
            norm = math.sqrt(sum(float(w.square().sum()) for w in wanted))
            wrong = max(float((o.double() - w).abs().max() / w.abs().max()) for o, w in zip(out, wanted, strict=True))
            reading = ops.read_and_clip(out, "norm", norm / 2)
            clipped = float(ops.read(out).norm)
            new[3][-1] = math.inf
            ops.collect(new, [None] * len(new), None, first_bad)
            masters = [g.nan_to_num(posinf=1.0).float() for g in new]
            halves = [m.half() + 1 for m in masters]
            ops.adopt(halves, masters)
            adopted = all(torch.equal(m, h.float()) for h, m in zip(halves, masters, strict=True))
            ok = (
                wrong < 1e-2
                and abs(float(reading.norm) / norm - 1) < 1e-4
                and abs(clipped / norm - 0.5) < 1e-2
                and int(first_bad) == 3
                and (float(state[0]), float(state[2])) == (96.0, 3.0)
                and adopted
            )
            rows.append({"type": str(dtype), "offset": skip, "error": wrong, "ok": ok})
    return rows


def ceilings(setting: Setting) -> dict[str, float]:
    """Measures what the device can do, in GB/s: a copy, a change in place, a read."""
    n = 2**12 if setting.dry else 2**28
    sources = [torch.randn(n, device=setting.device) for _ in range(2)]
    targets = [torch.empty_like(s) for s in sources]
    rate = {}
    works: dict[str, tuple[list[Work], int]] = {
        "copy": ([lambda s=s, t=t: t.copy_(s) for s, t in zip(sources, targets, strict=True)], 8),
        "in place": ([lambda s=s: s.mul_(1.0000001) for s in sources], 8),
        "read": ([lambda s=s: s.sum() for s in sources], 4),
    }
    for name, (calls, size) in works.items():
        rate[name] = n * size / device_time(setting, calls).median / 1e3
    return rate


def _works(setting: Setting, shapes: Sequence[Shape]) -> dict[str, tuple[int, str, list[Work]]]:
    """Returns for each operation: bytes an element, the ceiling it is measured by, and calls on rotating buffers."""
    ops = kernels.backend(setting.device)
    elements = sum(map(math.prod, shapes))
    sets = range(setting.sets(4 * elements))
    grads = [randoms(shapes, setting) for _ in sets]
    halves = [[g.half() for g in group] for group in grads]
    masters = [[g.clone() for g in group] for group in grads]
    for h, m in zip(halves, masters, strict=True):
        ops.refresh(h, m)
    none: list[Tensor | None] = [None] * len(shapes)
    inv_scale = torch.tensor(0.9999, device=setting.device)
    first_bad = torch.full((), FIRST_BAD_NONE, dtype=torch.int32, device=setting.device)
    found = torch.zeros((), device=setting.device)
    rule = ScaleRule(dynamic=False)
    state = torch.tensor(initial_state(1.0001, rule), device=setting.device)
    norm, quiet = torch.tensor(1.0001, device=setting.device), torch.tensor(0.5, device=setting.device)

    def each(work: Callable[[list[Tensor], list[Tensor], list[Tensor]], object]) -> list[Work]:
        return [lambda g=g, h=h, m=m: work(g, h, m) for g, h, m in zip(grads, halves, masters, strict=True)]

    return {
        "collect fp32": (8, "in place", each(lambda g, h, m: ops.collect(g, none, inv_scale, first_bad))),
        "collect fp32, update": (
            8,
            "in place",
            each(lambda g, h, m: ops.collect_and_update(g, none, state[1], first_bad, state, None, rule)),
        ),
        "collect fp16 -> fp32": (6, "copy", each(lambda g, h, m: ops.collect(h, none, inv_scale, first_bad))),
        "collect fp16 + fp32": (10, "in place", each(lambda g, h, m: ops.collect(h, g, inv_scale, first_bad))),
        "read": (4, "read", each(lambda g, h, m: ops.read(g))),
        "clip that bites": (8, "in place", each(lambda g, h, m: ops.clip_norm(g, norm, 1.0))),
        "clip that does not": (0, "read", each(lambda g, h, m: ops.clip_norm(g, quiet, 1.0))),
        "adopt, nothing edited": (2, "read", each(lambda g, h, m: ops.adopt(h, m))),
        "refresh": (6, "copy", each(lambda g, h, m: ops.refresh(h, m))),
        "torch: unscale and check": (
            8,
            "in place",
            each(lambda g, h, m: torch._amp_foreach_non_finite_check_and_unscale_(g, found, inv_scale)),
        ),
        "torch: norms": (4, "read", each(lambda g, h, m: torch._foreach_norm(g))),
        "torch: multiply": (8, "in place", each(lambda g, h, m: torch._foreach_mul_(g, norm))),
        "torch: copy to fp16": (6, "copy", each(lambda g, h, m: torch._foreach_copy_(h, m))),
        "reference: adopt": (6, "read", each(lambda g, h, m: reference.adopt(h, m))),
    }


def rates(setting: Setting, name: str, ceiling: dict[str, float]) -> list[Row]:
    """Measures every operation over one list of shapes.

    Args:
        setting: Where.
        name: One of `LISTS`.
        ceiling: From `ceilings`.
    """
    shapes = setting.shrink(LISTS[name]())
    elements = sum(map(math.prod, shapes))
    rows = []
    for work, (size, measure, calls) in _works(setting, shapes).items():
        if name == "tiny2000" and work.startswith("reference"):
            continue  # a launch a tensor
        times = device_time(setting, calls)
        rate = elements * size / times.median / 1e3
        rows.append(
            {
                "list": name,
                "work": work,
                "B/element": size,
                "us": times.median,
                "least us": times.least,
                "most us": times.most,
                "GB/s": rate,
                "of": measure,
                "share": rate / ceiling[measure],
            }
        )
    return rows
