"""Reading a saved state, of this package or of others: checked as a whole, or refused by the key that is damaged."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_amp.entry_reader import CheckpointError, Reader, short
from lightning_amp.kernels.scale_rule import ScaleState
from lightning_amp.loss_scaler import DEFAULT_KEY, Key
from lightning_amp.outcomes import Outcome

VERSION = 2
"""Of the format that is written; every older one is read."""

GRAD_SCALER_ENTRIES = ("MixedPrecision", "native_amp_scaling_state")
"""Where Lightning's own mixed precision keeps its `torch.amp.GradScaler`, now and before."""

_INDICES = {"loss": (1, 1), "optimizer": (1, 2**20), "default": (0, 0), "grad": (0, 0)}


@dataclass(frozen=True)
class SavedScaler:
    """One scaler as it was.

    Attributes:
        values: `ScaleState` by name, as far as its format holds it.
        attempts: Backward passes so far.
        dynamic: Whether the scale moved by itself.
    """

    values: dict[str, float]
    attempts: int = 0
    dynamic: bool = True


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds, in whatever format.

    Attributes:
        scalers: By key.
        optimizers: What became of each optimizer's steps, or None where the format does not say.
        num_losses: How many loss ids there were, or None likewise.
        schedulers: For each learning-rate scheduler, the optimizer steps tried and made since its last move.
    """

    scalers: dict[Key, SavedScaler] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] | None = None
    num_losses: int | None = None
    schedulers: list[tuple[int, int]] = field(default_factory=list)


def read(entry: Any, name: str = "state") -> Saved:
    """Reads a state of this package (any version), of Apex's ``amp`` or of `torch.amp.GradScaler`.

    Args:
        entry: The state; an empty one holds nothing.
        name: How messages call it.

    Returns:
        What it holds, every value checked.

    Raises:
        CheckpointError: It is damaged, of a newer version, or of no known format.

    Example:
        >>> read({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}}).scalers[("default", ())].values["scale"]
        512.0
    """
    reader = Reader(entry, name)
    if not reader.entry:
        return Saved()
    if _is_apex(reader.entry):
        return _read_apex(reader)
    if _is_grad_scaler(reader.entry) or name in GRAD_SCALER_ENTRIES:
        return _read_grad_scaler(reader)
    return _read_ours(reader)


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return "version" in entry and "scalers" in entry


def _is_grad_scaler(entry: Mapping[str, Any]) -> bool:
    return len({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} & entry.keys()) > 2


def _is_apex(entry: Mapping[str, Any]) -> bool:
    return any(isinstance(key, str) and key.startswith("loss_scaler") for key in entry)


def _read_ours(reader: Reader) -> Saved:
    version = reader.count("version")
    if version > VERSION:
        raise CheckpointError(
            f"{reader.where}['version'] is {version}, and this version of lightning_amp reads 1 to {VERSION}. Install "
            f"a newer one, or delete the entry {reader.where!r}: loss scales and totals then start anew."
        )
    if version < 1:
        raise reader.damaged("version", f"is {version}, and 1 to {VERSION} is expected")
    static = reader.below("settings").get("loss_scale") != "dynamic" if version > 1 else None
    scalers = reader.below("scalers")
    return Saved(
        {_key(name, scalers): _read_scaler(scalers.below(name), static) for name in scalers.entry},
        [_read_optimizer(o, version) for o in reader.list("optimizers" if version > 1 else "outcomes")],
        reader.count("num_losses") if version > 1 else None,
        [_read_scheduler(s) for s in reader.list("schedulers")] if "schedulers" in reader.entry else [],
    )


def _key(name: Any, scalers: Reader) -> Key:
    kind, *indices = str(name).split("_")
    low, high = _INDICES.get(kind, (1, 0))
    if not (low <= len(indices) <= high and all(i.isdecimal() for i in indices)):
        raise scalers.damaged(str(name), "is no name of a scaler; those are loss_0, optimizer_0_1, default and grad")
    return kind, tuple(map(int, indices))


def _read_scaler(reader: Reader, static: bool | None) -> SavedScaler:
    values = {name: reader.number(name) for name in ScaleState._fields if name not in ("last_bad", "inv_scale")}
    values |= {"scale": reader.positive("scale"), "inv_scale": reader.positive("inv_scale")}
    values["last_bad"] = reader.number("last_bad", low=-1.0)
    if static is None:  # version 1 does not say: a scale that never left one was not on the move
        static = values["lowest"] == values["highest"] == 1.0
    return SavedScaler(values, reader.count("attempts"), not static)


def _read_optimizer(reader: Reader, version: int) -> dict[str, Any]:
    values: dict[str, Any] = {outcome.value: reader.count(outcome.value) for outcome in Outcome}
    if version > 1:
        values |= {"latest": reader.get("latest"), "streak": reader.count("streak")}
        if values["latest"] not in (None, *(outcome.value for outcome in Outcome)):
            what = f"is {short(values['latest'])}, and 'stepped', 'skipped', 'idle' or None is expected"
            raise reader.damaged("latest", what)
    return values


def _read_scheduler(reader: Reader) -> tuple[int, int]:
    return reader.count("tried"), int(reader.number("made", low=-math.inf))


def _alone(scale: float, clean: float, dynamic: bool = True) -> SavedScaler:
    return SavedScaler({"scale": scale, "clean": clean, "lowest": scale, "highest": scale}, dynamic=dynamic)


def _read_grad_scaler(reader: Reader) -> Saved:
    # One scale for all, so it covers each of ours. torch lets it fall to zero, from where no factor brings it back.
    scale, clean = reader.number("scale"), reader.number("_growth_tracker")
    return Saved({DEFAULT_KEY: _alone(scale, clean)} if scale else {})


def _read_apex(reader: Reader) -> Saved:
    count = sum(1 for key in reader.entry if str(key).startswith("loss_scaler"))
    below = [reader.below(f"loss_scaler{i}") for i in range(count)]
    # Apex writes a static scale likewise: one is what it sets where nothing is to be scaled.
    found = [_alone(r.positive("loss_scale"), r.number("unskipped"), r.entry["loss_scale"] != 1.0) for r in below]
    scalers: dict[Key, SavedScaler] = {}
    if count > 1:
        scalers = {("loss", (i,)): scaler for i, scaler in enumerate(found)}
    return Saved({DEFAULT_KEY: found[0], **scalers}, num_losses=count if count > 1 else None)


def find(checkpoint: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """Looks through a whole checkpoint for a state that `read` can read.

    Args:
        checkpoint: As Lightning or a script saved it.
        name: Where the state is if it was saved under the present name.

    Returns:
        The name and the state: the one of that name, else one of this package under another name, else a GradScaler's,
        else Apex's; empty if there is none.
    """
    if name in checkpoint:
        return name, checkpoint[name]
    entries = {k: v for k, v in checkpoint.items() if isinstance(v, Mapping) and v and k != "state_dict"}
    for known in (_is_ours, _is_grad_scaler, _is_apex):
        for other, entry in entries.items():
            if known(entry):
                return other, entry
    return next(((k, entries[k]) for k in GRAD_SCALER_ENTRIES if k in entries), (name, {}))
