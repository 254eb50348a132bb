"""Drives a scheduler over a `FakeDevice` as the engine and its worker do, checking every plan and event.

A step is split into `begin` and `finish` (or `crash`), so that tests can do anything while it is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.core.errors import StepFailed
from services.core.hashing import BlockHash, num_blocks_for
from services.engine.schedule.prefix import cacheable_prefix
from services.engine.schedule.scheduler import Scheduler, SchedulerConfig
from services.engine.schedule.sequence import (
    Admitted,
    Failed,
    Finish,
    Mode,
    Preempted,
    Progress,
    Resumed,
    SamplingParams,
    Sequence,
    SequenceEvent,
    State,
    StepPlan,
    StepResult,
    StoppingParams,
    Token,
)
from services.kv.pool import BlockPool, Holder, OutOfBlocks
from tests.support import scheduler_checks
from tests.support.fake_device import POISON, FakeDevice, digests, next_token


@dataclass
class Record:
    """Keeps what the worker knows of a sequence."""

    sequence: Sequence
    given: list[int]
    output: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None
    aborted: bool = False
    num_written: int | None = None
    """Positions computed since (re-)admission; None: out of the pool."""
    progress: int = 0
    found: list[int] = field(default_factory=list)
    """Tokens whose KV it has found in the prefix cache, each time that it came back after a preemption."""
    decodes: bool = False
    """Its newest token came from its last step, or from elsewhere."""
    first: Record | None = None
    """The one that computes the prompt for this one too."""

    @property
    def never_began(self) -> bool:
        """The one that was to compute its prompt has ended before."""
        return self.first is not None and not self.output and (self.first.aborted or self.first.error is not None)


@dataclass
class Lease:
    record: Record
    block_ids: list[int]
    sealed: bool = False


_MOST_STEPS = 100_000


class SchedulerDriver:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 200,
        max_leased_blocks: int | None = None,
    ) -> None:
        self.indexed: dict[int, BlockHash] = {}
        self.pool = BlockPool(
            num_blocks,
            block_size,
            on_index=lambda hash, block_id: self.indexed.__setitem__(block_id, hash),
            on_evict=lambda hash, block_id: self.indexed.__delitem__(block_id),
        )
        self.config = SchedulerConfig(
            max_num_seqs, max_num_batched_tokens, max_model_len, max_leased_blocks=max_leased_blocks
        )
        self.scheduler = Scheduler(self.pool, self.config)
        self.device = FakeDevice(self.pool)
        self.records: dict[int, Record] = {}
        self.leases: dict[int, Lease] = {}
        self.foreign: list[list[int]] = []
        self.plan: StepPlan | None = None
        self.num_begun = 0
        self.all_heard = True
        self.now = 100.0

    # -- commands -----------------------------------------------------------------------------------------------------

    def sequence(
        self,
        token_ids: list[int],
        *,
        max_tokens: int = 4,
        min_tokens: int = 0,
        stop: frozenset[int] = frozenset(),
        mode: Mode = Mode.GENERATE,
        priority: int = 0,
        cache_salt: str = "",
        output_base: int = 0,
        seed: int = 0,
    ) -> Sequence:
        seq_id = len(self.records)
        sequence = Sequence(
            seq_id=seq_id,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(seed=seed),
            stopping=StoppingParams(output_base + max_tokens, min_tokens, stop),
            arrival_s=self.now,
            output_base=output_base,
            mode=mode,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.records[seq_id] = Record(sequence, list(token_ids))
        return sequence

    def add(self, token_ids: list[int], *, num_answers: int = 1, **options: Any) -> Record:
        sequence = self.sequence(token_ids, **options)
        sequence.further = self._further(sequence, num_answers, options)
        self.scheduler.add(sequence)
        return self.records[sequence.seq_id]

    def _further(self, first: Sequence, num_answers: int, options: dict[str, Any]) -> list[Sequence]:
        """Returns the sequences of the further answers, each of which chooses other tokens."""
        further = [self.sequence(first.token_ids, seed=seed, **options) for seed in range(1, num_answers)]
        for sequence in further:
            self.records[sequence.seq_id].first = self.records[first.seq_id]
        return further

    def further(self, record: Record) -> list[Record]:
        return [each for each in self.records.values() if each.first is record]

    def adopt_import(
        self, token_ids: list[int], *, spare: bool = True, num_answers: int = 1, **options: Any
    ) -> Record | None:
        """Adopts a handoff from elsewhere: reserve, copy, READY, adopt. Returns None if there is no room, as a worker
        would refuse it."""
        sequence = self.sequence(token_ids, **options)
        size = self.pool.block_size
        hits = self.pool.match_prefix(cacheable_prefix(sequence, size))
        self.pool.acquire(hits, Holder.IMPORT)
        try:
            num_blocks = num_blocks_for(len(token_ids) + spare, size)
            fresh = self.pool.allocate(num_blocks - len(hits), Holder.IMPORT)
        except OutOfBlocks:
            self.pool.release(hits, Holder.IMPORT)
            del self.records[sequence.seq_id]
            return None
        start = len(hits) * size
        self.device.write(hits + fresh, start, digests(token_ids, sequence.cache_salt)[start:])
        num_reserved = min(num_answers - 1, self.pool.num_available) if spare else 0
        reserved = self.pool.allocate(num_reserved, Holder.IMPORT)
        self.pool.transfer(hits + fresh + reserved, Holder.IMPORT, Holder.SEQUENCE)
        return self._adopt(sequence, hits + fresh, self._further(sequence, num_answers, options), reserved)

    def adopt_lease(self, seq_id: int, max_tokens: int, num_answers: int = 1) -> Record | None:
        """A mixed worker goes on with its own sealed lease."""
        lease = self.leases[seq_id]
        source = lease.record
        if not lease.sealed or source.finish or len(source.given) + 1 >= self.config.max_model_len:
            return None
        del self.leases[seq_id]
        options: dict[str, Any] = {"cache_salt": source.sequence.cache_salt, "max_tokens": max_tokens}
        sequence = self.sequence(source.given, **options)
        self.pool.transfer(lease.block_ids, Holder.LEASE, Holder.SEQUENCE)
        return self._adopt(sequence, lease.block_ids, self._further(sequence, num_answers, options), [])

    def _adopt(self, sequence: Sequence, block_ids: list[int], further: list[Sequence], reserved: list[int]) -> Record:
        record = self.records[sequence.seq_id]
        digest = digests(record.given, sequence.cache_salt)[-1]
        first, *others = [next_token(digest, (), each.sampling.seed) for each in (sequence, *further)]
        pairs = list(zip(further, others, strict=True))
        self.scheduler.adopt(sequence, (), block_ids, first, further=pairs, spare=reserved)
        for each in (sequence, *further):
            self.records[each.seq_id].output.append(each.token_ids[-1])
            self._begins(self.records[each.seq_id])
        return record

    def _begins(self, record: Record) -> None:
        """Its KV is in the pool, unless it was preempted at once."""
        is_there = record.sequence.state is not State.PREEMPTED
        record.num_written, record.decodes = len(record.given) if is_there else None, is_there

    def abort(self, seq_id: int) -> None:
        live = seq_id in self.scheduler.sequences
        assert self.scheduler.abort(seq_id) is live
        self.records[seq_id].aborted |= live

    def drop_lease(self, seq_id: int) -> None:
        lease = self.leases.pop(seq_id)
        if lease.sealed:
            given = lease.record.given
            kv = digests(given, lease.record.sequence.cache_salt)
            assert self.device.read(lease.block_ids, len(given)) == kv, "a lease's KV stays until it ends"
        elif lease.record.error is None:
            self.abort(seq_id)
        self.pool.release(lease.block_ids, Holder.LEASE)

    def take_foreign(self, num_blocks: int) -> None:
        """Takes blocks for an import that is being copied into the pool."""
        block_ids = self.pool.allocate(min(num_blocks, self.pool.num_available), Holder.IMPORT)
        self.device.write(block_ids, 0, [POISON - 1] * len(block_ids) * self.pool.block_size)
        self.foreign.append(block_ids)

    def release_foreign(self, at: int) -> None:
        block_ids = self.foreign.pop(at)
        num_slots = len(block_ids) * self.pool.block_size
        assert self.device.read(block_ids, num_slots) == [POISON - 1] * num_slots, (
            "nobody else wrote an import's blocks"
        )
        self.pool.release(block_ids, Holder.IMPORT)

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin(self, *, take_events: bool = True, most_prompt_tokens: int | None = None) -> StepPlan:
        assert self.plan is None
        self.num_begun += 1
        assert self.num_begun < _MOST_STEPS, "a test that waits for something waits for ever"
        plan = self.scheduler.schedule(self.now, most_prompt_tokens)
        for seq_id in plan.preempted:
            assert self.records[seq_id].sequence.mode is Mode.GENERATE, "leased sequences are never preempted"
            self.records[seq_id].num_written = None
            self.records[seq_id].decodes = False
        self.device.copy(plan.copies)
        scheduler_checks.check_plan(self, plan)
        self.all_heard = take_events or not plan.sequences
        if self.all_heard:
            self._hear(self.scheduler.take_events())
        if plan.sequences:
            self.plan = plan
        else:
            scheduler_checks.check_stuck(self)
        return plan

    def finish(self) -> list[SequenceEvent]:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        self.device.copy(plan.copies)  # the device may do so late
        scheduler_checks.check_reads(self, plan)  # whatever happened since, what it reads is still there
        sampled = {}
        for part in plan.sequences:
            record = self.records[part.seq_id]
            tokens = self.device.run(part, record.sequence.cache_salt)
            record.num_written = part.start + part.num_tokens
            if tokens:
                sampled[part.seq_id] = tokens
        events = self.scheduler.update(plan, StepResult(sampled), self.now)
        self._hear(events)
        return events

    def crash(self) -> list[SequenceEvent]:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        for part in plan.sequences:
            self.device.spoil(part)
        for copy in plan.copies:
            self.device.write([copy.target], 0, [POISON] * self.pool.block_size)
        events = self.scheduler.fail(plan, StepFailed("the device"), self.now)
        failed = {event.seq_id for event in events if isinstance(event, Failed)}
        assert failed >= {part.seq_id for part in plan.sequences if not self.records[part.seq_id].aborted}
        self._hear(events)
        return events

    def step(self) -> StepPlan:
        plan = self.begin()
        if plan.sequences:
            self.finish()
        return plan

    def run(self, max_steps: int = 2000) -> None:
        """Steps until nothing is left; leases end soon after their prefills."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
            for seq_id in self.leases.keys() - self.scheduler.sequences.keys():
                self.drop_lease(seq_id)
        assert not self.scheduler.has_work, "a sequence starves"

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check()
        leased = sum(len(lease.block_ids) for lease in self.leases.values())
        assert self.pool.references(Holder.LEASE) == leased or not self.all_heard
        assert self.pool.references(Holder.IMPORT) == sum(map(len, self.foreign))
        assert self.pool.ledger().total == self.pool.num_blocks

    def assert_idle(self) -> None:
        self.check()
        self.scheduler.check_idle()
        assert self.pool.ledger().idle

    def _hear(self, events: list[SequenceEvent]) -> None:
        self.all_heard = True
        for event in events:
            record = self.records[event.seq_id]
            assert isinstance(event, Admitted | Preempted | Resumed) or not record.aborted, (
                "an aborted sequence is silent"
            )
            match event:
                case Admitted():
                    self._hear_admitted(record, event)
                case Resumed():
                    record.found.append(event.num_cached)
                case Progress():
                    assert record.progress < event.num_computed <= len(record.given)
                    record.progress = event.num_computed
                case Token():
                    assert event.position == record.sequence.output_base + len(record.output)
                    record.output.append(event.token.token_id)
                    record.decodes = True
                    if record.first is not None and len(record.output) == 1:
                        self._begins(record)
                    record.finish = event.finish
                    assert (event.stop_token_id is not None) == (event.finish is Finish.STOP)
                    if record.sequence.mode is Mode.PREFILL_ONLY and record.first is None:
                        self.leases[event.seq_id].sealed = True
                case Failed():
                    record.error = event.error
                    scheduler_checks.check_failure(self, record)

    def _hear_admitted(self, record: Record, event: Admitted) -> None:
        if record.sequence.mode is not Mode.PREFILL_ONLY:
            return
        self.leases[event.seq_id] = Lease(record, list(event.block_ids))
        cap = self.config.max_leased_blocks
        if cap is not None and len(self.leases) > 1:
            assert self.pool.ledger().leased <= cap
