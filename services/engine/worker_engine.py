"""What a worker sees of its engine: the `WorkerEngine` protocol and the two records that pass through it.

Workers use nothing else of an engine, so another one can be written against this file, `config` and `schedule.sequence`
alone.
Owns: the contract. Never: how an engine schedules, computes or keeps its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from services.engine.config import EngineInfo, EngineStats, StepReport
from services.engine.schedule.sequence import Sequence
from services.engine.step_tally import StepTally
from services.kv.pool import Holder
from services.kv.regions import BlockMemory

OnStep = Callable[[StepReport], None]


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """What an engine has at one moment; counts are blocks unless they say otherwise."""

    num_available: int
    """Free and evictable blocks, after the cached prefix in question is set aside."""
    num_blocks: int
    num_sequences: int
    """Running and waiting sequences, adopted ones included."""
    max_num_seqs: int
    num_preempted: int
    """Sequences whose blocks were taken and that wait to come back; they go before new work."""


@dataclass(frozen=True, slots=True)
class BlockReservation:
    """Blocks set aside for a sequence whose KV will be imported: its cached prefix, then fresh ones to write into."""

    prefix: list[int]
    """The caller holds a SEQUENCE reference to each."""
    fresh: list[int]
    """The caller holds an IMPORT reference to each."""


class WorkerEngine(Protocol):
    """An engine over one model and one block pool. `add`, `reserve`, `adopt`, `abort`, `release` and `stats` may be
    called on any thread and never wait for a step."""

    @property
    def info(self) -> EngineInfo:
        """The model's and the pool's fixed facts."""
        ...

    @property
    def cache(self) -> BlockMemory:
        """The memory of the pool's blocks, which transfers read and write."""
        ...

    @property
    def tally(self) -> StepTally:
        """Counts of what steps have done, for metrics."""
        ...

    @property
    def alive(self) -> bool:
        """True while the engine can run steps."""
        ...

    @property
    def consecutive_step_failures(self) -> int:
        """Steps in a row that raised, up to now."""
        ...

    def start(self, on_step: OnStep) -> None:
        """Begins to run steps. `on_step` is called on the engine's thread with what happened and must not block."""
        ...

    def stop(self) -> None:
        """Waits for the step in flight and drops all sequences without events. Calling it again is harmless."""
        ...

    def join(self) -> None:
        """Returns when the engine runs no more steps, after `stop` or by a defect. Blocks the calling thread."""
        ...

    def close(self) -> None:
        """Gives the pool's memory back. Nothing may read or write it any more."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose prompt is to be computed here."""
        ...

    def abort(self, seq_id: int) -> None:
        """Ends a sequence without an event, at the end of the step it is in, if any. Unknown ids are ignored."""
        ...

    def hash_prompt(self, sequence: Sequence) -> None:
        """Computes the hashes of the sequence's blocks, which `reserve` and `adopt` need: 0.1 ms for each thousand
        tokens. Call it before them, on any thread."""
        ...

    def reserve(self, sequence: Sequence, check: Callable[[int, EngineRoom], None]) -> BlockReservation:
        """Sets blocks aside for all of the sequence's tokens, or raises what `check` raises and holds nothing.

        `check(num_fresh, room)` decides whether so many fresh blocks may be taken. It is called under the engine's lock
        and must be quick. Raises OutOfBlocks if it allows more than there are.
        """
        ...

    def adopt(self, sequence: Sequence, block_ids: Iterable[int], holder: Holder) -> None:
        """Takes over a sequence whose KV is in its blocks.

        The references to `block_ids` pass from `holder` to the sequence, which has those to its other blocks already.
        """
        ...

    def release(self, block_ids: Iterable[int], holder: Holder) -> None:
        """Drops one reference of `holder` to each block; sequences that wait for room are looked at again."""
        ...

    def stats(self) -> EngineStats:
        """Returns load, block classes and measured costs as of now."""
        ...

    def device_memory(self) -> dict[str, int]:
        """Returns bytes of accelerator memory by kind (allocated, reserved, free, total); empty on a CPU."""
        ...
