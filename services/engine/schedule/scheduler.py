"""Chooses what each step runs, and absorbs what it produced (continuous batching with chunked prefill).

Owns: the sequences, their states, and the pool's SEQUENCE references. At the admission of a PREFILL_ONLY sequence it
also takes the LEASE references, which the owner of the lease drops. Never: the device, time, threads, leases. Pure and
not thread-safe: the engine calls it under its lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from services.core.errors import InvalidRequest, Overloaded
from services.core.hashing import num_blocks_for
from services.engine.schedule.batch import Batch, release_blocks, release_reserved
from services.engine.schedule.prefix import index_computed
from services.engine.schedule.queues import Admission, SchedulerConfig, never_fits
from services.engine.schedule.sequence import (
    Admitted,
    BlockCopy,
    Failed,
    Mode,
    Preempted,
    Progress,
    PromptScored,
    Resumed,
    SampledToken,
    ScheduledSequence,
    Sequence,
    SequenceEvent,
    State,
    StepPlan,
    StepResult,
    Token,
)
from services.engine.schedule.step import ending, next_part
from services.kv.pool import BlockPool, Holder

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Schedules one engine's steps, one at a time: call `schedule`, run the plan, then call `update` or `fail` with it.

    An empty plan needs neither. Events of `add` and `schedule` are returned by `take_events`, or first by the next
    `update` or `fail`.
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
        self._aborted: set[int] = set()  # sequences of the running step that leave when it is over
        self._copies: dict[int, BlockCopy] = {}
        """Copies that the next step makes, by the sequence that has the target; references to the sources are held."""
        self._copying: dict[int, BlockCopy] = {}
        """Those of the running step."""
        self._events: list[SequenceEvent] = []

    # -- what comes in ------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. One that can never run fails at once, with a `Failed` event."""
        self._register(sequence)
        self._admission.wait(sequence)
        num_tokens = len(sequence.token_ids)
        if num_tokens >= self.config.max_model_len:
            limit = self.config.max_model_len
            self._fail(sequence, InvalidRequest("token_ids", f"{num_tokens} tokens, must be fewer than {limit}"))
        elif never_fits(self.pool, sequence):
            self._fail(sequence, Overloaded(f"{num_tokens} tokens do not fit the {self.pool.num_blocks} KV blocks"))

    def adopt(
        self,
        sequence: Sequence,
        prefix: Iterable[int],
        block_ids: Iterable[int],
        first_token: int,
        *,
        further: Iterable[tuple[Sequence, int]] = (),
        spare: Iterable[int] = (),
    ) -> None:
        """Queues a sequence whose tokens' KV is in the pool, and gives it the token that was sampled after them.

        Its blocks are `prefix`, which were found in the prefix cache, and then `block_ids`. The SEQUENCE references to
        all of them are taken already, and to those of `spare`, which were set aside for `further`: sequences of the
        same tokens, each with its own first token, that go on from the same blocks.
        """
        assert sequence.mode is Mode.GENERATE, "a lease is not adopted twice"
        assert not sequence.block_ids, "it was adopted already"
        sequence.block_ids = list(prefix)
        sequence.num_cached = len(sequence.block_ids) * self.pool.block_size
        sequence.block_ids += block_ids
        sequence.num_computed = len(sequence.token_ids)
        sequence.token_ids.append(first_token)
        sequence.decoding = True
        assert len(sequence.block_ids) * self.pool.block_size >= sequence.num_computed, "blocks cover what is computed"
        to_write = sequence.block_ids[sequence.num_computed // self.pool.block_size :]
        assert all(self.pool.references(Holder.SEQUENCE, block_id) == 1 for block_id in to_write), "and are its own"
        index_computed(self.pool, sequence, 0)
        sequence.reserved_ids = list(spare)
        self._register(sequence)
        self._admission.adopted.append(sequence)
        going_on = []
        for each, token_id in further:
            each.token_ids.append(token_id)
            going_on.append(each)
        self._fork(sequence, going_on, sequence.arrival_s)

    def abort(self, seq_id: int) -> bool:
        """Ends a sequence without an event; returns False if it is unknown (never added, or over).

        A sequence that a step runs now keeps its SEQUENCE references until `update` or `fail`, since the step still
        writes its blocks. LEASE references stay, and so does an `Admitted` event that is not yet taken: the owner of
        the lease must learn of these references to drop them. (A `Preempted` event not yet taken stays too.)
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

    def schedule(self, now: float, most_prompt_tokens: int | None = None) -> StepPlan:
        """Returns the next step: decodes first, then unfinished prefills and recomputes in order of admission, then
        newly admitted sequences. `now` is in seconds. `most_prompt_tokens` bounds the tokens of
        sequences that do not decode yet, all together; None for no bound but the step's."""
        assert not self._in_flight, "the last step is not absorbed"
        preempted = self._fill_batch(now)
        chosen: list[tuple[Sequence, int]] = []
        budget, to_score = self.config.max_num_batched_tokens, self.config.max_scored_tokens
        to_prefill = budget if most_prompt_tokens is None else most_prompt_tokens
        prefills = [sequence for sequence in self._batch if not sequence.decoding]
        for sequence in chain(self.decoding, prefills, self._admissions(now)):
            num_tokens = min(budget, sequence.num_uncomputed)
            if not sequence.decoding:
                num_tokens = min(num_tokens, to_prefill)
            if not sequence.is_scored:
                num_tokens = min(num_tokens, to_score)
                to_score -= num_tokens
                if not num_tokens:
                    continue  # one before it is scored first, and goes on
            chosen.append((sequence, num_tokens))
            budget -= num_tokens
            to_prefill -= 0 if sequence.decoding else num_tokens
            if not budget or not to_prefill:
                break  # before the next sequence is admitted: it would hold blocks without running
        parts = tuple(next_part(sequence, num_tokens, self.pool.block_size) for sequence, num_tokens in chosen)
        # Whoever has a copy to come has a place in the batch, or others fill it: so there is a step to make it.
        assert parts or not self._copies, "copies without a step"
        self._copying, self._copies = self._copies, {}
        self._in_flight = frozenset(part.seq_id for part in parts) | self._copying.keys()
        if parts:
            self._step_number += 1
        return StepPlan(self._step_number, parts, preempted, tuple(self._copying.values()))

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[SequenceEvent]:
        """Absorbs a step that completed, so that its KV is final: appends tokens, indexes blocks, ends sequences and
        frees their blocks. Returns the events. A sequence for which nothing could be sampled ends with its error."""
        ended, copied = self._end_step(plan)
        for part, sequence, aborted in ended:
            if (error := result.failed.get(part.seq_id)) is not None and not aborted:
                self._fail(sequence, error)
                continue
            sampled = () if aborted or not part.rows else result.sampled[part.seq_id]
            num_indexed_tokens = sequence.num_computed
            sequence.num_computed += part.num_tokens
            index_computed(self.pool, sequence, num_indexed_tokens)
            if part.scoring is not None and not aborted:
                sequence.num_scored += len(part.scoring.token_ids)
                scored = result.scored[part.seq_id]
                self._events.append(PromptScored(part.seq_id, part.scoring.position, scored))
            if sequence.mode is Mode.PREFILL_ONLY and not aborted:
                self._events.append(Progress(sequence.seq_id, sequence.num_computed, now))
            token = self._append(sequence, sampled[0], now) if sampled else None
            if sequence.further and token:
                self._begin_further(sequence, sampled[1:], now)
            if aborted or (token and (token.finish or sequence.mode is Mode.PREFILL_ONLY)):
                self._leave(sequence)
        for sequence, aborted in copied:
            if aborted:
                self._leave(sequence)
        return self.take_events()

    def fail(self, plan: StepPlan, error: Exception, now: float) -> list[SequenceEvent]:
        """Absorbs a step that raised: what it wrote is unknown, so nothing is indexed and its sequences end. Returns
        the events."""
        ended, copied = self._end_step(plan)
        for sequence, aborted in [*((sequence, aborted) for _, sequence, aborted in ended), *copied]:
            if aborted:
                self._leave(sequence)
            else:
                self._fail(sequence, error)
        return self.take_events()

    def take_events(self) -> list[SequenceEvent]:
        """Returns the events that were not yet returned, in order."""
        events, self._events = self._events, []
        return events

    # -- what shows ---------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        """Returns how many sequences wait to join the batch: adopted, preempted and new ones."""
        return len(self._admission)

    @property
    def num_preempted(self) -> int:
        """Returns how many preempted sequences wait to run again. While there are any, imports should not take blocks
        either."""
        return len(self._admission.preempted)

    @property
    def num_wanted_blocks(self) -> int:
        """Returns how many blocks the sequences take that have none yet, the prefix cache left aside."""
        waiting = chain(self._admission.preempted, self._admission.waiting)
        return sum(num_blocks_for(len(sequence.token_ids), self.pool.block_size) for sequence in waiting)

    @property
    def queued_prefill_tokens(self) -> int:
        """Returns how many tokens must be computed before their sequences decode, including running prefills. Of what
        was aborted it is at most a step, which may be under way."""
        most_aborted = self.config.max_num_batched_tokens
        prefills = (
            min(sequence.num_uncomputed, most_aborted) if sequence.seq_id in self._aborted else sequence.num_uncomputed
            for sequence in self._batch
            if not sequence.decoding
        )
        queued = chain(self._admission.preempted, self._admission.waiting)
        return sum(prefills) + sum(len(sequence.token_ids) for sequence in queued)

    @property
    def decoding(self) -> list[Sequence]:
        """Returns the running sequences that decode, in order of admission."""
        return [sequence for sequence in self._batch if sequence.decoding]

    @property
    def has_work(self) -> bool:
        """Returns whether there are sequences or events. If there are and the plan is empty, they wait for blocks that
        others hold."""
        return bool(self.sequences or self._events)

    def check(self) -> None:
        """Raises AssertionError unless queues, batch, states and references agree. Takes O(blocks + references)."""
        self.pool.check()
        self._admission.check()
        self._batch.check()
        placed = [*self._batch, *self._admission]
        assert {sequence.seq_id for sequence in placed} == self.sequences.keys(), "each sequence has a place"
        assert len(placed) == len(self.sequences), "and only one"
        in_step = self._in_flight - self._copying.keys()
        assert all(seq_id in self._batch for seq_id in in_step), "what is in a step runs"
        assert self._aborted <= self._in_flight, "only a step delays an abort"
        for sequence in placed:
            covered = len(sequence.block_ids) * self.pool.block_size
            assert sequence.num_computed <= min(covered, len(sequence.token_ids)), f"blocks of {sequence.seq_id}"
            assert not sequence.decoding or sequence.num_uncomputed == 1, f"{sequence.seq_id} decodes"
        copies = {**self._copies, **self._copying}
        assert copies.keys() <= self.sequences.keys(), "a copy is for a sequence"
        assert all(copy.target in self.sequences[seq_id].block_ids for seq_id, copy in copies.items()), "and its own"
        held = Counter(block_id for each in placed for block_id in (*each.block_ids, *each.reserved_ids))
        held.update(copy.source for copy in copies.values())
        for block_id in range(self.pool.num_blocks):
            assert self.pool.references(Holder.SEQUENCE, block_id) == held[block_id], f"references on block {block_id}"

    def check_idle(self) -> None:
        """Raises AssertionError as `check` does, and if a sequence or an event is left."""
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
        """Lets adopted sequences join the batch, and gives decodes the blocks they need.

        Returns the ids of the sequences preempted for that.
        It runs before any part of the step is planned, so that no preempted sequence is in the plan. It repeats when a
        preemption made room for an adopted sequence, which holds blocks: if it waited while nothing else can run, no
        step would ever free them.
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
        """Gives decodes the blocks they lack; returns the ids of the sequences preempted for that. A sequence that has
        outgrown the whole pool fails."""
        short = self._batch.short_of_blocks()
        for sequence in short:
            if never_fits(self.pool, sequence):
                self._fail(sequence, Overloaded(f"grew beyond the {self.pool.num_blocks} KV blocks"))
        victims: list[Sequence] = []
        for sequence in short:
            if sequence.state is State.RUNNING:  # neither failed nor preempted
                victims += self._batch.grow(sequence)
        for victim in victims:
            self._wait_again(victim, now)
        return [victim.seq_id for victim in victims]

    def _wait_again(self, victim: Sequence, now: float) -> None:
        self._drop_copy(victim)
        self._admission.wait_again(victim)
        self._events.append(Preempted(victim.seq_id, now))
        self.num_preemptions += 1

    def _begin_further(self, sequence: Sequence, sampled: Iterable[SampledToken], now: float) -> None:
        """Gives the further sequences their first tokens, and lets those that do not end with it go on."""
        further, sequence.further = sequence.further, []
        going_on = []
        for each, token in zip(further, sampled, strict=True):
            finish, stop_token_id = ending(each, token.token_id, self.config.max_model_len)
            self._events.append(Token(each.seq_id, each.next_position, token, finish, stop_token_id, now))
            each.token_ids.append(token.token_id)
            if finish is None and each.mode is Mode.GENERATE:
                going_on.append(each)
        self._fork(sequence, going_on, now)

    def _fork(self, source: Sequence, further: Iterable[Sequence], now: float) -> None:
        """Lets sequences, each of which has its first token, go on from the KV of the same tokens before it.

        They share the full blocks, which nobody writes. The last block, if it is not full, the next step copies for
        each of them, before it computes: so no block is written that another sequence reads. Whoever finds no block for
        that is preempted at once.
        """
        release_reserved(self.pool, source)
        num_full, num_left = divmod(source.num_computed, self.pool.block_size)
        shared, last = source.block_ids[:num_full], source.block_ids[num_full:][: num_left > 0]
        for sequence in further:
            self._register(sequence)
            sequence.admitted_s, sequence.num_cached = source.admitted_s, source.num_cached
            sequence.hashes = source.hashes[:num_full]
            if len(last) > self.pool.num_available:
                sequence.state = State.PREEMPTED
                self._wait_again(sequence, now)
                continue
            self.pool.acquire([*shared, *last], Holder.SEQUENCE)
            sequence.block_ids = shared + self.pool.allocate(len(last), Holder.SEQUENCE)
            if last:
                self._copies[sequence.seq_id] = BlockCopy(last[0], sequence.block_ids[-1])
            sequence.num_computed = source.num_computed
            sequence.decoding = True
            self._admission.adopted.append(sequence)

    def _drop_copy(self, sequence: Sequence) -> None:
        """Forgets the copy that the next step would make for the sequence, if any."""
        if (copy := self._copies.pop(sequence.seq_id, None)) is not None:
            self.pool.release([copy.source], Holder.SEQUENCE)

    def _admissions(self, now: float) -> Iterator[Sequence]:
        """Admits and yields one sequence after the other, while there is room."""
        while not self._batch.full and (found := self._admission.take_next(now)):
            sequence, room = found
            comes_back = sequence.state is State.PREEMPTED
            self._batch.enter(sequence, room)
            if not comes_back:
                self._admitted(sequence, now)
            elif sequence.num_computed:
                self._events.append(Resumed(sequence.seq_id, sequence.num_computed))
            yield sequence

    def _admitted(self, sequence: Sequence, now: float) -> None:
        sequence.admitted_s = now
        sequence.num_cached = sequence.num_computed
        self.prefix_tokens_queried += len(sequence.token_ids)
        self.prefix_tokens_hit += sequence.num_cached
        if sequence.mode is Mode.PREFILL_ONLY:
            self.pool.acquire(sequence.block_ids, Holder.LEASE)
        self._events.append(Admitted(sequence.seq_id, tuple(sequence.block_ids), sequence.num_cached, now))

    def _end_step(
        self, plan: StepPlan
    ) -> tuple[list[tuple[ScheduledSequence, Sequence, bool]], list[tuple[Sequence, bool]]]:
        """Marks the step as over; returns its parts with their sequences, and whether each was aborted meanwhile, and
        the sequences for which the step has only copied a block."""
        parts = {part.seq_id for part in plan.sequences}
        assert parts | self._copying.keys() == self._in_flight, "not the plan in flight"
        ended = [(part, self.sequences[part.seq_id], part.seq_id in self._aborted) for part in plan.sequences]
        copied = [(self.sequences[each], each in self._aborted) for each in self._copying if each not in parts]
        self.pool.release([copy.source for copy in self._copying.values()], Holder.SEQUENCE)
        self._copying = {}
        self._in_flight = frozenset()
        self._aborted.clear()
        return ended, copied

    def _append(self, sequence: Sequence, sampled: SampledToken, now: float) -> Token:
        """Appends a token to the sequence, and adds its event, which is returned."""
        finish, stop_token_id = ending(sequence, sampled.token_id, self.config.max_model_len)
        token = Token(sequence.seq_id, sequence.next_position, sampled, finish, stop_token_id, now)
        sequence.token_ids.append(sampled.token_id)
        sequence.decoding = True
        self._events.append(token)
        return token

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._leave(sequence)
        self._events.append(Failed(sequence.seq_id, error))

    def _leave(self, sequence: Sequence) -> None:
        self._drop_copy(sequence)
        del self.sequences[sequence.seq_id]
        if sequence.seq_id in self._batch:
            self._batch.leave(sequence)
        else:
            self._admission.remove(sequence)
            release_blocks(self.pool, sequence)  # an adopted sequence has some
        sequence.state = State.FINISHED
