"""Chooses what each step runs, and absorbs what it produced (continuous batching with chunked prefill).

Owns: the sequences, their lifecycle, and the pool's SEQUENCE references; at the admission of a PREFILL_ONLY sequence it
also takes the LEASE references, which are the lease owner's to drop. Never: the device, time, threads, leases. Pure and
not thread-safe: callers hold `Engine.lock`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from services.core.errors import InvalidRequest, Overloaded
from services.engine.admission import Admission, SchedulerConfig, never_fits
from services.engine.batch import Batch, release_blocks
from services.engine.block_pool import BlockPool, Holder
from services.engine.prefix import index_computed
from services.engine.sequence import (
    Admitted,
    Failed,
    Mode,
    Preempted,
    Progress,
    SampledToken,
    ScheduledSequence,
    Sequence,
    SequenceEvent,
    State,
    StepPlan,
    StepResult,
    Token,
)
from services.engine.step import ending, next_part

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """One step at a time: `schedule`, run the plan, then `update` or `fail` with the same plan.

    An empty plan needs neither. Events of `add` and `schedule` wait for `take_events`, or come first in the answer of
    the next `update` or `fail`.
    """

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self.pool = pool
        self.config = config
        self.sequences: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self.prefix_tokens_queried = 0
        self.prefix_tokens_hit = 0
        self._admission = Admission(pool, config)
        self._batch = Batch(pool, config.max_running)
        self._step_number = 0
        self._in_flight: frozenset[int] = frozenset()
        self._aborted: set[int] = set()  # in flight: they leave when the step is over
        self._events: list[SequenceEvent] = []

    # -- what comes in ------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues it. One that could never run fails at once, with an event."""
        self._register(sequence)
        self._admission.wait(sequence)
        num_tokens = len(sequence.token_ids)
        if num_tokens >= self.config.max_model_len:
            limit = self.config.max_model_len
            self._fail(sequence, InvalidRequest("token_ids", f"{num_tokens} tokens, must be fewer than {limit}"))
        elif never_fits(self.pool, sequence):
            self._fail(sequence, Overloaded(f"{num_tokens} tokens do not fit the {self.pool.num_blocks} KV blocks"))

    def adopt(self, sequence: Sequence) -> None:
        """Takes over a sequence whose KV is in the pool but for its last token; its SEQUENCE references are held."""
        assert sequence.mode is Mode.GENERATE, "a lease is not adopted twice"
        assert sequence.num_uncomputed == 1, "all but the handed-over token is computed"
        assert len(sequence.block_ids) * self.pool.block_size >= sequence.num_computed, "blocks cover what is computed"
        to_write = sequence.block_ids[sequence.num_computed // self.pool.block_size :]
        assert all(self.pool.references(Holder.SEQUENCE, block_id) == 1 for block_id in to_write), "and are its own"
        self._register(sequence)
        index_computed(self.pool, sequence, 0)
        self._admission.adopted.append(sequence)

    def abort(self, seq_id: int) -> bool:
        """Ends it without an event; False if unknown (never added, or over).

        In a step, it keeps its SEQUENCE references until `update` or `fail`: the step still writes its blocks. LEASE
        references stay, and so does an `Admitted` not yet taken: their owner must learn of them to drop them. (A
        `Preempted` not yet taken stays too.)
        """
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            return False
        if seq_id in self._in_flight:
            self._aborted.add(seq_id)
        else:
            self._leave(sequence)
        return True

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Decodes first, then unfinished prefills and recomputes in order of admission, then new admissions."""
        assert not self._in_flight, "the last step is not absorbed"
        preempted = self._fill_batch(now)
        parts: list[ScheduledSequence] = []
        budget = self.config.max_num_batched_tokens
        decodes = [sequence for sequence in self._batch if sequence.num_uncomputed == 1]
        prefills = [sequence for sequence in self._batch if sequence.num_uncomputed > 1]
        for sequence in chain(decodes, prefills, self._admissions(now)):
            num_tokens = min(budget, sequence.num_uncomputed)
            parts.append(next_part(sequence, num_tokens, self.pool.block_size))
            budget -= num_tokens
            if not budget:
                break  # before the next is admitted: it would hold blocks and not run
        self._in_flight = frozenset(part.seq_id for part in parts)
        if parts:
            self._step_number += 1
        return StepPlan(self._step_number, tuple(parts), preempted)

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceEvent]:
        """The step completed: its KV is final. Appends, indexes, finishes, frees."""
        for part, sequence, aborted in self._land(plan):
            num_indexed_tokens = sequence.num_computed
            sequence.num_computed += part.num_tokens
            index_computed(self.pool, sequence, num_indexed_tokens)
            if aborted:
                self._leave(sequence)
                continue
            if sequence.mode is Mode.PREFILL_ONLY:
                self._events.append(Progress(sequence.seq_id, sequence.num_computed, now))
            if part.samples:
                self._append(sequence, result.sampled[part.seq_id], now)
        return self.take_events()

    def fail(self, plan: StepPlan, error: Exception, now: float) -> list[SequenceEvent]:
        """The step raised: what it wrote is unknown, so nothing is indexed and its sequences end."""
        for _, sequence, aborted in self._land(plan):
            if aborted:
                self._leave(sequence)
            else:
                self._fail(sequence, error)
        return self.take_events()

    def take_events(self) -> list[SequenceEvent]:
        events, self._events = self._events, []
        return events

    # -- what shows ---------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        """Not in RUNNING: adopted, preempted and new."""
        return len(self._admission)

    @property
    def num_preempted(self) -> int:
        """Victims waiting to come back. While there are any, imports should not take blocks either."""
        return len(self._admission.preempted)

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens to compute before their sequences decode, running prefills included."""
        uncomputed = (sequence.num_uncomputed for sequence in self._batch)
        queued = chain(self._admission.preempted, self._admission.waiting)
        return sum(count for count in uncomputed if count > 1) + sum(len(sequence.token_ids) for sequence in queued)

    @property
    def has_work(self) -> bool:
        """There are sequences or events. If the plan is empty then, they wait for blocks that others hold."""
        return bool(self.sequences or self._events)

    def check(self) -> None:
        """Raises AssertionError unless places, states and references agree. O(blocks + references)."""
        self.pool.check()
        self._admission.check()
        self._batch.check()
        placed = [*self._batch, *self._admission]
        assert {sequence.seq_id for sequence in placed} == self.sequences.keys(), "each sequence has a place"
        assert len(placed) == len(self.sequences), "and only one"
        assert all(seq_id in self._batch for seq_id in self._in_flight), "what is in a step runs"
        assert self._aborted <= self._in_flight, "only a step delays an abort"
        for sequence in placed:
            covered = len(sequence.block_ids) * self.pool.block_size
            assert sequence.num_computed <= min(covered, len(sequence.token_ids)), f"blocks of {sequence.seq_id}"
        held = Counter(block_id for sequence in placed for block_id in sequence.block_ids)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.references(Holder.SEQUENCE, block_id) == held[block_id], f"references on block {block_id}"

    def check_idle(self) -> None:
        """`check`, and that nothing is left."""
        self.check()
        assert not self.sequences, f"sequences left: {sorted(self.sequences)}"
        assert not self._events, f"events left: {self._events}"

    # -- how sequences move -------------------------------------------------------------------------------------------

    def _register(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self.sequences, f"sequence {sequence.seq_id} is here already"
        assert sequence.token_ids, "a sequence has tokens"
        sequence.state = State.WAITING
        self.sequences[sequence.seq_id] = sequence

    def _fill_batch(self, now: float) -> tuple[int, ...]:
        """Adopted sequences join, and decodes get the blocks they need; answers who was preempted for that.

        Before anything of the step is planned, so that no victim is in the plan. Again when a victim made place for an
        adopted one: that holds blocks, and with nobody else left to run must not be forgotten.
        """
        victims: list[int] = []
        adopted = self._admission.adopted
        while True:
            while adopted and not self._batch.full:
                adopted[0].admitted_s = now
                self._batch.join(adopted.popleft())
            victims += self._grow_decodes(now)
            if not adopted or self._batch.full:
                return tuple(victims)

    def _grow_decodes(self, now: float) -> list[int]:
        short = self._batch.short_of_blocks()
        for sequence in short:
            if never_fits(self.pool, sequence):
                self._fail(sequence, Overloaded(f"grew beyond the {self.pool.num_blocks} KV blocks"))
        victims: list[Sequence] = []
        for sequence in short:
            if sequence.state is State.RUNNING:  # neither failed nor a victim
                victims += self._batch.grow(sequence)
        for victim in victims:
            self._admission.wait_again(victim)
            self._events.append(Preempted(victim.seq_id, now))
        self.num_preemptions += len(victims)
        return [victim.seq_id for victim in victims]

    def _admissions(self, now: float) -> Iterator[Sequence]:
        """Admits one sequence at each turn, while there is room."""
        while not self._batch.full and (found := self._admission.take_next(now)):
            sequence, room = found
            comes_back = sequence.state is State.PREEMPTED
            self._batch.enter(sequence, room)
            if not comes_back:
                self._admitted(sequence, now)
            yield sequence

    def _admitted(self, sequence: Sequence, now: float) -> None:
        sequence.admitted_s = now
        sequence.num_cached = sequence.num_computed
        self.prefix_tokens_queried += len(sequence.token_ids)
        self.prefix_tokens_hit += sequence.num_cached
        if sequence.mode is Mode.PREFILL_ONLY:
            self.pool.acquire(sequence.block_ids, Holder.LEASE)
        self._events.append(Admitted(sequence.seq_id, tuple(sequence.block_ids), sequence.num_cached, now))

    def _land(self, plan: StepPlan) -> list[tuple[ScheduledSequence, Sequence, bool]]:
        """The step is over: its parts with their sequences, and whether these were aborted meanwhile."""
        assert {part.seq_id for part in plan.sequences} == self._in_flight, "not the plan in flight"
        landed = [(part, self.sequences[part.seq_id], part.seq_id in self._aborted) for part in plan.sequences]
        self._in_flight = frozenset()
        self._aborted.clear()
        return landed

    def _append(self, sequence: Sequence, token: SampledToken, now: float) -> None:
        position = sequence.next_position
        finish, stop_token_id = ending(sequence, token.token_id, self.config.max_model_len)
        sequence.token_ids.append(token.token_id)
        self._events.append(Token(sequence.seq_id, position, token, finish, stop_token_id, now))
        if finish or sequence.mode is Mode.PREFILL_ONLY:
            self._leave(sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._leave(sequence)
        self._events.append(Failed(sequence.seq_id, error))

    def _leave(self, sequence: Sequence) -> None:
        del self.sequences[sequence.seq_id]
        if sequence.seq_id in self._batch:
            self._batch.leave(sequence)
        else:
            self._admission.remove(sequence)
            release_blocks(self.pool, sequence)  # an adopted one has some
        sequence.state = State.FINISHED
