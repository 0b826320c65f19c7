"""What tests of kernels share."""

from collections.abc import Iterator

import pytest

from lightning_amp import kernels


@pytest.fixture
def device_chooses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device alone chooses the kernels, whatever the environment says; no choice is remembered."""
    monkeypatch.delenv("LIGHTNING_AMP_KERNELS", raising=False)
    kernels._backend.cache_clear()
    yield
    kernels._backend.cache_clear()
