"""Whole sequences after backward, ours and torch's: wall time, the host's part, kernels, synchronisations."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_timing import Setting, randoms, wall_time
from benchmarks.shapes import LISTS, Shape
from lightning_amp import Engine, resolve
from lightning_amp.master_weights import MasterWeights

Row = dict[str, Any]
Step = Callable[[], object]

SEQUENCES: dict[str, dict[str, Any]] = {
    "GradScaler, foreach Adam": {"adam": {"foreach": True}},
    "GradScaler, fused Adam": {"adam": {"fused": True}},
    "O1, foreach Adam": {"adam": {"foreach": True}, "level": "O1"},
    "O1, fused Adam": {"adam": {"fused": True}, "level": "O1"},
    "O2, fused Adam": {"adam": {"fused": True}, "level": "O2"},
}


def _params(setting: Setting, shapes: list[Shape]) -> list[nn.Parameter]:
    return [nn.Parameter(p) for p in randoms(shapes, setting)]


def _torch_step(setting: Setting, shapes: list[Shape], clip: float | None, adam: dict[str, Any]) -> Step:
    params = _params(setting, shapes)
    grads = randoms(shapes, setting)
    optimizer = torch.optim.Adam(params, lr=1e-6, **adam)
    scaler = torch.amp.GradScaler(setting.device.type, init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.ones((), device=setting.device))

    def step() -> None:
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()

    return step


def _our_step(setting: Setting, shapes: list[Shape], clip: float | None, adam: dict[str, Any], level: str) -> Step:
    params = _params(setting, shapes)
    optimizer = torch.optim.Adam(params, lr=1e-6, **adam)
    config = resolve(level, init_scale=1.0, growth_interval=10**9)
    masters = MasterWeights(config.master_weights)
    for p in params if config.master_weights else ():
        masters.convert(p, torch.float16)
    grads: list[Tensor] = randoms(shapes, setting, torch.float16 if config.master_weights else torch.float32)
    engine = Engine(config, [optimizer], masters=masters, device=setting.device)
    loss = torch.ones((), device=setting.device)

    def differentiate(_: Tensor) -> None:
        for p, g in zip(params, grads, strict=True):
            p.grad = g

    def step() -> None:
        for p in params:
            p.grad = None
        engine.backward(loss, differentiate)
        if clip is not None:
            engine.clip(optimizer, clip)
        engine.step(optimizer)

    return step


@contextmanager
def _syncs(setting: Setting) -> Iterator[list[Any]]:
    """Collects what waits for the device inside the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if setting.is_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield caught
        finally:
            if setting.is_cuda:
                torch.cuda.set_sync_debug_mode("default")


def _counted(setting: Setting, step: Step) -> tuple[int, int, int]:
    """Returns kernels, copies and synchronisations of one step."""
    with _syncs(setting) as caught:
        step()
    syncs = sum("synchroniz" in str(w.message) for w in caught)
    if not setting.is_cuda:
        return 0, 0, syncs
    setting.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        setting.wait()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(event.name.startswith(("Memcpy", "Memset")) for event in events)
    return len(events) - copies, copies, syncs


def sequences(setting: Setting, name: str) -> list[Row]:
    """Measures every sequence over one list of shapes: without a clip, with one that bites, with one that does not.

    Args:
        setting: Where.
        name: One of `LISTS`.
    """
    shapes = setting.shrink(LISTS[name]())
    norm = math.sqrt(sum(map(math.prod, shapes)))  # of random gradients, nearly
    rows = []
    for clip, bound in [("none", None), ("bites", norm / 2), ("does not bite", norm * 2)]:
        for sequence, options in SEQUENCES.items():
            make = _our_step if "level" in options else _torch_step
            step = make(setting, shapes, bound, **options)
            until_done, until_free = wall_time(setting, step, steps=2 if setting.dry else 20)
            kernels, copies, syncs = _counted(setting, step)
            rows.append(
                {
                    "list": name,
                    "sequence": sequence,
                    "clip": clip,
                    "wall us": until_done.median,
                    "least us": until_done.least,
                    "most us": until_done.most,
                    "host us": until_free.median,
                    "kernels": kernels,
                    "copies": copies,
                    "syncs": syncs,
                }
            )
    return rows
