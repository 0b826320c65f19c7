"""Fifty steps of a small DCGAN at O1 and O2 against O0, and O0 against Lightning without the plugin."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from examples.dcgan.networks import Discriminator, Generator
from tests.helpers.modules import Scripted, amp, fit, same, watch_steps

STEPS = 50
LOSS = 0.004
"""How far a loss may be from O0's at any step; they start near 0.7 and the discriminator's halves."""
FIRST, ALL = 0.02, 0.2
"""How far, relative to its norm, the gradient of a raw step may be from O0's: in the first step, where the weights are
the same, and in all. Adam divides a wrong scale out again, so the losses alone would not show one."""


@dataclass(frozen=True)
class Variant:
    """How a training is written.

    Attributes:
        toggle: Whether the other network is frozen around each optimizer's passes.
        clip: A total norm to clip each network's gradients to, or None.
        fused: Whether Adam is torch's fused one.
        accumulate: Batches to a step.
    """

    toggle: bool = False
    clip: float | None = None
    fused: bool = False
    accumulate: int = 1


VARIANTS = {
    "plain": Variant(),
    "toggled": Variant(toggle=True),
    "clipped": Variant(clip=0.5),
    "fused": Variant(fused=True),
    "accumulated": Variant(toggle=True, accumulate=3),
    "all at once": Variant(toggle=True, clip=0.5, fused=True, accumulate=3),
}


@dataclass
class Record:
    """What a training left: losses ``[steps, 3]``, the gradients of each raw step by optimizer, the final state."""

    losses: list[list[Tensor]] = field(default_factory=list)
    grads: list[list[list[Tensor]]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Smooth images with a bright spot somewhere, and noise."""
    random = torch.Generator().manual_seed(1)
    axis = torch.linspace(-1.0, 1.0, 16)
    made = []
    for _ in range(STEPS):
        x, y = torch.rand(2, 8, 1, 1, generator=random) - 0.5
        spots = 2 * torch.exp(-4 * ((axis - x) ** 2 + (axis.view(-1, 1) - y) ** 2)) - 1
        made.append((spots.unsqueeze(1), torch.randn(8, 8, 1, 1, generator=random)))
    return made


def train(variant: Variant, plugin: Any) -> Record:
    """Trains the two networks with three losses, each with an id of its own; ids are for the plugin alone."""
    record = Record()
    ids = [{}, {}, {}] if plugin is None else [{"loss_id": i} for i in range(3)]

    def step(module: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, noise = batch
        opt_d, opt_g = module.optimizers()
        last = (batch_idx + 1) % variant.accumulate == 0
        fake, ones, zeros = module.g(noise), torch.ones(8), torch.zeros(8)

        def update(optimizer: Any) -> None:
            if last:
                if variant.clip:
                    module.clip_gradients(optimizer, variant.clip, "norm")
                optimizer.step()
                optimizer.zero_grad()

        def turn(optimizer: Any, losses: dict[int, Any]) -> list[Tensor]:
            if variant.toggle:
                module.toggle_optimizer(optimizer)
            elif optimizer is opt_d:
                optimizer.zero_grad()  # of what the generator's pass left
            values = []
            for i, loss_of in losses.items():
                loss = loss_of()
                module.manual_backward(loss / variant.accumulate, **ids[i])
                values.append(loss.detach().float())
            update(optimizer)
            if variant.toggle:
                module.untoggle_optimizer(optimizer)
            return values

        on_d = turn(opt_d, {0: lambda: bce(module.d(real), ones), 1: lambda: bce(module.d(fake.detach()), zeros)})
        record.losses.append(on_d + turn(opt_g, {2: lambda: bce(module.d(fake), ones)}))

    def make(module: Any) -> list[Any]:
        made = [
            torch.optim.Adam(network.parameters(), 2e-4, betas=(0.5, 0.999), fused=variant.fused)
            for network in (module.d, module.g)
        ]
        record.grads = [watch_steps(optimizer) for optimizer in made]  # type: ignore[misc]
        return made

    torch.manual_seed(0)
    module = Scripted(step, make, g=Generator(16, 8, 4, 1), d=Discriminator(16, 4, 1))
    fit(module, plugin, batches())
    record.state = module.state_dict()
    return record


@cache
def reference(name: str) -> Record:
    """The training at O0."""
    return train(VARIANTS[name], amp("O0", num_losses=3))


def distances(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> list[float]:
    """Returns the relative distance of the whole gradient, step by step."""
    flat = [
        (torch.cat([g.flatten() for g in a]), torch.cat([g.flatten() for g in b]))
        for a, b in zip(ours, theirs, strict=True)
    ]
    return [((a - b).norm() / b.norm()).item() for a, b in flat]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", VARIANTS)
def test_fifty_dcgan_steps_stay_near_o0(name: str, level: str) -> None:
    ours, o0 = train(VARIANTS[name], amp(level, num_losses=3)), reference(name)
    losses, expected = torch.tensor(ours.losses), torch.tensor(o0.losses)
    assert (losses - expected).abs().max() <= LOSS
    assert expected[-5:, 0].mean() < 0.75 * expected[0, 0]  # there was something to follow
    for grads, theirs in zip(ours.grads, o0.grads, strict=True):
        assert len(grads) == STEPS // VARIANTS[name].accumulate
        far = distances(grads, theirs)
        assert far[0] <= FIRST
        assert max(far) <= ALL


@pytest.mark.parametrize("name", VARIANTS)
def test_o0_is_lightning_without_the_plugin_bit_for_bit(name: str) -> None:
    ours, plain = reference(name), train(VARIANTS[name], None)
    assert same([x for losses in ours.losses for x in losses], [x for losses in plain.losses for x in losses])
    assert same(list(ours.state.values()), list(plain.state.values()))
    for grads, theirs in zip(ours.grads, plain.grads, strict=True):
        assert all(same(a, b) for a, b in zip(grads, theirs, strict=True))
