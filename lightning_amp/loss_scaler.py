"""Loss scalers: one per key, its state on the device, moved on once per backward pass (or delayed window)."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_amp import kernels
from lightning_amp.kernels.scale_rule import FIRST_BAD_NONE, ScaleState, initial_state
from lightning_amp.opt_levels import AmpConfig
from lightning_amp.outcomes import LossAccount

Key = tuple[str, tuple[int, ...]]
"""What a scaler belongs to: ``("loss", (id,))``, ``("optimizer", indices)``, ``("default", ())``, ``("grad", ())``."""

DEFAULT_KEY: Key = ("default", ())
GRAD_KEY: Key = ("grad", ())
GRAD_START = 2.0**10
"""Where the scale of `Engine.grad` starts at the most: a raw half output takes no factor beyond 65,504."""


def name_of(key: Key) -> str:
    """Returns a key as one word: ``loss_0``, ``optimizer_0_1``, ``default``."""
    return "_".join([key[0], *map(str, key[1])])


_STREAK = ScaleState._fields.index("streak")


class Scale(NamedTuple):
    """The scale one backward pass ran under.

    Attributes:
        scaler: Whose it is.
        version: How often that scaler had been moved on.
        scale: 0-dim float32, or None for a static scale of one: nothing is multiplied.
        inv_scale: ``1 / scale``, likewise.
    """

    scaler: "LossScaler"
    version: int
    scale: Tensor | None
    inv_scale: Tensor | None

    def kept(self) -> "Scale":
        """Returns the same with values of its own, which a later move of the scaler does not change."""
        if self.scale is None or self.inv_scale is None:
            return self
        return self._replace(scale=self.scale.clone(), inv_scale=self.inv_scale.clone())


def first_scale(key: Key, config: AmpConfig) -> float:
    """Returns the scale that a scaler starts at where no other covers it.

    Args:
        key: What it belongs to.
        config: Its settings.
    """
    if config.loss_scale != "dynamic":
        return config.loss_scale
    return max(min(config.init_scale, GRAD_START), config.rule.min_scale) if key == GRAD_KEY else config.init_scale


class LossScaler:
    """One loss scale and what it has been through.

    Args:
        key: What it belongs to.
        config: Its settings.
        device: Where its state lives.
    """

    def __init__(self, key: Key, config: AmpConfig, device: torch.device) -> None:
        self.key = key
        self.rule = config.rule
        start = first_scale(key, config)
        self._unscaled = config.loss_scale == 1.0
        self.attempts = 0
        self.sources: list[Tensor] = []
        """The parameters whose gradients were collected last: what ``last_bad`` counts in."""
        self.version = 0
        self.known_clean = False
        """Whether the host knows without waiting that the pass that moved it on last did not overflow."""
        self._place(torch.tensor(initial_state(start, self.rule), dtype=torch.float32, device=device))

    def _place(self, state: Tensor) -> None:
        self.state = state
        # Off the CPU the pass itself leaves whether it overflowed in a tensor of its own, which costs no operation.
        self._tells = not state.is_cpu
        self._flag: Tensor | None = None
        self.first_bad = torch.full((), FIRST_BAD_NONE, dtype=torch.int32, device=state.device)
        # Views, so that a scale in hand is always the present one and costs no operation to get.
        self._now: tuple[Tensor | None, Tensor | None] = (None, None) if self._unscaled else (state[0], state[1])
        self.backend = kernels.backend(state.device)

    @property
    def name(self) -> str:
        """The key as one word."""
        return name_of(self.key)

    def now(self) -> Scale:
        """Returns the scale of a backward pass that starts now."""
        return Scale(self, self.version, *self._now)

    def update(self, loss: Tensor | None) -> None:
        """Moves the state on by what `collect` found since the last call; no host synchronisation.

        Args:
            loss: The loss before scaling, any shape, or None where only the gradients count.
        """
        self.collect([], [], None, loss, widen=False, in_place=False)

    def collect(
        self,
        new: list[Tensor],
        into: list[Tensor | None],
        inv_scale: Tensor | None,
        loss: Tensor | None,
        *,
        widen: bool,
        in_place: bool,
    ) -> list[Tensor]:
        """Collects the gradients of a backward pass, on this scaler's device, and moves the state on as `update` does.

        Args:
            new: See `lightning_amp.kernels.reference.collect`; may be empty.
            into: See there.
            inv_scale: See there.
            loss: See `update`.
            widen: See `lightning_amp.kernels.reference.collect`.
            in_place: See there.

        Returns:
            The true gradients.
        """
        self._flag = self.state.new_empty(()) if self._tells else None
        out: list[Tensor] = self.backend.collect_and_update(
            new,
            into,
            inv_scale,
            self.first_bad,
            self.state,
            loss,
            self.rule,
            self._flag,
            widen=widen,
            in_place=in_place,
        )
        self.attempts += 1
        self.version += 1
        self.known_clean = not self._tells and self.state.tolist()[_STREAK] == 0
        return out

    @property
    def overflowed(self) -> Tensor:
        """Whether the pass that moved it on last overflowed: 1.0 or 0.0, 0-dim float32; no host synchronisation."""
        return self.state[_STREAK].sign() if self._flag is None else self._flag

    def read(self) -> ScaleState:
        """Returns the state as Python floats: one host synchronisation on a device other than the CPU."""
        return ScaleState(*self.state.tolist())

    def account(self, state: ScaleState | None = None) -> LossAccount:
        """Returns what this scale has been through.

        Args:
            state: From `read`, or None to read it: one host synchronisation.
        """
        state = self.read() if state is None else state
        return LossAccount(
            attempts=self.attempts,
            overflows=int(state.overflows),
            nonfinite_losses=int(state.bad_losses),
            scale=state.scale,
            lowest=state.lowest,
            highest=state.highest,
        )

    def to(self, device: torch.device) -> None:
        """Moves the state to ``device``."""
        if self.state.device != device:
            self._place(self.state.to(device))

    def start_from(self, other: "LossScaler") -> None:
        """Takes over where ``other`` stands now, but not what it has been through; no host synchronisation."""
        here, there = ScaleState(*self.state.unbind()), ScaleState(*other.state.unbind())
        for name in ("scale", "inv_scale", "clean", "hysteresis"):
            getattr(here, name).copy_(getattr(there, name))
        here.lowest.copy_(there.scale)
        here.highest.copy_(there.scale)

    def state_dict(self) -> dict[str, Any]:
        """Returns scale, counters and totals as plain numbers: one host synchronisation."""
        return {**self.read()._asdict(), "attempts": self.attempts}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes over what `state_dict` gave.

        Args:
            state: All of it, made to fit this scaler's settings (see `lightning_amp.checkpoint`).
        """
        values = [float(state[name]) for name in ScaleState._fields]
        self.state.copy_(torch.tensor(values, dtype=torch.float32))
        self.attempts = int(state["attempts"])
        self.version += 1


def read_accounts(scalers: list[LossScaler], more: list[Tensor]) -> tuple[dict[str, LossAccount], list[float]]:
    """Returns the scalers' accounts by name, and the values of some 0-dim tensors: one host synchronisation in all.

    Args:
        scalers: Some scalers, on one device.
        more: 0-dim floating tensors.
    """
    parts = [scaler.state for scaler in scalers] + [value.detach().float().view(1) for value in more]
    numbers = torch.cat([part.to(parts[0].device) for part in parts]).tolist() if parts else []
    width = len(ScaleState._fields)
    accounts = {s.name: s.account(ScaleState(*numbers[i * width : (i + 1) * width])) for i, s in enumerate(scalers)}
    return accounts, numbers[len(scalers) * width :]


class LossScalers:
    """The scalers of one training, by key, made when they are first asked for.

    Args:
        config: The settings they share.
        device: Where their state lives.
    """

    def __init__(self, config: AmpConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._scalers: dict[Key, LossScaler] = {}

    def __iter__(self) -> Iterator[LossScaler]:
        return iter(self._scalers.values())

    def get(self, key: Key) -> LossScaler:
        """Returns the scaler of ``key``; a new one starts where the scaler that covers it stands now.

        Args:
            key: See `Key`.
        """
        if key not in self._scalers:
            scaler = LossScaler(key, self._config, self._device)
            cover = self._cover(key)
            if cover is not None:
                scaler.start_from(cover)
            self._scalers[key] = scaler
        return self._scalers[key]

    def _cover(self, key: Key) -> LossScaler | None:
        if key[0] == "loss":
            return self._scalers.get(DEFAULT_KEY)
        if key[0] != "optimizer":
            return None
        wanted = set(key[1])
        wider = [s for s in self if s.key[0] == "optimizer" and wanted < set(s.key[1])]
        return min(wider, key=lambda s: len(s.key[1]), default=self._scalers.get(DEFAULT_KEY))

    def to(self, device: torch.device) -> None:
        """Moves every state, and those made later, to ``device``."""
        self._device = device
        for scaler in self:
            scaler.to(device)

    def replace(self, states: Mapping[Key, Mapping[str, float]]) -> None:
        """Puts these scalers in place of all there are.

        Args:
            states: What each loads, by key.
        """
        self._scalers = {}
        for key, state in states.items():
            self._scalers[key] = LossScaler(key, self._config, self._device)
            self._scalers[key].load_state_dict(state)
