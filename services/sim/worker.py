"""Simulates a worker as a cost model: blocks, batches and steps are counted, and nothing is computed.

Owns: a worker's queue, batch, leases and imports, in the rules of `docs/architecture.md`: prompts reserve all their
blocks, decodes go first in a step and grow block by block, the youngest is preempted when there is no room, a handoff
is admitted or refused at once, its blocks cross while the prompt is still computed. Never: where a request goes, which
the router's coordinator decides; which parts of prompts are kept (`pool`). Not modelled: output in prefix caches,
staging, workers that stop and go on.

Steps that only decode are taken together until a sequence ends, a block is missing or somebody else joins, which gives
the same times as one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.core.errors import LeaseInvalid
from services.core.hashing import ShortHash
from services.router.coordinator.actions import SendLeg
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    FinishReason,
    ImportFailed,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegEvent,
    PrefillStarted,
    SequenceEnd,
    Tokens,
    WorkerInfo,
)
from services.router.policy import Load, Role
from services.sim.pool import Part, PromptParts, SimPool
from services.sim.profile import WorkerProfile
from services.sim.world import World

_TOKEN = 1
_LONGEST_RUN_S = 5.0
"""Steps taken together last at most this long: the router must hear of a leg now and then."""

Tell = Callable[["SimWorker", Sequence[LegEvent], Load], None]
NoteGap = Callable[[float, int], None]


@dataclass(frozen=True)
class WorkerRules:
    """Says how workers compute. What Baton's do is the default; the others are what is compared with."""

    prefix_caching: bool = True
    chunked: bool = True
    """Whether a long prompt is computed in several steps, together with decodes. Otherwise all of it is in one step,
    and others are beside it only within the limit of a step's tokens."""
    static: bool = False
    """Whether sequences are computed in batches that nobody joins or leaves: the next begins when the last sequence of
    one has ended, and until then each step costs what it does with all of them (request-level batching)."""


@dataclass(eq=False, slots=True)
class SimLeg:
    """Keeps one leg at a worker."""

    leg: int
    num_tokens: int
    """Prompt and replayed output: what is computed before the leg's first token."""
    position: int
    """The output position of the leg's first token."""
    most_output: int
    only_prefill: bool
    prompt: PromptParts
    num_computed: int = 0
    num_output: int = 0
    num_reported: int = 0
    reported_s: float = 0.0
    num_blocks: int = 0
    """Its own."""
    held: list[Part] = field(default_factory=list)
    """Parts of its prompt in blocks that others may use too."""
    num_held_blocks: int = 0
    """Blocks of these parts."""
    decoding: bool = False
    preempted: bool = False
    cancelled: bool = False
    sealed_s: float | None = None
    on_sealed: Callable[[], None] | None = None
    """What a destination does that fetches the lease."""
    on_lost: Callable[[], None] | None = None
    """What it does if the lease is lost meanwhile."""
    ended: bool = False
    """Whether the lease is over."""

    @property
    def context(self) -> int:
        return self.num_tokens + self.num_output

    @property
    def all_blocks(self) -> int:
        return self.num_blocks + self.num_held_blocks

    def take_blocks_of(self, other: SimLeg) -> None:
        self.num_blocks, self.num_held_blocks, self.held = other.num_blocks, other.num_held_blocks, other.held
        other.num_blocks, other.num_held_blocks, other.held = 0, 0, []

    @property
    def to_compute(self) -> int:
        """Returns the tokens whose KV is missing: a preempted sequence computes its output again too."""
        return (self.context if self.preempted else self.num_tokens) - self.num_computed


@dataclass(slots=True)
class _Run:
    """Describes the steps that are under way."""

    started_s: float
    num_steps: int
    decodes: list[SimLeg]
    parts: list[tuple[SimLeg, int]]
    context_tokens: int
    slowness: float
    delay_s: float
    """Before the first of them."""


class SimWorker:
    def __init__(
        self,
        world: World,
        info: WorkerInfo,
        profile: WorkerProfile,
        tell: Tell,
        note_gap: NoteGap,
        *,
        rules: WorkerRules,
        host: Collection[SimWorker] = (),
        is_followed: bool = False,
    ) -> None:
        """`tell` takes what the worker reports; `note_gap(seconds, count)` notes gaps between tokens of a stream.
        `host` are the workers, perhaps itself among them, that compute on the same host. `is_followed` says whether the
        router wants to know of changes in its prefix cache."""
        self.info = info
        self.profile = profile
        self.busy_s = 0.0
        self.bytes_fetched = 0
        self.num_preemptions = 0
        self.dead = False
        self._world = world
        self._tell = tell
        self._note_gap = note_gap
        self._host = host
        self._rules = rules
        self._batch_size = 0
        """Sequences that began together, with static batching."""
        self._pool = SimPool(
            profile.num_blocks, profile.block_size, caches=rules.prefix_caching, is_followed=is_followed
        )
        self._waiting: deque[SimLeg] = deque()
        self._batch: list[SimLeg] = []
        self._leases: dict[int, SimLeg] = {}
        self._imports: dict[int, SimLeg] = {}
        self._run: _Run | None = None
        self._run_number = 0
        self._free_s = 0.0
        """When what completed prompts have left to do is done."""
        self._num_loads = 0
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    # What the router says

    def receive(self, command: SendLeg, prompt: PromptParts) -> None:
        if self.dead:
            return
        work = SimLeg(
            command.leg,
            len(command.token_ids),
            command.output_base,
            command.max_tokens - command.output_base,
            only_prefill=command.phase is Role.PREFILL,
            prompt=prompt,
            reported_s=self._world.now,
        )
        if command.handoff is not None:
            self._import(work, *_source(command.handoff.source))
            return
        self._waiting.append(work)
        self._say([])
        self._cut_short()
        self._begin()

    def cancel(self, leg: int) -> None:
        if self.dead:
            return
        for work in [work for work in self._waiting if work.leg == leg]:
            self._waiting.remove(work)
        for work in self._batch:
            if work.leg == leg:
                work.cancelled = True  # its blocks are free once no step can write them
        if (lease := self._leases.get(leg)) is not None:
            self._end_lease(lease)
            if lease.on_lost is not None:
                lease.on_lost()
        if (import_ := self._imports.pop(leg, None)) is not None:
            import_.cancelled = True
            self._give_back(import_)
        self._say([])
        self._cut_short()
        self._begin()

    def die(self) -> list[LegEvent]:
        """Ends at once, and all that fetch from it with it. Returns the tokens that its steps had brought until now."""
        run, events = self._run, list[LegEvent]()
        if run is not None:
            self.busy_s += self._world.now - run.started_s
            num_steps = self._steps_within(run, self._world.now - run.started_s)
            for work in run.decodes:
                work.num_output += num_steps
        for work in self._batch:
            if work.decoding and not work.cancelled and work.num_output > work.num_reported:
                token_ids = (_TOKEN,) * (work.num_output - work.num_reported)
                events.append(Tokens(work.leg, work.position + work.num_reported, token_ids))
        self.dead, self._run = True, None
        for lease in self._leases.values():
            lease.ended = True
            if lease.on_lost is not None:
                lease.on_lost()
        return events

    def load(self) -> Load:
        """Returns a snapshot."""
        self._num_loads += 1
        pool = self._pool
        used = self.profile.num_blocks - pool.available
        # What several use is counted once.
        importing = min(used, sum(work.all_blocks for work in self._imports.values()))
        leased = min(used - importing, sum(work.all_blocks for work in self._leases.values()))
        queued = sum(work.to_compute for work in (*self._waiting, *self._batch) if not work.decoding)
        profile = self.profile
        return Load(
            sequence_number=self._num_loads,
            blocks_importing=importing,
            blocks_leased=leased,
            blocks_active=used - importing - leased,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free,
            num_running=len(self._batch),
            num_waiting=len(self._waiting),
            queued_prefill_tokens=queued,
            num_importing=len(self._imports),
            num_leases=len(self._leases),
            prefix_tokens_queried=self._num_queried_tokens,
            prefix_tokens_hit=self._num_hit_tokens,
            ms_per_prefill_token=profile.ms_per_prefill_token,
            ms_per_decode_step=profile.ms_per_decode_step,
            ms_per_decode_sequence=profile.ms_per_decode_sequence,
        )

    def check_idle(self) -> None:
        """Raises AssertionError if anything is left."""
        left = [*self._waiting, *self._batch, *self._leases.values(), *self._imports.values()]
        assert not left, f"{self.info.worker_id}: {len(left)} legs are left"
        available = self._pool.available
        assert available == self.profile.num_blocks, f"{self.info.worker_id}: {available} blocks are available"

    # Steps

    def _begin(self) -> None:
        """Begins the next steps, unless some are under way."""
        if self._run is not None:
            return
        self._admit()
        decodes = [work for work in self._batch if work.decoding]
        if self._rules.static and len(decodes) < len(self._batch):
            decodes = []  # all prompts of a batch come first
        num_steps = 1
        if decodes and (num_steps := self._grow(decodes)) == 0:
            self._begin()  # one was preempted
            return
        parts = self._parts(self.profile.max_num_batched_tokens - len(decodes))
        if not decodes and not parts:
            return
        context_tokens = sum(work.context for work in decodes)
        # Where others' computing matters, it is looked at before each step.
        num_steps = 1 if parts or self.profile.shares_host else num_steps
        run = _Run(
            self._world.now,
            num_steps,
            decodes,
            parts,
            context_tokens,
            self._slowness(bool(parts)),
            max(0.0, self._free_s - self._world.now),
        )
        self._schedule(run)

    def _parts(self, budget: int) -> list[tuple[SimLeg, int]]:
        """Returns which prompts the next step computes, and how many tokens of each."""
        parts: list[tuple[SimLeg, int]] = []
        for work in self._batch:
            if work.decoding:
                continue
            count = min(budget, work.to_compute) if self._rules.chunked else work.to_compute
            if budget <= 0 or (parts and count > budget):
                break
            parts.append((work, count))
            budget -= count
        return parts

    def _schedule(self, run: _Run) -> None:
        self._run = run
        self._run_number += 1
        number = self._run_number
        self._world.at(run.started_s + self._seconds(run, run.num_steps), lambda: self._end(number))

    def _seconds(self, run: _Run, num_steps: int) -> float:
        num_decodes = self._batch_size if self._rules.static and run.decodes else len(run.decodes)
        if run.parts:
            prompt_tokens = sum(count for _, count in run.parts)
            attended = sum(count * (work.num_computed + count / 2) for work, count in run.parts)
            step_s = self.profile.step_s(prompt_tokens, num_decodes, run.context_tokens, attended)
            return run.delay_s + run.slowness * step_s
        return run.delay_s + run.slowness * self.profile.decode_s(num_steps, num_decodes, run.context_tokens)

    def _slowness(self, has_prompts: bool) -> float:
        """Returns how many times as long a step takes that begins now, by what others do on the same host."""
        if not any(other._run is not None for other in self._host if other is not self):
            return 1.0
        return self.profile.prefill_beside_factor if has_prompts else self.profile.decode_beside_factor

    def _cut_short(self) -> None:
        """Lets steps that were taken together end with the one that is under way now, so that others may join."""
        run = self._run
        if run is None or run.num_steps == 1:
            return
        under_way = self._steps_within(run, self._world.now - run.started_s) + 1
        if under_way < run.num_steps:
            run.num_steps = under_way
            self._schedule(run)

    def _steps_within(self, run: _Run, elapsed_s: float) -> int:
        """Returns how many of its steps had ended before so much time had passed; at most all but the last."""
        low, high = 1, run.num_steps
        while low < high:
            middle = (low + high) // 2
            if self._seconds(run, middle) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        return low - 1

    def _grow(self, decodes: list[SimLeg]) -> int:
        """Gives decodes the blocks for the next steps. Returns how many steps those are; 0 if one was preempted."""
        num_steps = min(work.most_output - work.num_output for work in decodes)
        step_s = self.profile.decode_ms(len(decodes), sum(work.context for work in decodes)) / 1e3
        num_steps = max(1, min(num_steps, int(_LONGEST_RUN_S / step_s) if step_s else num_steps))
        while num_steps > 1 and self._missing(decodes, num_steps) > self._pool.available:
            num_steps //= 2
        if self._missing(decodes, num_steps) > self._pool.available:
            self._preempt(decodes[-1])
            return 0
        for work in decodes:
            more = self._blocks(work.context + num_steps) - work.all_blocks
            if more > 0:
                self._pool.take(more)
                work.num_blocks += more
        return num_steps

    def _missing(self, decodes: list[SimLeg], num_steps: int) -> int:
        return sum(max(0, self._blocks(work.context + num_steps) - work.all_blocks) for work in decodes)

    def _preempt(self, work: SimLeg) -> None:
        self.num_preemptions += 1
        self._batch.remove(work)
        self._give_back(work)
        work.num_computed, work.decoding, work.preempted = 0, False, True
        self._waiting.appendleft(work)

    def _admit(self) -> None:
        if self._rules.static and self._batch:
            return
        events: list[LegEvent] = []
        while self._waiting and len(self._batch) < self.profile.max_num_seqs:
            work = self._waiting[0]
            needed = self._blocks(work.to_compute + (0 if work.only_prefill else 1))
            cached_tokens = self._reserve(work, work.to_compute, needed)
            if cached_tokens is None:
                break
            self._waiting.popleft()
            if not work.preempted:
                self._num_queried_tokens += work.num_tokens
                self._num_hit_tokens += cached_tokens
            work.num_computed = cached_tokens
            self._batch.append(work)
            if work.only_prefill:
                self._leases[work.leg] = work
                source: Any = (self, work)
                events.append(PrefillStarted(work.leg, work.leg.to_bytes(16, "big"), source, cached_tokens))
            elif not work.preempted:
                events.append(DecodeAdmitted(work.leg, cached_tokens))
        self._batch_size = len(self._batch)
        if events:
            self._say(events)

    def _end(self, number: int) -> None:
        run = self._run
        if run is None or number != self._run_number:
            return  # it was cut short
        now, events = self._world.now, list[LegEvent]()
        self._run = None
        self.busy_s += now - run.started_s
        if run.decodes:
            self._note_gap((now - run.started_s) / run.num_steps, run.num_steps * len(run.decodes))
        for work in run.decodes:
            work.num_output += run.num_steps
            self._output(work, events)
        for work, count in run.parts:
            work.num_computed += count
            if work.to_compute == 0 and not work.cancelled:
                self._prompt_done(work, events)
        for work in [work for work in self._batch if work.cancelled]:
            self._batch.remove(work)
            self._give_back(work)
        self._say(events)
        self._begin()

    def _prompt_done(self, work: SimLeg, events: list[LegEvent]) -> None:
        self._keep(work)
        if self.info.roles is not Role.MIXED:
            self._free_s = max(self._free_s, self._world.now) + self.profile.ms_per_prompt / 1e3
        if work.preempted:
            work.preempted, work.decoding = False, True
            return
        work.num_output = 1
        if not work.only_prefill:
            work.decoding = True
            self._output(work, events, at_once=True)
            return
        self._batch.remove(work)
        over = work.most_output == 1
        work.sealed_s = self._world.now
        events.append(Tokens(work.leg, work.position, (_TOKEN,), finish=_LENGTH if over else None))
        if over:
            self._end_lease(work)
        elif work.on_sealed is not None:
            work.on_sealed()

    def _output(self, work: SimLeg, events: list[LegEvent], *, at_once: bool = False) -> None:
        """Reports output that is complete, or has not been reported for some time, and ends the sequence with it."""
        if work.cancelled:
            return
        over = work.num_output >= work.most_output
        if not (over or at_once or self._world.now - work.reported_s >= _LONGEST_RUN_S):
            return
        token_ids = (_TOKEN,) * (work.num_output - work.num_reported)
        events.append(Tokens(work.leg, work.position + work.num_reported, token_ids, finish=_LENGTH if over else None))
        work.num_reported, work.reported_s = work.num_output, self._world.now
        if over:
            self._batch.remove(work)
            self._give_back(work)

    # Blocks

    def _reserve(self, work: SimLeg, num_tokens: int, needed: int) -> int | None:
        """Gives the leg the blocks that it needs, those among them that the prefix cache has of its first `num_tokens`
        tokens. Returns how many tokens these hold; None if too few blocks are available."""
        held, cached_tokens = self._pool.hold(work.prompt, num_tokens)
        num_own = needed - cached_tokens // self.profile.block_size
        if num_own > self._pool.available:
            self._pool.let_go(held)
            return None
        self._pool.take(num_own)
        work.num_blocks, work.held = num_own, held
        work.num_held_blocks = needed - num_own
        return cached_tokens

    def _keep(self, work: SimLeg) -> None:
        """Lets the prefix cache have the parts of the leg's prompt, which are computed."""
        new = self._pool.keep(work.prompt, work.num_tokens)
        num_blocks = sum(part.num_blocks for part in new)
        work.num_blocks -= num_blocks
        work.num_held_blocks += num_blocks
        work.held += new

    def _give_back(self, work: SimLeg) -> None:
        self._pool.give(work.num_blocks)
        self._pool.let_go(work.held)
        work.num_blocks, work.num_held_blocks, work.held = 0, 0, []

    # Handoffs

    def _import(self, work: SimLeg, source: SimWorker, lease: SimLeg) -> None:
        if lease.ended:
            self._say([ImportFailed(work.leg, lease_alive=False, error=LeaseInvalid("it is over"))])
            return
        in_place = source is self
        cached_tokens: int | None = work.num_tokens
        if not in_place:
            idle = not (self._batch or self._leases or self._imports)
            crowded = len(self._batch) + len(self._imports) >= self.profile.max_num_seqs and not idle
            needed = self._blocks(work.num_tokens + 1)
            cached_tokens = None if crowded else self._reserve(work, work.num_tokens, needed)
        if cached_tokens is None:
            self._say([DecodeRefused(work.leg)])
            return
        self._imports[work.leg] = work
        self._say([DecodeAdmitted(work.leg, 0 if in_place else cached_tokens)])
        began_s, profile = self._world.now, source.profile
        num_bytes = (work.num_tokens - cached_tokens) * profile.kv_bytes_per_token

        def sealed() -> None:
            assert lease.sealed_s is not None
            last = min(num_bytes, profile.max_num_batched_tokens * profile.kv_bytes_per_token)
            latency_s = 0.0 if in_place else profile.transfer_latency_ms / 1e3
            ready_s = max(
                began_s + num_bytes / profile.transfer_bytes_per_s, lease.sealed_s + last / profile.transfer_bytes_per_s
            )
            self._world.at(ready_s + latency_s, lambda: self._ready(work, source, lease, num_bytes))

        lease.on_lost = lambda: self._import_failed(work)
        if lease.sealed_s is not None:
            sealed()
        else:
            lease.on_sealed = sealed

    def _import_failed(self, work: SimLeg) -> None:
        if not self.dead and self._imports.get(work.leg) is work:
            del self._imports[work.leg]
            self._give_back(work)
            self._say([ImportFailed(work.leg, lease_alive=False, error=LeaseInvalid("it is over"))])

    def _ready(self, work: SimLeg, source: SimWorker, lease: SimLeg, num_bytes: int) -> None:
        if self.dead or self._imports.get(work.leg) is not work:
            return  # it was cancelled, or has failed
        if lease.ended:
            self._import_failed(work)
            return
        del self._imports[work.leg]
        self.bytes_fetched += num_bytes
        if source is self:
            work.take_blocks_of(lease)
        else:
            self._keep(work)
        source.release(lease)
        work.num_computed, work.num_output, work.decoding = work.num_tokens, 1, True
        self._batch.append(work)
        events: list[LegEvent] = [ImportReady(work.leg)]
        self._output(work, events, at_once=True)
        self._say(events)
        self._cut_short()
        self._begin()

    def release(self, lease: SimLeg) -> None:
        """Ends a lease whose blocks were taken over."""
        self._end_lease(lease)
        self._say([LeaseEnded(lease.leg, b"", LeaseEnd.RELEASED)])
        self._begin()

    def _end_lease(self, lease: SimLeg) -> None:
        del self._leases[lease.leg]
        lease.ended = True
        if lease not in self._batch:
            self._give_back(lease)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.profile.block_size)

    def take_cache_changes(self) -> tuple[list[ShortHash], list[ShortHash]]:
        """Returns which blocks its prefix cache has and has no more, since it was asked last."""
        changes, self._pool.changes = self._pool.changes, {}
        stored = [hash for hash, there in changes.items() if there]
        return stored, [hash for hash, there in changes.items() if not there]

    def _say(self, events: Sequence[LegEvent]) -> None:
        self._tell(self, events, self.load())


_LENGTH = SequenceEnd(FinishReason.LENGTH)


def _source(source: Any) -> tuple[SimWorker, SimLeg]:
    """Returns what a `PrefillStarted` of a simulated worker has in place of an address."""
    worker, lease = source
    return worker, lease
