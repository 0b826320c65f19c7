"""Settings that do nothing or do harm are told at start, in both front ends."""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_amp import amp
from tests.helpers.modules import Scripted, fit
from tests.helpers.modules import amp as plugin


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    amp.deinitialize()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1))

    def forward(self, x: Any) -> Any:
        return self.decoder(x)


def in_plain_torch(optimizer: Callable[[Any], Any], **settings: Any) -> None:
    model = Net()
    amp.initialize(model, optimizer(model.parameters()), verbosity=0, **settings)
    amp.deinitialize()


def in_lightning(optimizer: Callable[[Any], Any], **settings: Any) -> None:
    fit(Scripted(lambda *_: None, lambda module: optimizer(module.parameters()), net=Net()), plugin(**settings))


@pytest.fixture(params=[in_plain_torch, in_lightning])
def told(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """Returns what a training with such settings warns of."""

    def run(
        optimizer: Callable[[Any], Any] = lambda params: torch.optim.SGD(params, 0.1), **settings: Any
    ) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            request.param(optimizer, **settings)
        return [str(w.message) for w in caught if "keep_fp32=" in str(w.message) or "eps=" in str(w.message)]

    return run


Told = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("LayerNrom", "keep_fp32='LayerNrom' fits no module, .* Did you mean 'LayerNorm'"),
        ("layernorm", "Did you mean 'LayerNorm'"),
        ("decodr", "Did you mean '(net.)?decoder'"),
        ("coder.1", "Did you mean '(net.)?decoder.1'"),
        ("head.*", "Patterns are for module names"),
        (nn.GroupNorm, "keep_fp32='GroupNorm' fits no module"),
        (lambda module, name: name == "head", "keep_fp32='<lambda>' fits no module"),
    ],
)
def test_an_entry_of_keep_fp32_that_fits_nothing_is_told_with_what_is_near(told: Told, entry: Any, words: str) -> None:
    (sentence,) = told(opt_level="O2", keep_fp32=["LayerNorm", entry])
    assert re.search(words, sentence), sentence


def test_entries_that_fit_are_not_told(told: Told) -> None:
    entries = ["LayerNorm", "*.1", "*decoder", nn.LayerNorm, lambda module, name: name.endswith("1")]
    assert told(opt_level="O2", keep_fp32=entries) == []
    assert told(opt_level="O0", keep_fp32="Nothing") == [], "all of it is float32"


def test_keep_fp32_at_o1_is_told_to_be_in_vain(told: Told) -> None:
    (sentence,) = told(opt_level="O1", keep_fp32="LayerNorm")
    assert "does nothing at opt_level='O1'" in sentence


def test_an_entry_need_fit_one_of_several_models_only() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.initialize([Net(), nn.Linear(1, 1)], opt_level="O2", keep_fp32="decoder", verbosity=0)


def test_c58_an_eps_that_half_rounds_to_zero_is_warned_of(told: Told) -> None:
    (sentence,) = told(torch.optim.Adam, opt_level="O3")
    assert "Adam has eps=1e-08, which is zero in float16" in sentence
    assert "opt_level='O2'" in sentence
    assert told(lambda params: torch.optim.Adam(params, eps=1e-4), opt_level="O3") == []
    assert told(torch.optim.Adam, opt_level="O3", dtype="bfloat16") == []
    assert [told(torch.optim.Adam, opt_level=level) for level in ("O0", "O1", "O2")] == [[], [], []]
