"""Provides the second `WorkerEngine`: no model, no scheduler, no torch. Its tokens follow from the prompt alone.

It imports nothing of the engine but what the protocol names, so that it shows what an engine must do for its workers.
It has no prefix cache, preempts nothing, and serves in order of arrival.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from pathlib import Path

from services.core.clock import MonotonicClock
from services.core.errors import Overloaded
from services.core.hashing import BlockHash, num_blocks_for
from services.engine.config import EngineConfig, EngineInfo, EngineStats, StepReport
from services.engine.schedule.sequence import (
    Admitted,
    Failed,
    Finish,
    Mode,
    Progress,
    PromptScored,
    SampledToken,
    ScoredToken,
    Sequence,
    SequenceEvent,
    Token,
)
from services.engine.step_tally import StepTally
from services.engine.worker_engine import BlockReservation, OnStep
from services.kv.handoff_admission import EngineRoom
from services.kv.index_log import IndexChanges
from services.kv.pool import BlockPool, CachedBlock, Holder, OutOfBlocks
from services.kv.prefix_blocks import PrefixReservation
from tests.support.scripted_memory import ScriptedMemory, next_token


class ScriptedEngine:
    """Implements `WorkerEngine`: every step computes a chunk, or a token, of each sequence that has its blocks."""

    def __init__(self, config: EngineConfig) -> None:
        facts = json.loads((Path(config.model_path) / "config.json").read_text())
        num_blocks, context = config.num_blocks or 64, config.max_model_len or facts["max_position_embeddings"]
        self.info = EngineInfo(
            model_id=config.model_id,
            weights_digest="scripted",
            config_digest="scripted",
            numerics="scripted",
            dtype="float32",  # a key and a value of one element each: the 8 bytes of a slot
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_model_len=context,
            vocab_size=facts["vocab_size"],
            eos_token_ids=(),
            device="cpu",
            has_masks=False,
        )
        self.cache = ScriptedMemory(num_blocks, config.block_size)
        self.tally = StepTally()
        self.consecutive_step_failures = 0
        self.may_finish = threading.Event()
        """Steps begin, but do not end while it is unset."""
        self.may_finish.set()
        self._config = config
        self._pool = BlockPool(num_blocks, config.block_size)
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self.in_step: set[int] = set()
        """Sequences of the step that runs."""
        self._aborted: set[int] = set()
        self._clock = MonotonicClock()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self, on_step: OnStep) -> None:
        self._thread = threading.Thread(target=self._loop, args=(on_step,), name="scripted-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self.may_finish.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        for seq_id in [*self._waiting, *self._running]:
            self.abort(seq_id)

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join()

    def close(self) -> None:
        self.cache.close()

    # -- sequences ----------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        with self._lock:
            self._waiting[sequence.seq_id] = sequence
        self._wake.set()

    def abort(self, seq_id: int) -> None:
        with self._lock:
            if self._waiting.pop(seq_id, None) is None and seq_id in self._running:
                if seq_id in self.in_step:
                    self._aborted.add(seq_id)
                else:
                    self._leave(self._running[seq_id])
        self._wake.set()

    def prefix_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Returns none: there is no prefix cache."""
        return []

    def num_cached(self, hashes: Many[BlockHash]) -> int:
        return 0

    def lend(self, hashes: Many[BlockHash]) -> list[int]:
        return []

    def reserve_prefix(self, hashes: Many[BlockHash], check: Callable[[int, EngineRoom], None]) -> PrefixReservation:
        raise OutOfBlocks("there is no prefix cache")

    def keep_prefix(self, reservation: PrefixReservation, hashes: Many[BlockHash]) -> None:
        raise AssertionError("nothing was reserved")

    def take_uncopied(self, most: int) -> list[CachedBlock]:
        return []

    def unchanged(self, blocks: Many[CachedBlock]) -> list[bool]:
        return [False for _ in blocks]

    def index_changes(self, after: int | None) -> IndexChanges | None:
        return IndexChanges(0, True, (), ()) if after is None else None

    def was_admitted(self, sequence: Sequence) -> bool:
        return sequence.admitted_s is not None

    def hash_prompt(self, sequence: Sequence) -> None:
        """Nothing is found in a prefix cache, since there is none."""

    def reserve(
        self, sequence: Sequence, check: Callable[[int, EngineRoom], None], num_further: int = 0
    ) -> BlockReservation:
        """Sets nothing aside for further answers: each waits for blocks of its own."""
        with self._lock:
            num_sequences, num_blocks = len(self._running) + len(self._waiting), self._num_blocks(sequence)
            available, most = self._pool.num_available, self._config.max_num_seqs
            check(num_blocks, EngineRoom(available, self._pool.num_blocks, num_sequences, most, num_preempted=0))
            return BlockReservation([], self._pool.allocate(num_blocks, Holder.IMPORT))

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
        with self._lock:
            fresh = list(block_ids)
            self._pool.transfer(fresh, holder, Holder.SEQUENCE)
            sequence.block_ids = [*prefix, *fresh]
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(first_token)
            self._running[sequence.seq_id] = sequence
            self._pool.release(list(spare), holder)
            self._begin_further(further)
        self._wake.set()

    def release(self, block_ids: Iterable[int], holder: Holder) -> None:
        with self._lock:
            self._pool.release(list(block_ids), holder)
        self._wake.set()

    # -- what shows ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                queued_prefill_tokens=sum(len(sequence.token_ids) for sequence in self._waiting.values()),
                ledger=self._pool.ledger(),
                num_preemptions=0,
                prefix_tokens_queried=0,
                prefix_tokens_hit=0,
                ms_per_prefill_token=0.1,
                ms_per_decode_step=1.0,
                ms_per_decode_sequence=0.1,
                ms_per_further_prefill_token=0.1,
                tokens_per_prefill_step=16.0,
                prefill_step=self.tally.prefill_step,
                decode_step=self.tally.decode_step,
                current_step_ms=0.0,
                num_steps=self.tally.num_steps,
                num_tokens=self.tally.num_tokens,
                consecutive_step_failures=0,
            )

    def device_memory(self) -> dict[str, int]:
        return {}

    def check_idle(self) -> None:
        with self._lock:
            assert not self._waiting, "sequences wait"
            assert not self._running, "sequences run"
            assert not self._aborted, "an abort is left"
            self._pool.check()
            assert self._pool.ledger().idle, self._pool.ledger()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _loop(self, on_step: OnStep) -> None:
        while not self._stopping:
            self._wake.clear()
            if not self._step(on_step):
                self._wake.wait()

    def _step(self, on_step: OnStep) -> bool:
        started_s = self._clock.now()
        with self._lock:
            admissions = [event for sequence in list(self._waiting.values()) for event in self._admit(sequence)]
            batch = list(self._running.values())
            self.in_step = set(self._running)
        if admissions:
            on_step(StepReport(tuple(admissions), 0, 0, 0, started_s, started_s))
        if not batch:
            return False
        self.may_finish.wait()
        with self._lock:
            num_computed = sum(sequence.num_computed for sequence in batch)
            events = [event for sequence in batch for event in self._advance(sequence)]
            num_tokens = sum(sequence.num_computed for sequence in batch) - num_computed
            self.in_step = set()
        self.tally.num_steps += 1
        num_steps, ended_s = self.tally.num_steps, self._clock.now()
        on_step(StepReport(tuple(events), num_steps, num_tokens, len(batch), started_s, ended_s))
        return True

    def _admit(self, sequence: Sequence) -> Iterator[SequenceEvent]:
        num_blocks = self._num_blocks(sequence)
        if len(self._running) >= self._config.max_num_seqs or num_blocks > self._pool.num_available:
            return
        del self._waiting[sequence.seq_id]
        self._running[sequence.seq_id] = sequence
        sequence.block_ids = self._pool.allocate(num_blocks, Holder.SEQUENCE)
        sequence.admitted_s = self._clock.now()
        if sequence.mode is Mode.PREFILL_ONLY:
            self._pool.acquire(sequence.block_ids, Holder.LEASE)
        if not sequence.num_new_tokens:  # a further answer is no news: its prompt was computed with the first one's
            yield Admitted(sequence.seq_id, tuple(sequence.block_ids), 0, sequence.admitted_s)

    def _advance(self, sequence: Sequence) -> Iterator[SequenceEvent]:
        seq_id, start = sequence.seq_id, sequence.num_computed
        if seq_id in self._aborted:
            self._leave(sequence)
            return
        end = min(len(sequence.token_ids), start + self._config.max_num_batched_tokens)
        try:
            num_missing = num_blocks_for(end, self.info.block_size) - len(sequence.block_ids)
            sequence.block_ids += self._pool.allocate(max(0, num_missing), Holder.SEQUENCE)
        except OutOfBlocks as error:
            self._leave(sequence)
            yield Failed(seq_id, Overloaded(str(error)))
            return
        self.cache.put(sequence.block_ids, start, sequence.token_ids[start:end])
        sequence.num_computed = end
        if not sequence.is_scored:
            yield from self._score(sequence, min(end + 1, sequence.num_prompt_tokens - sequence.output_base))
        if sequence.mode is Mode.PREFILL_ONLY:
            yield Progress(seq_id, end, self._clock.now())
        if end == len(sequence.token_ids):
            token_id = next_token(self.cache.get(sequence.block_ids, end), self.info.vocab_size)
            finish, stop_token_id = self._ending(sequence, token_id)
            position = sequence.next_position
            yield Token(seq_id, position, SampledToken(token_id), finish, stop_token_id, self._clock.now())
            sequence.token_ids.append(token_id)
            for each in sequence.further:  # all say the same: there is no noise
                yield Token(each.seq_id, position, SampledToken(token_id), finish, stop_token_id, self._clock.now())
            if not finish and sequence.mode is Mode.GENERATE:
                self._begin_further((each, token_id) for each in sequence.further)
            sequence.further = []
            if finish or sequence.mode is Mode.PREFILL_ONLY:
                self._leave(sequence)

    def _score(self, sequence: Sequence, end: int) -> Iterator[SequenceEvent]:
        """Reports what stands for log-probabilities of the prompt's tokens before `end`."""
        position, token_ids = sequence.num_scored, sequence.token_ids[sequence.num_scored : end]
        sequence.num_scored += len(token_ids)
        if token_ids:
            scored = tuple(ScoredToken(-1.0 - token_id, rank=1) for token_id in token_ids)
            yield PromptScored(sequence.seq_id, position, scored)

    def _begin_further(self, further: Iterable[tuple[Sequence, int]]) -> None:
        """Lets answers go on by themselves: they compute the prompt again, in blocks of their own."""
        for sequence, token_id in further:
            sequence.token_ids.append(token_id)
            self._waiting[sequence.seq_id] = sequence

    def _ending(self, sequence: Sequence, token_id: int) -> tuple[Finish | None, int | None]:
        position, stopping = sequence.next_position, sequence.stopping
        if token_id in stopping.stop_token_ids and position >= stopping.min_tokens:
            return Finish.STOP, token_id
        full = sequence.mode is Mode.GENERATE and len(sequence.token_ids) + 1 >= self.info.max_model_len
        return (Finish.LENGTH if full or position + 1 >= stopping.max_tokens else None), None

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence.seq_id]
        self._aborted.discard(sequence.seq_id)
        self._pool.release(sequence.block_ids, Holder.SEQUENCE)

    def _num_blocks(self, sequence: Sequence) -> int:
        return num_blocks_for(len(sequence.token_ids), self.info.block_size)
