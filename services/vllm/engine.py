"""Has vLLM compute for a worker: a `WorkerEngine` whose steps run in vLLM's processes.

The pool's blocks are slots of host memory, from and to which KV is handed over; vLLM's own blocks are copied to them
and from them, and never wait for anybody. A slot also stands for room in vLLM: a sequence is passed on only when there
are blocks for all that it may say, so vLLM rarely takes any away; if it does, the sequence fails and is replayed.
What the slots keep of earlier prompts is the prefix cache that others may borrow from, and vLLM's own comes on top.
Owns: which sequence is in vLLM, and which blocks it holds there: from its admission until every rank has said that no
step touches them any more. Never: the processes (`process`), or what runs in them (`inside`).
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.core.clock import Clock, MonotonicClock
from services.core.errors import InvalidRequest, Overloaded, SequencePreempted, StepFailed, UnsupportedModel
from services.core.hashing import BlockHash, num_blocks_for
from services.core.start_progress import StartProgress, TellProgress, tell_nobody
from services.engine.config import EngineConfig, EngineInfo, EngineStats, StepReport
from services.engine.cpu.openmp import cores_are_own
from services.engine.schedule.prefix import cacheable_prefix, hash_prompt
from services.engine.schedule.queues import never_fits
from services.engine.schedule.sequence import (
    Admitted,
    Failed,
    Mode,
    Preempted,
    Progress,
    SampledToken,
    SamplingParams,
    Sequence,
    SequenceEvent,
    Token,
)
from services.engine.schedule.step import ending
from services.engine.worker_engine import BlockReservation, OnStep
from services.kv.handoff_admission import EngineRoom
from services.kv.pool import Holder, OutOfBlocks
from services.kv.pool_face import PoolFace
from services.vllm import messages
from services.vllm.arguments import core_environment, engine_arguments, engine_environment, num_ranks_of, warm_lengths
from services.vllm.identity import identity_of
from services.vllm.messages import JsonMessage
from services.vllm.process import EngineProcess, Received, VllmProcess
from services.vllm.start import VllmStart


def vllm_engine(
    config: EngineConfig, python: Path, engine_args: Mapping[str, str], tell: TellProgress = tell_nobody
) -> VllmEngine:
    """Returns an engine whose vLLM has loaded the model, and which is not started. `python` is the interpreter of
    vLLM's environment, `engine_args` are further arguments of vLLM, and `tell` hears of the start.

    Raises ConfigError for an argument that a worker does not take, and UnsupportedModel if vLLM cannot start.
    """
    asked = engine_arguments(config, engine_args)
    cores, num_ranks = sorted(os.sched_getaffinity(0)), num_ranks_of(asked)
    environment = engine_environment(os.environ, config, cores, num_ranks)
    arguments = {
        "engine": asked,
        "warm_up": warm_lengths(config),
        "core_environment": core_environment(config, cores, num_ranks, own_cores=cores_are_own(os.environ)),
    }
    tell(StartProgress("load", "vLLM", 0, 2))
    vllm = VllmStart(lambda: EngineProcess(python, arguments, environment))
    tell(StartProgress("load", "weights", 1, 2))
    try:
        vllm.wait()
        return VllmEngine(config, vllm)
    except BaseException:
        vllm.end()
        raise


@dataclass(eq=False)
class _Run:
    """Is a sequence that vLLM has."""

    sequence: Sequence
    block_ids: list[int]
    """One for each block that the sequence may come to have, in token order."""
    num_imported: int
    """Tokens at the start whose KV vLLM loads from their slots."""
    num_exported: int
    """Tokens of the prompt whose KV vLLM copies to their slots."""
    saved: dict[int, int] = field(default_factory=dict)
    """Tokens that are in the slots, by rank."""
    num_final: int = 0
    """Tokens that every rank has in the slots."""
    gone: set[int] = field(default_factory=set)
    """Ranks no step of which touches the slots any more."""
    said: dict[int, Many[Any]] = field(default_factory=dict)
    """What the sampler has told beside a token, by position."""
    untold: deque[int] = field(default_factory=deque)
    """Tokens that wait for what the sampler tells beside them."""
    is_over: bool = False
    """Whether no event of it comes any more."""

    @property
    def will_be_leased(self) -> bool:
        """Says whether a lease gets its blocks when vLLM begins with it."""
        sequence = self.sequence
        return sequence.mode is Mode.PREFILL_ONLY and sequence.admitted_s is None and not self.is_over

    @property
    def needs_more(self) -> bool:
        """Says whether the sampler tells more of each token than vLLM can."""
        return self.sequence.sampling.num_logprobs is not None or bool(self.sequence.further)


class VllmEngine(PoolFace):
    """Implements `WorkerEngine`. Its thread is the one that reads what vLLM's processes tell."""

    def __init__(self, config: EngineConfig, vllm: VllmStart, clock: Clock | None = None) -> None:
        assert vllm.memory is not None
        assert vllm.front is not None
        memory, facts = vllm.memory, vllm.facts
        super().__init__(memory.num_blocks, facts["block_size"], threading.Lock())  # the lock guards all below
        self.info: EngineInfo = identity_of(config, facts, vllm.caches, memory)
        self.cache = memory
        self.tally = vllm.tally
        self.consecutive_step_failures = 0
        self._vllm = vllm
        self._process = vllm.process
        self._front = vllm.front
        self._ranks = frozenset(vllm.ranks)
        self._config = config
        self._waiting: dict[int, Sequence] = {}
        self._runs: dict[int, _Run] = {}
        self._figures: JsonMessage = {"usage": 0.0, "queried": 0, "hit": 0, "preempted": 0}
        self._report: OnStep | None = None
        self._clock = clock or MonotonicClock()
        self._told_s = 0.0
        """When vLLM last told of a step that began, or of what one brought; or when it got something to do."""
        self._max_leased = memory.num_blocks // 2 if config.limit_leased_blocks else memory.num_blocks

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._report is not None and not self._vllm.is_over.is_set()

    @property
    def why_over(self) -> str:
        """Says why vLLM has ended; "" while it has not, and after `stop`."""
        return self._vllm.why_over

    @property
    def usage(self) -> float:
        """Returns the share of vLLM's own blocks that sequences hold, as it last said."""
        return float(self._figures["usage"])

    def start(self, on_step: OnStep) -> None:
        assert self._report is None, "an engine starts once"
        self._report = on_step
        self._vllm.absorb = self._absorb
        self._process.wake()

    def stop(self) -> None:
        self._vllm.end()
        with self._lock:
            self._waiting.clear()
            for run in self._runs.values():
                if run.gone != self._ranks:
                    self._pool.release(run.block_ids, Holder.SEQUENCE)
            self._runs.clear()

    def join(self) -> None:
        self._vllm.is_over.wait()

    def close(self) -> None:
        self.cache.close()

    # -- from any thread -----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        with self._lock:
            self._waiting[sequence.seq_id] = sequence
        self._process.wake()

    def abort(self, seq_id: int) -> None:
        with self._lock:
            self._waiting.pop(seq_id, None)
            if (run := self._runs.get(seq_id)) is not None and not run.is_over:
                self._end(run)
        self._process.wake()  # those that waited behind it may fit

    def was_admitted(self, sequence: Sequence) -> bool:
        return sequence.admitted_s is not None

    def hash_prompt(self, sequence: Sequence) -> None:
        hash_prompt(sequence, self.info.block_size)

    def prefix_hashes(self, sequence: Sequence) -> list[BlockHash]:
        return cacheable_prefix(sequence, self.info.block_size)

    def reserve(
        self, sequence: Sequence, check: Callable[[int, EngineRoom], None], num_further: int = 0
    ) -> BlockReservation:
        """Sets blocks aside for the sequence's tokens and, as `spare`, for all that it may say. Further answers wait
        for blocks of their own."""
        hashes = cacheable_prefix(sequence, self.info.block_size)
        with self._lock:
            pool = self._pool
            prefix = pool.match_prefix(hashes)
            pool.acquire(prefix, Holder.SEQUENCE)
            num_fresh = num_blocks_for(len(sequence.token_ids), pool.block_size) - len(prefix)
            num_spare = self._num_needed(sequence) - len(prefix) - num_fresh
            try:
                check(num_fresh + num_spare, self._room())
                fresh = pool.allocate(num_fresh + num_spare, Holder.IMPORT)
                return BlockReservation(prefix, fresh[:num_fresh], fresh[num_fresh:])
            except BaseException:
                pool.release(prefix, Holder.SEQUENCE)
                raise

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
        block_ids, spare = list(block_ids), list(spare)
        hash_prompt(sequence, self.info.block_size)
        with self._lock:
            self._pool.transfer([*block_ids, *spare], holder, Holder.SEQUENCE)
            num_tokens = len(sequence.token_ids)
            run = _Run(sequence, [*prefix, *block_ids, *spare], num_imported=num_tokens, num_exported=0)
            self._index(run, num_tokens)
            sequence.token_ids.append(first_token)
            num_grown = max(0, self._num_needed(sequence) - len(run.block_ids))
            if num_grown <= self._pool.num_available:
                # An adopted lease of this worker's own comes without blocks to grow into.
                run.block_ids += self._pool.allocate(num_grown, Holder.SEQUENCE)
                self._begin(run)
            else:  # it waits for them as its further ones do, and holds none meanwhile
                self._pool.release(run.block_ids, Holder.SEQUENCE)
                self._waiting[sequence.seq_id] = sequence
            for each, token_id in further:
                # Who waits computes the rest of the prompt again: its full blocks are in the prefix cache.
                each.token_ids.append(token_id)
                self._waiting[each.seq_id] = each
        self._process.wake()

    # -- what shows ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        model, tally = self._vllm.costs, self.tally
        costs = model.at(self._clock.now())
        with self._lock:
            return EngineStats(
                num_running=sum(not run.is_over for run in self._runs.values()),
                num_waiting=len(self._waiting),
                queued_prefill_tokens=sum(len(each.token_ids) for each in self._waiting.values()),
                ledger=self._pool.ledger(),
                num_preemptions=self._figures["preempted"],
                prefix_tokens_queried=self._figures["queried"],
                prefix_tokens_hit=self._figures["hit"],
                ms_per_prefill_token=costs.ms_per_prefill_token,
                ms_per_further_prefill_token=costs.ms_per_further_prefill_token,
                ms_per_decode_step=costs.ms_per_decode_step,
                ms_per_decode_sequence=costs.ms_per_decode_sequence,
                tokens_per_prefill_step=costs.tokens_per_prefill_step,
                prefill_step=tally.prefill_step,
                decode_step=tally.decode_step,
                # Of those that are over too: a step that stands still keeps their slots, for which others may wait.
                current_step_ms=(self._clock.now() - self._told_s) * 1e3 if self._runs else 0.0,
                num_steps=tally.num_steps,
                num_tokens=tally.num_tokens,
                consecutive_step_failures=0,
            )

    def device_memory(self) -> dict[str, int]:
        return {}

    def check_idle(self) -> None:
        """Raises AssertionError unless no sequence is left, nothing holds a block, and all counts agree."""
        with self._lock:
            assert not self._waiting, f"sequences wait: {sorted(self._waiting)}"
            assert not self._runs, f"sequences run: {sorted(self._runs)}"
            self._pool.check()
            assert self._pool.ledger().idle, self._pool.ledger()

    # -- with the lock -------------------------------------------------------------------------------------------------

    def _room(self) -> EngineRoom:
        pool = self._pool
        return EngineRoom(
            num_available=pool.num_available,
            num_blocks=pool.num_blocks,
            num_sequences=len(self._runs) + len(self._waiting),
            max_num_seqs=self._config.max_num_seqs,
            num_preempted=0,
            num_wanted=sum(self._num_needed(each) for each in self._waiting.values()),
        )

    def _blocks_freed(self) -> None:
        self._process.wake()

    def _most_tokens(self, sequence: Sequence) -> int:
        """Returns how many tokens the sequence may yet say here."""
        if sequence.mode is Mode.PREFILL_ONLY:
            return 1
        room = self.info.max_model_len - len(sequence.token_ids)
        return max(1, min(sequence.stopping.max_tokens - sequence.next_position, room))

    def _num_needed(self, sequence: Sequence) -> int:
        """Returns the blocks of all that the sequence may come to have here."""
        num_tokens = len(sequence.token_ids)
        if sequence.mode is Mode.GENERATE:
            num_tokens += self._most_tokens(sequence)
        return min(num_blocks_for(num_tokens, self.info.block_size), self._pool.num_blocks)

    def _begin(self, run: _Run) -> None:
        """Passes a sequence on to vLLM."""
        sequence = run.sequence
        if not self._runs:
            self._told_s = self._clock.now()
        self._runs[sequence.seq_id] = run
        num_prompt_blocks = num_blocks_for(max(run.num_imported, run.num_exported), self.info.block_size)
        self._process.send(
            self._front,
            {
                "kind": messages.ADD,
                "id": sequence.seq_id,
                "tokens": sequence.token_ids,
                "salt": sequence.cache_salt,
                "max_tokens": self._most_tokens(sequence),
                "kv": {
                    "num_imported": run.num_imported,
                    "num_exported": run.num_exported,
                    "slots": run.block_ids[:num_prompt_blocks],
                },
                "sampling": {
                    "id": sequence.seq_id,
                    "params": _fields_of(sequence.sampling),
                    "further": [_fields_of(each.sampling) for each in sequence.further],
                    "num_prompt": sequence.num_prompt_tokens - sequence.output_base,
                    "stop": sorted(sequence.stopping.stop_token_ids),
                    "min_tokens": sequence.stopping.min_tokens,
                },
            },
        )

    def _end(self, run: _Run) -> None:
        """Has vLLM drop a sequence. Its blocks are freed when no step touches them any more."""
        run.is_over = True
        if run.gone == self._ranks:
            del self._runs[run.sequence.seq_id]
        else:
            self._process.send(self._front, {"kind": messages.ABORT, "id": run.sequence.seq_id})

    def _index(self, run: _Run, num_tokens: int) -> None:
        """Adds the full blocks of the first `num_tokens` tokens to the prefix cache: they are complete."""
        first, end = run.num_final // self.info.block_size, num_tokens // self.info.block_size
        for at in range(first, end):
            self._pool.index(run.block_ids[at], run.sequence.hashes[at])
        run.num_final = max(run.num_final, num_tokens)

    # -- on the engine's thread ----------------------------------------------------------------------------------------

    def _absorb(self, received: Received) -> None:
        """Takes in what vLLM's processes have told, and passes on to it what fits now."""
        events: list[SequenceEvent] = []
        num_tokens = num_decodes = 0
        started_s = ended_s = self._clock.now()
        with self._lock:
            if received:
                self._told_s = started_s
            for peer, message in received:
                match message["kind"]:
                    case messages.STEP:
                        events += self._step_begins(message)
                    case messages.STEPPED:
                        self._vllm.count(message)
                        started_s, ended_s, num_decodes = message["began"], message["at"], message["num_decodes"]
                        num_tokens += message["num_prefill"] + message["num_decodes"]
                    case messages.FIGURES:
                        self._figures = message
                    case messages.GONE:
                        for seq_id in message["ids"]:
                            self._is_gone(seq_id, peer.rank)
                    case messages.OUTPUT:
                        for seq_id, token_ids, finished in message["outputs"]:
                            if (run := self._runs.get(seq_id)) is not None:
                                events += self._output(run, token_ids, finished)
                    case messages.SAVED | messages.SAMPLED | messages.REFUSED:
                        if (run := self._runs.get(message["id"])) is not None:
                            events += self._take(run, peer, message)
        events += self._admit_waiting()
        if not received and not self._runs and self.cache.touch(self._pool.num_used):
            self._process.wake()  # there is more to touch, as long as nobody needs the processor
        assert self._report is not None
        if events or num_tokens:
            num_sampled = sum(isinstance(event, Token) for event in events)
            self.tally.sampled_tokens += num_sampled
            number = max(1, self.tally.num_steps) if num_sampled or num_tokens else 0
            self._report(StepReport(tuple(events), number, num_tokens, num_decodes, started_s, ended_s))

    def _step_begins(self, message: JsonMessage) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        for seq_id, num_cached in message["begun"]:
            if (run := self._runs.get(seq_id)) is None:
                continue
            sequence = run.sequence
            if run.is_over or sequence.admitted_s is not None or sequence.num_new_tokens:
                continue  # an adopted sequence was admitted elsewhere, and a further answer with the first one
            sequence.admitted_s, sequence.num_cached = message["at"], num_cached
            held = run.block_ids
            if sequence.mode is Mode.PREFILL_ONLY:
                self._pool.acquire(held, Holder.LEASE)
            events.append(Admitted(seq_id, tuple(held), num_cached, message["at"]))
        for seq_id in message["preempted"]:
            robbed = self._runs.get(seq_id)
            if robbed is not None and not robbed.is_over:
                events.append(Preempted(seq_id, message["at"]))
                # Not `Overloaded`, which would be the client's to try again: it is replayed.
                events.append(Failed(seq_id, SequencePreempted("vLLM took the sequence's blocks for others")))
                self._end(robbed)
        return events

    def _take(self, run: _Run, peer: VllmProcess, message: JsonMessage) -> list[SequenceEvent]:
        """Takes in what is told of a sequence."""
        match message["kind"]:
            case messages.SAVED:
                return self._saved(run, peer.rank, message["num_tokens"])
            case messages.SAMPLED:
                run.said[message["position"]] = message["tokens"]
                return self._tell(run)
            case _:
                return self._refused(run, message["error"])

    def _saved(self, run: _Run, rank: int, num_tokens: int) -> list[SequenceEvent]:
        run.saved[rank] = num_tokens
        if run.saved.keys() != self._ranks or (num_final := min(run.saved.values())) <= run.num_final:
            return []
        self._index(run, num_final)
        if run.is_over or run.sequence.mode is not Mode.PREFILL_ONLY:
            return []
        return [Progress(run.sequence.seq_id, num_final, self._clock.now())]

    def _output(self, run: _Run, token_ids: list[int], finished: str | None) -> list[SequenceEvent]:
        run.untold.extend(token_ids)
        events = self._tell(run)
        if finished and not run.is_over and not run.untold:
            # All ends are known here, so this is none of them: a load that has failed, or another error of vLLM's.
            events.append(Failed(run.sequence.seq_id, StepFailed(f"vLLM ended the request: {finished}")))
            self._end(run)
        return events

    def _tell(self, run: _Run) -> list[SequenceEvent]:
        """Returns the events of tokens of which all is known."""
        events: list[SequenceEvent] = []
        sequence = run.sequence
        while run.untold and not run.is_over:
            position = sequence.next_position
            if run.needs_more and position not in run.said:
                break
            token_id = run.untold.popleft()
            told = run.said.pop(position, None) or [[token_id, None, ()]]
            now = self._clock.now()
            for each, (said_id, logprob, top) in zip((sequence, *sequence.further), told, strict=True):
                token = SampledToken(said_id, logprob, tuple((int(other), value) for other, value in top))
                finish, stop_token_id = ending(each, said_id, self.info.max_model_len)
                events.append(Token(each.seq_id, position, token, finish, stop_token_id, now))
                each.token_ids.append(said_id)
                if each is sequence:
                    is_last = finish is not None or sequence.mode is Mode.PREFILL_ONLY
                elif finish is None and sequence.mode is Mode.GENERATE:
                    self._waiting[each.seq_id] = each
            sequence.further = []
            if is_last:
                self._end(run)
        return events

    def _refused(self, run: _Run, error: str) -> list[SequenceEvent]:
        """Ends a sequence that vLLM never took: no rank will say that it is gone."""
        for rank in self._ranks - run.gone:
            self._is_gone(run.sequence.seq_id, rank)
        if run.is_over:
            return []
        self._end(run)
        return [Failed(run.sequence.seq_id, InvalidRequest("request", f"vLLM refused it: {error}"))]

    def _is_gone(self, seq_id: int, rank: int) -> None:
        run = self._runs.get(seq_id)
        if run is None or rank in run.gone:
            return
        run.gone.add(rank)
        if run.gone == self._ranks:
            self._pool.release(run.block_ids, Holder.SEQUENCE)
            if run.is_over:
                del self._runs[seq_id]

    def _admit_waiting(self) -> list[SequenceEvent]:
        """Passes waiting sequences on, in the order of their priority and arrival, as long as the next one fits."""
        events: list[SequenceEvent] = []
        with self._lock:
            waiting = sorted(self._waiting.values(), key=lambda each: (-each.priority, each.arrival_s))
        for sequence in waiting:
            hash_prompt(sequence, self.info.block_size)  # without the lock: it takes its time
            with self._lock:
                if sequence.seq_id not in self._waiting:
                    continue  # aborted meanwhile
                if (error := self._never(sequence)) is not None:
                    events.append(Failed(sequence.seq_id, error))
                elif not self._fits(sequence):
                    break
                del self._waiting[sequence.seq_id]
        return events

    def _never(self, sequence: Sequence) -> Exception | None:
        """Returns why the sequence can never run here, or None."""
        num_tokens, limit = len(sequence.token_ids), self.info.max_model_len
        if sequence.num_prompt_logprobs is not None:
            return UnsupportedModel("a worker with vLLM has no log-probabilities of prompts")
        if num_tokens >= limit:
            return InvalidRequest("token_ids", f"{num_tokens} tokens, must be fewer than {limit}")
        if never_fits(self._pool, sequence):
            return Overloaded(f"{num_tokens} tokens do not fit the {self._pool.num_blocks} KV blocks")
        return None

    def _fits(self, sequence: Sequence) -> bool:
        """Passes the sequence on if there is room for it, and returns whether there was."""
        pool, block_size = self._pool, self.info.block_size
        if len(self._runs) >= self._config.max_num_seqs:
            return False
        prefix = pool.match_prefix(cacheable_prefix(sequence, block_size))
        num_needed = self._num_needed(sequence)
        if sequence.mode is Mode.PREFILL_ONLY:
            to_come = sum(len(run.block_ids) for run in self._runs.values() if run.will_be_leased)
            leased = pool.ledger().leased + to_come
            if leased and leased + num_needed > self._max_leased:
                return False
        pool.acquire(prefix, Holder.SEQUENCE)
        try:
            fresh = pool.allocate(num_needed - len(prefix), Holder.SEQUENCE)
        except OutOfBlocks:
            pool.release(prefix, Holder.SEQUENCE)
            return False
        num_prompt = len(sequence.token_ids)
        num_exported = num_prompt if sequence.mode is Mode.PREFILL_ONLY else num_prompt // block_size * block_size
        run = _Run(sequence, [*prefix, *fresh], len(prefix) * block_size, num_exported)
        run.num_final = run.num_imported
        self._begin(run)
        return True


def _fields_of(sampling: SamplingParams) -> JsonMessage:
    """Returns the parameters as JSON has them: its keys are words."""
    fields = {each.name: getattr(sampling, each.name) for each in dataclasses.fields(sampling)}
    return {**fields, "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}}
