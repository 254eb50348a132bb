"""Tests that the step thread ends, wherever it is when it is told to stop."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from services.engine.config import EngineConfig, EngineInfo
from services.engine.engine import Engine
from services.engine.loading import Loaded
from services.engine.model.kv_cache import KVCache, KVShape
from tests.support.fake_runner import FakeRunner
from tests.support.patience import HANG_S, Patience


class StoppedBetween(threading.Event):
    """Is an event that lets another thread act between the look at `_stopping` and the next `clear`."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def clear(self) -> None:
        """Clears the event, after `go`."""
        self.reached.set()
        assert self.go.wait(10)
        super().clear()


def test_a_stop_right_before_the_event_is_cleared_ends_the_thread() -> None:
    def loader(config: EngineConfig) -> Loaded:
        cache = KVCache(KVShape(1, 1, 4, 4, torch.float32), 8, torch.device("cpu"))
        info = EngineInfo("m", "d", "c", "n", "float32", 1, 1, 4, 4, 8, 64, 100, (2,), "cpu")
        return Loaded(info, cache, FakeRunner())

    engine = Engine(EngineConfig(str(Path()), "m", max_num_seqs=4, max_num_batched_tokens=8), loader)
    engine._wake = wake = StoppedBetween()
    engine.start(lambda report: None)
    assert wake.reached.wait(10)  # the thread has seen that it is not to stop
    stopping = threading.Thread(target=engine.stop, daemon=True)
    stopping.start()
    patience = Patience(HANG_S)
    while not wake.is_set():  # what stop does before it joins
        assert stopping.is_alive()
        assert not patience.is_over()
    wake.go.set()
    stopping.join(2)
    try:
        assert not stopping.is_alive(), "stop waits for a thread that waits for ever"
    finally:
        wake.set()
        engine.join()
        engine.close()
