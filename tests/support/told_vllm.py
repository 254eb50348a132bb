"""Stands for vLLM's processes in this one, under `VllmEngine`: a test says what they tell, and sees what they are told.

Each telling is taken in before `tell` returns, so that a test decides on the order of all that happens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from services.core.clock import ManualClock
from services.engine.config import EngineConfig, StepReport
from services.engine.schedule.sequence import SequenceEvent
from services.vllm import messages
from services.vllm.engine import VllmEngine
from services.vllm.messages import JsonMessage
from services.vllm.process import Received, VllmProcess
from services.vllm.start import VllmStart

BLOCK = 16
MAX_MODEL_LEN = 256
_TOKEN_BYTES = 8
"""A key and a value of one float32 each."""


class ToldVllm:
    """Is in the place of an `EngineProcess`, as a context that ends it. `engine` is the adapter over it."""

    def __init__(
        self,
        folder: Path,
        *,
        num_ranks: int = 1,
        num_blocks: int = 40,
        max_num_seqs: int = 8,
        limit_leased_blocks: bool = False,
    ) -> None:
        (folder / "config.json").write_text("{}")
        self.clock = ManualClock()
        self.sent: list[JsonMessage] = []
        """What the front was told."""
        self.forms: list[JsonMessage] = []
        """What the ranks were told of the slots' memory, each once."""
        self.events: list[SequenceEvent] = []
        self.front, self.core = self._process(messages.FRONT), self._process(messages.CORE)
        self.ranks = [self._process(messages.RANK, rank) for rank in range(num_ranks)]
        self.can_end = threading.Event()
        """Until it is set, what was to end has not."""
        self.can_end.set()
        self._told: queue.Queue[Received | str] = queue.Queue()
        self._is_over = False
        start = VllmStart(lambda: cast(Any, self))
        part = {"num_ranks": num_ranks, "num_blocks": num_blocks, "part_bytes": BLOCK * _TOKEN_BYTES // num_ranks}
        for rank in self.ranks:
            self.tell(rank, messages.CACHE, **part, form="1 x [16, 1] torch.float32", backend="TOLD")
            self.tell(rank, messages.MAPPED)
        self.tell(self.front, messages.READY, **_facts(num_ranks))
        start.wait()
        config = EngineConfig(
            str(folder),
            "told",
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            limit_leased_blocks=limit_leased_blocks,
        )
        self.engine = VllmEngine(config, start, self.clock)
        self.engine.start(self._report)

    def __enter__(self) -> ToldVllm:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self.engine.close()

    def _process(self, who: str, rank: int = 0) -> VllmProcess:
        return VllmProcess(cast(Any, None), who, rank)

    def _report(self, report: StepReport) -> None:
        self.events += report.events

    def tell(self, peer: VllmProcess, kind: str, **fields: Any) -> None:
        """Has a process tell something."""
        self._take_in([(peer, {"kind": kind, "at": self.clock.now(), **fields})])

    def fail(self, why: str) -> None:
        """Has vLLM be unable to go on."""
        self._told.put(why)

    def settle(self) -> None:
        """Returns when what was asked of the engine is done."""
        self._take_in([])

    def _take_in(self, received: Received) -> None:
        self._told.put(received)
        self._told.join()
        assert not self._is_over, "the engine has a defect"

    # -- what an engine has of an `EngineProcess` ----------------------------------------------------------------------

    def run(self, absorb: Callable[[Received], None]) -> str:
        try:
            while True:
                received = self._told.get()
                try:
                    if isinstance(received, str):
                        return received
                    absorb(received)
                finally:
                    self._told.task_done()
        finally:
            self._is_over = True

    def send(self, peer: VllmProcess, message: JsonMessage) -> None:
        assert peer is self.front
        self.sent.append(message)

    def send_descriptor(self, peer: VllmProcess, message: JsonMessage, fd: int) -> None:
        self.forms.append(message["memory"])

    def wake(self) -> None:
        self._told.put([])

    def stop(self) -> None:
        self._told.put("")

    def end(self) -> None:
        self.can_end.wait()

    def loaded(self) -> None:
        pass


def _facts(num_ranks: int) -> JsonMessage:
    return {
        "version": "0.32.0",
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": 300,
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "block_size": BLOCK,
        "sharding": [num_ranks, 1],
        "quantization": "none",
        "config": [],
    }
