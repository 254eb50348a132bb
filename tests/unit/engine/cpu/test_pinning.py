"""Page-locking, as far as it can be seen without a GPU: what is asked of CUDA, and that a refusal is not fatal."""

from __future__ import annotations

import logging

import pytest
import torch

from services.engine.cpu.pinning import pin
from services.kv.regions import Region


class FakeRuntime:
    def __init__(self, error: int) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1
        if not self.error:
            self.locked[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.mark.parametrize("error", [0, 2])
def test_memory_is_locked_until_it_is_undone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    runtime = FakeRuntime(error)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with caplog.at_level(logging.WARNING):
        unpin = pin(Region(4096, 3 << 20, "cpu"))
    assert runtime.locked == ({} if error else {4096: 3 << 20})
    assert ("3 MiB of staging are not page-locked" in caplog.text) == bool(error)
    unpin()
    assert not runtime.locked
