"""Has the engine of a store: a block pool over host memory, and nothing that computes.

It is a `WorkerEngine`, so that a store is a worker like others to all that is around an engine. Sequences never reach
it, since a store takes no commands for them. Owns: the pool, its lock and its memory. Never: leases, transfers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

from services.core.hashing import BlockHash
from services.core.step_average import StepAverage
from services.engine.config import EngineInfo, EngineStats
from services.engine.schedule.sequence import Sequence
from services.engine.step_tally import StepTally
from services.engine.worker_engine import BlockReservation, OnStep
from services.kv.handoff_admission import EngineRoom
from services.kv.pool import Holder
from services.kv.pool_face import PoolFace
from services.kv.regions import BlockMemory
from services.kv.s3_fifo import S3Fifo
from services.worker.host import MOST_PARKING


class StoreMemory(BlockMemory, Protocol):
    def close(self) -> None: ...


class StoreEngine(PoolFace):
    """Implements `WorkerEngine`. Its blocks are taken by number with `set_aside`, or as prefixes by their hashes."""

    def __init__(
        self, info: EngineInfo, memory: StoreMemory, *, lock: AbstractContextManager[object] | None = None
    ) -> None:
        # All prefixes come here, and most only once: hence another order of eviction.
        super().__init__(info.num_blocks, info.block_size, lock or threading.Lock(), S3Fifo())
        self.info = info
        self.cache: BlockMemory = memory
        self.tally = StepTally()
        self.consecutive_step_failures = 0
        self._memory = memory
        self._stopped = threading.Event()

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, on_step: OnStep) -> None:
        """Does nothing: there are no steps to report."""

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        self._stopped.wait()

    def close(self) -> None:
        self._memory.close()

    # -- blocks of handoffs --------------------------------------------------------------------------------------------

    def set_aside(self, num_blocks: int, check: Callable[[int, EngineRoom], None]) -> list[int]:
        """Returns as many fresh blocks, with an IMPORT reference to each.

        `check` and what is raised are those of `WorkerEngine.reserve`.
        """
        with self._lock:
            check(num_blocks, self._room())
            return self._pool.allocate(num_blocks, Holder.IMPORT)

    def lease(self, block_ids: Iterable[int]) -> None:
        """Turns IMPORT references into LEASE references: the blocks' content is complete, and is handed over again."""
        with self._lock:
            self._pool.transfer(block_ids, Holder.IMPORT, Holder.LEASE)

    def _room(self) -> EngineRoom:
        pool = self._pool
        return EngineRoom(pool.num_available, pool.num_blocks, 0, MOST_PARKING, num_preempted=0)

    # -- what shows ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        with self._lock:
            ledger = self._pool.ledger()
        return EngineStats(
            num_running=0,
            num_waiting=0,
            queued_prefill_tokens=0,
            ledger=ledger,
            num_preemptions=0,
            prefix_tokens_queried=0,
            prefix_tokens_hit=0,
            ms_per_prefill_token=0.0,
            ms_per_further_prefill_token=0.0,
            ms_per_decode_step=0.0,
            ms_per_decode_sequence=0.0,
            tokens_per_prefill_step=0.0,
            prefill_step=StepAverage(),
            decode_step=StepAverage(),
            current_step_ms=0.0,
            num_steps=0,
            num_tokens=0,
            consecutive_step_failures=0,
        )

    def device_memory(self) -> dict[str, int]:
        return {}

    def check_idle(self) -> None:
        """Raises AssertionError unless nothing holds a block, and all counts agree."""
        with self._lock:
            self._pool.check()
            assert self._pool.ledger().idle, self._pool.ledger()

    # -- sequences -----------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        _computes_nothing()

    def abort(self, seq_id: int) -> None:
        """Does nothing: no sequence is known here."""

    def was_admitted(self, sequence: Sequence) -> bool:
        return False

    def hash_prompt(self, sequence: Sequence) -> None:
        _computes_nothing()

    def prefix_hashes(self, sequence: Sequence) -> list[BlockHash]:
        _computes_nothing()

    def reserve(
        self, sequence: Sequence, check: Callable[[int, EngineRoom], None], num_further: int = 0
    ) -> BlockReservation:
        _computes_nothing()

    def adopt(
        self,
        sequence: Sequence,
        prefix: Iterable[int],
        block_ids: Iterable[int],
        first_token: int,
        holder: Holder,
        *,
        further: Iterable[tuple[Sequence, int]] = (),
        spare: Iterable[int] = (),
    ) -> None:
        _computes_nothing()


def _computes_nothing() -> NoReturn:
    raise AssertionError("a store has no sequences")
