"""Simulates a worker as a cost model: blocks, batches and steps are counted, and nothing is computed.

Owns: when steps begin and end, leases and imports: a handoff is admitted or refused at once, by the decode workers' own
rule, and its blocks cross while the prompt is still computed. Never: where a request goes, which the router's
coordinator decides; what a step computes (`scheduler`); which parts of prompts are kept (`pool`). Not modelled: other
sequences' output in prefix caches, staging, workers that stop and go on.

Steps that only decode are taken together until a sequence ends, a block is missing or somebody else joins. Whoever
looks meanwhile finds the tokens and blocks that there would be, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from services.core.errors import LeaseInvalid
from services.core.hashing import ShortHash, num_blocks_for
from services.core.step_average import StepAverage
from services.kv.handoff_admission import AdmissionPolicy, EngineRoom
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
    SendLeg,
    SequenceEnd,
    Tokens,
    WorkerInfo,
)
from services.router.policy import Load, Role
from services.sim.pool import PromptParts, SimPool
from services.sim.profile import WorkerProfile
from services.sim.scheduler import SimLeg, SimScheduler, Stream, WorkerRules
from services.sim.world import World

_TOKEN = 1
_LONGEST_RUN_S = 5.0
"""Steps taken together last at most this long: the router must hear of a leg now and then."""
_OFFERED_AGAIN_S = 2.0
"""Seconds within which the router offers a refused handoff again, if it does at all."""

Tell = Callable[["SimWorker", Sequence[LegEvent], Load], None]
NoteGap = Callable[[float, int], None]


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
        unreported: float = 1.0,
    ) -> None:
        """`tell` takes what the worker reports; `note_gap(seconds, count)` notes gaps between tokens of a stream.
        `host` are the workers, perhaps itself among them, that compute on the same host. `is_followed` says whether the
        router wants to know of changes in its prefix cache. Its steps take `unreported` times as long as by `profile`,
        which has the figures that it reports."""
        self.info = info
        self.profile = profile
        self.busy_s = 0.0
        self.bytes_fetched = 0
        self.dead = False
        self._world = world
        self._tell = tell
        self._note_gap = note_gap
        self._host = host
        self._rules = rules
        self._unreported = unreported
        self._pool = SimPool(
            profile.num_blocks, profile.block_size, caches=rules.prefix_caching, is_followed=is_followed
        )
        self.scheduler = SimScheduler(profile, rules, self._pool, limits_leased_blocks=info.roles is Role.MIXED)
        self._admission = AdmissionPolicy()
        self._refused_s = -math.inf
        """When it last refused a handoff."""
        self._num_arrived = 0
        self._imports: dict[int, SimLeg] = {}
        self._run: _Run | None = None
        self._run_number = 0
        self._free_s = 0.0
        """When what completed prompts have left to do is done."""
        self._num_loads = 0
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._prefill_step = self._decode_step = StepAverage()

    # What the router says

    def receive(self, command: SendLeg, prompt: PromptParts, stream: Stream) -> None:
        """Takes a command whose request has this prompt and this output."""
        if self.dead:
            return
        self._num_arrived += 1
        work = SimLeg(
            command.leg,
            len(command.token_ids),
            command.output_base,
            command.max_tokens - command.output_base,
            only_prefill=command.phase is Role.PREFILL,
            prompt=prompt,
            stream=stream,
            priority=command.priority,
            number=self._num_arrived,
            arrival_s=self._world.now,
            reported_s=self._world.now,
        )
        if command.handoff is not None:
            self._import(work, command.age_s, *_source(command.handoff.source))
            return
        self.scheduler.add(work)
        self._say([])
        self._look_again()

    def cancel(self, leg: int) -> None:
        if self.dead:
            return
        self._catch_up()
        if (work := self._computing(leg)) is not None:
            work.cancelled = True  # its blocks are free once no step can write them
        if (lease := self.scheduler.leases.get(leg)) is not None:
            self._end_lease(lease)
            if lease.on_lost is not None:
                lease.on_lost()
        if work is None:
            self.scheduler.remove(leg)
        if (import_ := self._imports.pop(leg, None)) is not None:
            import_.cancelled = True
            self.scheduler.give_back(import_)
        self._say([])
        self._look_again()

    def _computing(self, leg: int) -> SimLeg | None:
        """Returns the leg if a step computes it now."""
        run, work = self._run, self.scheduler.running.get(leg)
        if run is None or work is None:
            return None
        return work if work in run.decodes or any(work is part for part, _ in run.parts) else None

    def _look_again(self) -> None:
        """Lets the next step begin as soon as it may, since there may be more to compute, or more room."""
        self._cut_short()
        self._begin()

    def die(self) -> list[LegEvent]:
        """Ends at once, and all that fetch from it with it. Returns the tokens that its steps had brought until now."""
        self._catch_up()
        events = list[LegEvent]()
        self.busy_s = self.busy_until_now_s
        scheduler = self.scheduler
        for work in (*scheduler.running.values(), *scheduler.preempted):
            if not work.only_prefill and not work.cancelled and work.num_output > work.num_reported:
                token_ids = (_TOKEN,) * (work.num_output - work.num_reported)
                events.append(Tokens(work.leg, work.position + work.num_reported, token_ids))
        self.dead, self._run = True, None
        for lease in scheduler.leases.values():
            lease.ended = True
            if lease.on_lost is not None:
                lease.on_lost()
        return events

    @property
    def busy_until_now_s(self) -> float:
        """Returns how long it has computed, with the part of the step under way that lies behind."""
        return self.busy_s + (self._world.now - self._run.started_s if self._run is not None else 0.0)

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.num_preemptions

    @property
    def _num_importing(self) -> int:
        """Returns how many handoffs are copied, which those of its own are not."""
        return sum(not work.in_place for work in self._imports.values())

    def load(self) -> Load:
        """Returns a snapshot."""
        self._num_loads += 1
        self._catch_up()
        pool, scheduler = self._pool, self.scheduler
        used = self.profile.num_blocks - pool.available
        # What several use is counted once.
        importing = sum(work.num_blocks for work in self._imports.values())
        leased = min(used - importing, sum(work.all_blocks for work in scheduler.leases.values()))
        profile = self.profile
        return Load(
            sequence_number=self._num_loads,
            blocks_importing=importing,
            blocks_leased=leased,
            blocks_active=used - importing - leased,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            queued_prefill_tokens=scheduler.queued_tokens,
            num_importing=self._num_importing,
            prefix_tokens_queried=self._num_queried_tokens,
            prefix_tokens_hit=self._num_hit_tokens,
            ms_per_prefill_token=profile.ms_per_prefill_token,
            ms_per_decode_step=profile.ms_per_decode_step,
            ms_per_decode_sequence=profile.ms_per_decode_sequence,
            prefill_step=self._prefill_step,
            decode_step=self._decode_step,
        )

    def check_idle(self) -> None:
        """Raises AssertionError if anything is left."""
        scheduler = self.scheduler
        num_left = len(scheduler.running) + scheduler.num_waiting + len(scheduler.leases) + len(self._imports)
        assert not num_left, f"{self.info.worker_id}: {num_left} legs are left"
        available = self._pool.available
        assert available == self.profile.num_blocks, f"{self.info.worker_id}: {available} blocks are available"

    # Steps

    def _begin(self) -> None:
        """Begins the next steps, unless some are under way."""
        if self._run is not None:
            return
        step = self.scheduler.schedule(self._world.now)
        if step.admitted:
            self._say([self._admitted(work) for work in step.admitted])
        if not step.decodes and not step.parts:
            return
        num_steps = 1
        # Where others' computing matters, it is looked at before each step.
        if not step.parts and not self.profile.shares_host:
            num_steps = self.scheduler.num_steps_ahead(step.decodes, self._most_steps(step.decodes))
        run = _Run(
            self._world.now,
            num_steps,
            step.decodes,
            step.parts,
            sum(work.context for work in step.decodes),
            self._slowness(bool(step.parts)),
            max(0.0, self._free_s - self._world.now),
        )
        self._schedule(run)

    def _admitted(self, work: SimLeg) -> LegEvent:
        self._num_queried_tokens += work.num_tokens
        self._num_hit_tokens += work.num_computed
        if not work.only_prefill:
            return DecodeAdmitted(work.leg, work.num_computed)
        source: Any = (self, work)
        return PrefillStarted(work.leg, _lease_id(work), source, work.num_computed)

    def _most_steps(self, decodes: list[SimLeg]) -> int:
        """Returns after how many steps a sequence ends, or the router must hear of one. While it may have a handoff
        that was refused, it looks at each report, of which a worker sends one a step."""
        if self._world.now - self._refused_s < _OFFERED_AGAIN_S:
            return 1
        num_steps = min(work.most_output - work.num_output for work in decodes)
        step_s = self.profile.decode_ms(len(decodes), sum(work.context for work in decodes)) * self._unreported / 1e3
        return int(min(num_steps, _LONGEST_RUN_S / step_s)) if step_s else num_steps

    def _schedule(self, run: _Run) -> None:
        self._run = run
        self._run_number += 1
        number = self._run_number
        self._world.at(run.started_s + self._seconds(run, run.num_steps), lambda: self._end(number))

    def _seconds(self, run: _Run, num_steps: int) -> float:
        num_decodes = self._num_computed(run)
        if run.parts:
            prompt_tokens, attended = _of_prompts(run)
            step_s = self.profile.step_s(prompt_tokens, num_decodes, run.context_tokens, attended)
            return run.delay_s + run.slowness * step_s
        return run.delay_s + run.slowness * self.profile.decode_s(num_steps, num_decodes, run.context_tokens)

    def _num_computed(self, run: _Run) -> int:
        """Returns how many decoding sequences a step computes: in a static batch, those that have ended too."""
        num_decodes = len(run.decodes)
        return max(num_decodes, self.scheduler.batch_size) if self._rules.static and run.decodes else num_decodes

    def _slowness(self, has_prompts: bool) -> float:
        """Returns how many times as long a step takes that begins now, by what others do on the same host."""
        if not any(other._run is not None for other in self._host if other is not self):
            return self._unreported
        beside = self.profile.prefill_beside_factor if has_prompts else self.profile.decode_beside_factor
        return self._unreported * beside

    def _catch_up(self) -> None:
        """Notes the steps that have ended of those taken together, so that tokens and blocks are those of now."""
        run = self._run
        if run is None or run.num_steps == 1:
            return
        num_steps = self._steps_within(run, self._world.now - run.started_s)
        if not num_steps:
            return
        until_s = run.started_s + self._seconds(run, num_steps)
        self._absorb(run, num_steps, until_s)
        run.started_s = until_s
        run.num_steps -= num_steps
        run.context_tokens += num_steps * len(run.decodes)
        run.delay_s = 0.0
        self.scheduler.cover(run.decodes)  # the step that is under way has its blocks

    def _absorb(self, run: _Run, num_steps: int, until_s: float) -> None:
        """Gives sequences the tokens of `num_steps` steps of the run, the last of which ended at `until_s`. What lies
        before a sequence's first token of them may be more than a step: its handoff, its wait for others' step."""
        self.busy_s += until_s - run.started_s
        step_s = (until_s - run.started_s - run.delay_s) / num_steps
        self._measure(run, num_steps, step_s * 1e3)
        first_s, num_in_a_row = run.started_s + run.delay_s + step_s, 0
        for work in run.decodes:
            work.num_output += num_steps
            if work.cancelled:
                continue
            num_in_a_row += num_steps - 1
            newest_s, work.stream.newest_s = work.stream.newest_s, until_s
            if newest_s == run.started_s and not run.delay_s:
                num_in_a_row += 1
            elif newest_s is not None:
                self._note_gap(first_s - newest_s, 1)
        if num_in_a_row:
            self._note_gap(step_s, num_in_a_row)

    def _measure(self, run: _Run, num_steps: int, step_ms: float) -> None:
        """Adds steps that have ended to what it reports of its newest ones."""
        num_decodes = self._num_computed(run)
        if run.parts:
            prompt_tokens, attended = _of_prompts(run)
            tokens, attended = num_decodes + prompt_tokens, attended + run.context_tokens
            self._prefill_step = self._prefill_step.after(step_ms, tokens, attended, num_steps)
        else:
            context_tokens = run.context_tokens + num_decodes * (num_steps - 1) / 2
            self._decode_step = self._decode_step.after(step_ms, num_decodes, context_tokens, num_steps)

    def _cut_short(self) -> None:
        """Lets steps that were taken together end with the one that is under way now, so that others may join."""
        self._catch_up()
        run = self._run
        if run is not None and run.num_steps > 1:
            run.num_steps = 1
            self._schedule(run)

    def _steps_within(self, run: _Run, elapsed_s: float) -> int:
        """Returns how many of its steps had ended after `elapsed_s` seconds; at most all but the last."""
        low, high = 1, run.num_steps
        while low < high:
            middle = (low + high) // 2
            if self._seconds(run, middle) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        return low - 1

    def _end(self, number: int) -> None:
        run = self._run
        if run is None or number != self._run_number:
            return  # it was cut short
        scheduler, events = self.scheduler, list[LegEvent]()
        self._run = None
        scheduler.cover(run.decodes, run.num_steps - 1)
        self._absorb(run, run.num_steps, self._world.now)
        for work in run.decodes:
            self._output(work, events)
        for work, count in run.parts:
            work.num_computed += count
            if work.to_compute == 0 and not work.cancelled:
                self._prompt_done(work, events)
        for work in (*run.decodes, *(work for work, _ in run.parts)):
            if work.cancelled:
                scheduler.leave(work)
        self._say(events)
        self._begin()

    def _prompt_done(self, work: SimLeg, events: list[LegEvent]) -> None:
        self.scheduler.keep(work)
        if self.info.roles is not Role.MIXED:
            self._free_s = max(self._free_s, self._world.now) + self.profile.ms_per_prompt / 1e3
        work.num_output += 1
        newest_s, work.stream.newest_s = work.stream.newest_s, self._world.now
        if newest_s is not None:  # it was preempted, or is computed again
            self._note_gap(self._world.now - newest_s, 1)
        if not work.only_prefill:
            work.decoding = True
            self._output(work, events, at_once=work.num_output == 1)
            return
        self.scheduler.leave(work)
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
            self.scheduler.leave(work)

    # Handoffs

    def _import(self, work: SimLeg, age_s: float, source: SimWorker, lease: SimLeg) -> None:
        if lease.ended:
            self._say([ImportFailed(work.leg, lease_alive=False, error=LeaseInvalid("it is over"))])
            return
        work.in_place = in_place = source is self
        cached_tokens = 0
        if not in_place:
            found = self._reserve(work, _lease_id(lease), age_s)
            if isinstance(found, DecodeRefused):
                self._say([found])
                return
            cached_tokens = found
        self._imports[work.leg] = work
        self._say([DecodeAdmitted(work.leg, cached_tokens)])
        began_s, profile = self._world.now, source.profile
        num_bytes = 0 if in_place else (work.num_tokens - cached_tokens) * profile.kv_bytes_per_token

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

    def _reserve(self, work: SimLeg, lease_id: bytes, age_s: float) -> int | DecodeRefused:
        """Sets the blocks of a handoff aside. Returns how many tokens the prefix cache has of it, or the refusal."""
        self._catch_up()
        pool, scheduler = self._pool, self.scheduler
        hits = pool.find(work.prompt, work.num_tokens)
        scheduler.hold(work, hits, 0)
        num_fresh = num_blocks_for(work.num_tokens, self.profile.block_size) - hits.num_blocks
        room = EngineRoom(
            pool.available,
            self.profile.num_blocks,
            len(scheduler.running) + scheduler.num_waiting,
            self.profile.max_num_seqs,
            len(scheduler.preempted),
        )
        # One block more, since the token after the first needs a place.
        refusal = self._admission.decide(lease_id, num_fresh + 1, age_s, room, self._num_importing, self._world.now)
        if refusal is not None:
            scheduler.give_back(work)
            self._refused_s = self._world.now
            self._cut_short()
            return DecodeRefused(work.leg, refusal.needed_blocks, refusal.missing_blocks)
        pool.take(num_fresh)
        work.num_blocks = num_fresh
        run = self._run
        if run is not None and run.num_steps > 1 and scheduler.num_missing(run.decodes, run.num_steps) > pool.available:
            self._cut_short()
        return hits.num_blocks * self.profile.block_size

    def _import_failed(self, work: SimLeg) -> None:
        if not self.dead and self._imports.get(work.leg) is work:
            self._catch_up()
            del self._imports[work.leg]
            self.scheduler.give_back(work)
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
            self.scheduler.keep(work)
        source.release(lease)
        work.num_computed, work.num_output, work.decoding = work.num_tokens, 1, True
        events: list[LegEvent] = [ImportReady(work.leg)]
        self._output(work, events, at_once=True)
        self.scheduler.adopted.append(work)
        self._say(events)
        self._look_again()

    def release(self, lease: SimLeg) -> None:
        """Ends a lease whose blocks were taken over."""
        self._catch_up()  # steps that have begun took theirs before these were free
        self._end_lease(lease)
        self._say([LeaseEnded(lease.leg, LeaseEnd.RELEASED)])
        self._look_again()

    def _end_lease(self, lease: SimLeg) -> None:
        del self.scheduler.leases[lease.leg]
        lease.ended = True
        if lease.leg not in self.scheduler.running:
            self.scheduler.give_back(lease)

    def take_cache_changes(self) -> dict[ShortHash, bool]:
        """Returns which blocks its prefix cache has (True) and has no more, since it was asked last."""
        changes, self._pool.changes = self._pool.changes, {}
        return changes

    def _say(self, events: Sequence[LegEvent]) -> None:
        self._tell(self, events, self.load())


_LENGTH = SequenceEnd(FinishReason.LENGTH)


def _of_prompts(run: _Run) -> tuple[int, float]:
    """Returns how many tokens of prompts a step computes, and the sum of what these attend to."""
    attended = sum(count * (work.num_computed + count / 2) for work, count in run.parts)
    return sum(count for _, count in run.parts), attended


def _lease_id(lease: SimLeg) -> bytes:
    return lease.leg.to_bytes(16, "big")


def _source(source: Any) -> tuple[SimWorker, SimLeg]:
    """Returns what a `PrefillStarted` of a simulated worker has in place of an address."""
    worker, lease = source
    return worker, lease
