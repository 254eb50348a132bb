"""Starts vLLM for a worker, and gathers what its processes tell of themselves until they are ready.

Owns: the thread that starts vLLM, which becomes the engine's, and the slots' memory until then. Never: sequences.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from services.core.errors import UnsupportedModel
from services.engine.cost_model import CostModel
from services.engine.step_tally import StepTally
from services.vllm import messages
from services.vllm.messages import JsonMessage
from services.vllm.process import EngineProcess, Received, VllmProcess
from services.vllm.slot_memory import SlotMemory

logger = logging.getLogger(__name__)


class VllmStart:
    """Gathers what vLLM's processes tell of themselves until they are ready. Its thread becomes the engine's."""

    def __init__(self, start: Callable[[], EngineProcess]) -> None:
        self.costs = CostModel()
        self.tally = StepTally()
        self.front: VllmProcess | None = None
        self.facts: JsonMessage = {}
        self.caches: dict[int, JsonMessage] = {}
        self.ranks: dict[int, VllmProcess] = {}
        self.memory: SlotMemory | None = None
        self.why_over = ""
        self.is_over = threading.Event()
        self.absorb: Callable[[Received], None] = self._absorb
        self._num_mapped = 0
        self._process: EngineProcess | None = None
        self._ready = threading.Event()
        # The thread starts vLLM itself, and lives as long: what it started would end with it.
        self.thread = threading.Thread(target=self._run, args=(start,), name="vllm-engine", daemon=True)
        self.thread.start()

    @property
    def process(self) -> EngineProcess:
        assert self._process is not None, "it has begun"
        return self._process

    def _run(self, start: Callable[[], EngineProcess]) -> None:
        try:
            self._process = start()
            self.why_over = self._process.run(lambda received: self.absorb(received))
        except Exception as error:
            self.why_over = str(error) or repr(error)
        finally:
            if self.why_over and self._ready.is_set():  # before that `wait` raises it
                logger.error("%s", self.why_over)
            # Before all of vLLM is gone, which takes seconds on a busy machine: what ran here goes on elsewhere.
            self.is_over.set()
            self._ready.set()
            if self._process is not None:
                self._process.end()

    def wait(self) -> None:
        """Waits until vLLM is ready. Raises UnsupportedModel if it has ended before."""
        self._ready.wait()
        if self.is_over.is_set():
            raise UnsupportedModel(f"vLLM could not be started: {self.why_over}")
        self.process.loaded()

    def end(self) -> None:
        """Ends vLLM's processes. None is left when it returns."""
        if self._process is not None:
            self._process.stop()
        self.thread.join()

    def _absorb(self, received: Received) -> None:
        for peer, message in received:
            match message["kind"]:
                case messages.CACHE:
                    self._cache(peer, message)
                case messages.MAPPED:
                    self._num_mapped += 1
                    if self._num_mapped == len(self.caches) and self.memory is not None:
                        self.memory.seal()
                case messages.READY:
                    self.front, self.facts = peer, message
                    self._ready.set()
                case messages.STEPPED:
                    self.count(message)

    def _cache(self, peer: VllmProcess, message: JsonMessage) -> None:
        self.caches[peer.rank], self.ranks[peer.rank] = message, peer
        if len(self.caches) < message["num_ranks"]:
            return
        num_slots = min(each["num_blocks"] for each in self.caches.values())
        slot_bytes = sum(each["part_bytes"] for each in self.caches.values())
        self.memory = SlotMemory(num_slots, slot_bytes)
        assert self.memory.fd is not None
        offset = 0
        for rank, cache in sorted(self.caches.items()):
            form = {"num_slots": num_slots, "slot_bytes": slot_bytes, "offset": offset}
            message = {"kind": messages.SLOTS, "memory": form}
            self.process.send_descriptor(self.ranks[rank], message, self.memory.fd)
            offset += cache["part_bytes"]

    def count(self, step: JsonMessage) -> None:
        """Counts a step that has ended."""
        seconds = step["at"] - step["began"]
        self.costs.observe(step["num_prefill"], step["num_decodes"], seconds * 1e3, step["at"])
        self.tally.ran(
            seconds,
            num_prefill_tokens=step["num_prefill"],
            num_decode_tokens=step["num_decodes"],
            num_sequences=step["num_sequences"],
            attended_tokens=step["attended"],
        )
