"""Defines what a worker sees of its engine: the `WorkerEngine` protocol and the records that only it has.

Workers use nothing else of an engine once `main` has made it, so another one can be written against this file,
`config`, `schedule.sequence`, `schedule.constraint`, `step_tally` and the block pool's records in `services.kv` alone;
`tests/support/scripted_engine.py` is the smallest one. A worker makes a `Sequence`, and from then on only passes it
back: what becomes of it, events say.
Owns: the contract. Never: how an engine schedules, computes or keeps its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from services.core.hashing import BlockHash
from services.engine.config import EngineInfo, EngineStats, StepReport
from services.engine.schedule.sequence import Sequence
from services.engine.step_tally import StepTally
from services.kv.handoff_admission import EngineRoom
from services.kv.index_log import IndexChanges
from services.kv.pool import CachedBlock, Holder
from services.kv.prefix_blocks import PrefixReservation
from services.kv.regions import BlockMemory

OnStep = Callable[[StepReport], None]


@dataclass(frozen=True, slots=True)
class BlockReservation:
    """Names the blocks set aside for a sequence whose KV will be imported: first `prefix`, then `fresh`."""

    prefix: list[int]
    """Cached blocks of the sequence's prefix. The caller holds a SEQUENCE reference to each."""
    fresh: list[int]
    """Blocks to import into. The caller holds an IMPORT reference to each."""
    spare: list[int] = field(default_factory=list)
    """Blocks set aside for the further answers. The caller holds an IMPORT reference to each."""


class WorkerEngine(Protocol):
    """Runs one model over one block pool. `add`, `adopt`, `abort`, `release`, `stats` and what sets blocks aside, lends
    or keeps them may be called on any thread and never wait for a step."""

    @property
    def info(self) -> EngineInfo:
        """Returns the description of the model and the pool, which does not change."""
        ...

    @property
    def cache(self) -> BlockMemory:
        """Returns the memory of the pool's blocks, which transfers read and write."""
        ...

    @property
    def tally(self) -> StepTally:
        """Returns the counts of what steps have done, for metrics."""
        ...

    @property
    def consecutive_step_failures(self) -> int:
        """Returns how many steps have raised since the last one that did not."""
        ...

    def start(self, on_step: OnStep) -> None:
        """Begins to run steps. All events are reported to `on_step`, on the engine's thread; it must not block.

        A sequence's events come in this order: `Admitted` (not for an adopted one), when it has all blocks of its
        prompt; if `num_prompt_logprobs` is set, `PromptScored` until all tokens of the prompt but the first were
        scored; for PREFILL_ONLY a `Progress` after every step that computed a part of the prompt; then `Token`, once
        for PREFILL_ONLY and else until one has a `finish`. `Failed` may take the place of any, and is the last.
        A sequence's `further` ones have only a `Token` each with the first of that sequence, in order, and for
        PREFILL_ONLY no more; else each goes on as if it had been adopted then.
        Blocks and tokens are reported only after the step that wrote them has completed on the device.
        """
        ...

    def stop(self) -> None:
        """Waits for the running step, then drops all sequences without events. Calling it again changes nothing."""
        ...

    def join(self) -> None:
        """Blocks the calling thread until the engine runs no more steps, after `stop` or because of a defect."""
        ...

    def close(self) -> None:
        """Frees the pool's memory. Nothing may read or write it afterwards."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose prompt is to be computed here. It holds no block before all that its prompt needs
        are available.

        With the first token of a sequence that has `further` ones, these begin: they share its full blocks, and what
        may still be written each has for itself. Until then they are not known to the engine.

        When a PREFILL_ONLY sequence is admitted, the engine takes LEASE references to its blocks, besides its own: the
        worker drops them with `release`. Its own end with its token, as those of any sequence end with its last.
        """
        ...

    def abort(self, seq_id: int) -> None:
        """Ends a sequence without an event, at the end of the step it is in, if any. Unknown ids are ignored.

        LEASE references stay, and so does an `Admitted` that is not yet reported: the worker must learn of them.
        """
        ...

    def was_admitted(self, sequence: Sequence) -> bool:
        """Returns whether the `Admitted` of a sequence that was added has been reported or will be. `abort` settles it:
        after that the answer does not change."""
        ...

    def hash_prompt(self, sequence: Sequence) -> None:
        """Computes the hashes of the sequence's full blocks, which `reserve` and `adopt` need. It takes 0.1 ms for each
        thousand tokens; call it before them, on any thread."""
        ...

    def reserve(
        self, sequence: Sequence, check: Callable[[int, EngineRoom], None], num_further: int = 0
    ) -> BlockReservation:
        """Sets blocks aside for all tokens of the sequence, and returns them; and one more for each of `num_further`
        answers that are to go on from the same tokens, as far as the pool is large enough.

        `check(num_fresh, room)` raises if that number of fresh blocks may not be taken. It is called under the engine's
        lock and must be quick. Raises what `check` raises, and OutOfBlocks if it allows more blocks than are
        available; then no block is held.
        """
        ...

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
        """Takes over a sequence whose KV is in the pool. `first_token` was sampled after its tokens, and has no KV yet;
        the engine goes on after it.

        Its blocks are `prefix`, to which it has SEQUENCE references already, and then `block_ids`, references to which
        pass from `holder` to the sequence. `further` are sequences of the same tokens, each with its own first token,
        that go on from the same KV (see `add`); references to `spare`, blocks set aside for them, pass to the engine,
        which frees what it does not need. When this method raises, all references are as they were before.
        """
        ...

    def release(self, block_ids: Iterable[int], holder: Holder) -> None:
        """Drops one reference of `holder` to each block. Sequences that wait for blocks are then considered again."""
        ...

    def prefix_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Returns the hashes of the blocks that the prefix cache may have for the sequence; all of them full, and not
        that of its last token. Call `hash_prompt` before."""
        ...

    def num_cached(self, hashes: Many[BlockHash]) -> int:
        """Returns how many of the blocks, from the first on, the prefix cache has. They may leave it at any time."""
        ...

    def lend(self, hashes: Many[BlockHash]) -> list[int]:
        """Returns the blocks of the longest run from the start of `hashes` that the prefix cache has. The caller holds
        a LEASE reference to each, and their content does not change while it does."""
        ...

    def reserve_prefix(self, hashes: Many[BlockHash], check: Callable[[int, EngineRoom], None]) -> PrefixReservation:
        """Sets blocks aside to bring a prefix into from elsewhere.

        `check(num_fresh, room)` is that of `reserve`. Raises what it raises, and OutOfBlocks; then no block is held.
        """
        ...

    def keep_prefix(self, reservation: PrefixReservation, hashes: Many[BlockHash]) -> None:
        """Adds blocks to the prefix cache that hold the KV of these hashes now, and drops all references of the
        reservation: of its blocks the first `len(hashes)` are cached, and the others free."""
        ...

    def take_uncopied(self, most: int) -> list[CachedBlock]:
        """Returns cached blocks for whoever copies them before they are evicted: each once, until it has been in use
        again. There need be none while nothing is soon to be evicted. Nothing is held, so that no sequence waits for
        the copies: ask afterwards which are `unchanged`."""
        ...

    def unchanged(self, blocks: Many[CachedBlock]) -> list[bool]:
        """Returns which of the blocks have not been evicted: their content, and what was read of it before, is that of
        their hashes."""
        ...

    def index_changes(self, after: int | None) -> IndexChanges | None:
        """Returns how the prefix index has changed since the change of that number, None if it has not. With None as a
        number, or one of long ago, it returns the whole index (see `services.kv.index_log`)."""
        ...

    def stats(self) -> EngineStats:
        """Returns the engine's load, block classes and measured costs as of now."""
        ...

    def device_memory(self) -> dict[str, int]:
        """Returns bytes of accelerator memory by kind (allocated, reserved, free, total); empty on a CPU."""
        ...
