"""Leaving an autocast region for a block, and the probe of its cache."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from lightning_amp.autocast import cache_is_sound, no_autocast


def product() -> torch.dtype:
    return torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype


@pytest.mark.parametrize("on", [True, False])
def test_autocast_is_off_inside_and_as_it_was_afterwards(on: bool) -> None:
    outside = torch.bfloat16 if on else torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        with no_autocast("cpu"):
            assert product() is torch.float32
            with no_autocast("cpu"):
                assert product() is torch.float32
            with torch.autocast("cpu", torch.float16):
                assert product() is torch.float16
            assert product() is torch.float32
        assert product() is outside


def test_autocast_is_back_after_an_exception_which_passes() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ArithmeticError), no_autocast("cpu"):
            raise ArithmeticError
        assert product() is torch.bfloat16


def test_another_device_type_is_left_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16), no_autocast("cuda"):
        assert product() is torch.bfloat16


def test_the_casts_of_the_region_stay_cached() -> None:
    """A weight used on both sides of a backward pass is cast once, if the owner of the cache wants it so."""
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        before = torch.mm(torch.ones(1, 1), weight).grad_fn
        with no_autocast("cpu"):
            pass
        after = torch.mm(torch.ones(1, 1), weight).grad_fn
    assert before is not None
    assert after is not None
    assert before.next_functions[1][0] is after.next_functions[1][0]


@pytest.mark.parametrize("caller", [nullcontext, torch.no_grad, torch.inference_mode])
def test_c47_the_cache_of_this_torch_is_sound_whoever_asks(caller: Callable[[], AbstractContextManager[None]]) -> None:
    with caller():
        assert cache_is_sound("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_c47_a_cache_that_hands_out_copies_without_a_graph_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: dict[int, Tensor] = {}

    def faulty(x: Tensor, weight: Tensor) -> Tensor:
        return x.bfloat16() @ copies.setdefault(id(weight), weight.bfloat16())

    monkeypatch.setattr(torch, "mm", faulty)
    assert not cache_is_sound("cpu")
