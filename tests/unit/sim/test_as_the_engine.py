"""Tests a simulated worker against the engine's own scheduler: the same arrivals, the same steps.

Both run in one virtual time over a device whose steps cost what the profile says, in pools so tight that sequences
wait, are preempted and come back, handoffs are refused, and leases keep others out. At every step they have the same
sequences in the batch, in the same order, and the same blocks in the same classes; they report the same at the same
times. The simulated worker takes steps together, the engine does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.hashing import num_blocks_for
from services.engine.schedule import scheduler as engine_scheduler
from services.engine.schedule.prefix import cacheable_prefix, hash_prompt
from services.engine.schedule.sequence import (
    Admitted,
    Mode,
    SampledToken,
    SamplingParams,
    Sequence,
    StepPlan,
    StepResult,
    StoppingParams,
    Token,
)
from services.kv.handoff_admission import AdmissionPolicy, EngineRoom
from services.kv.pool import BlockPool, Holder
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    HandoffRef,
    ImportReady,
    LegEvent,
    PrefillStarted,
    RequestSpec,
    SendLeg,
    Tokens,
    WorkerInfo,
)
from services.router.policy import Fingerprint, Load, Role
from services.sim.pool import PromptParts
from services.sim.profile import WorkerProfile
from services.sim.scheduler import Stream, WorkerRules
from services.sim.worker import SimWorker
from services.sim.world import World


@dataclass(frozen=True)
class Arrival:
    at_s: float
    kind: str
    """The prompt may be computed here and its output too ("whole"), or under a lease ("prefill"), or be handed over
    ("import")."""
    num_tokens: int
    num_output: int
    priority: int
    cancelled_s: float | None
    """How long after its arrival it is given up; None for never."""
    is_released: bool
    """Whether its lease is released then instead, if the prompt is computed."""
    transfer_s: float
    age_s: float


@dataclass(frozen=True)
class Case:
    profile: WorkerProfile
    roles: Role
    arrivals: tuple[Arrival, ...]


BLOCK = 4


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws pools of which each arrival may need all. Times have odd fractions, so that no two things coincide."""
    num_blocks = draw(st.integers(6, 24))
    profile = WorkerProfile(
        "drawn",
        ms_per_prefill_token=draw(st.sampled_from([0.713, 4.371])),
        ms_per_decode_step=draw(st.sampled_from([10.0137, 61.0371])),
        ms_per_decode_sequence=1.0371,
        ms_per_context_token=0.01373,
        ms_per_attended_token=0.001371,
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(2, 40)),
        transfer_latency_ms=0.0,
        transfer_bytes_per_s=1e15,
    )
    kinds = st.sampled_from(draw(st.sampled_from([["whole"], ["import"], ["whole", "import"], ["whole", "prefill"]])))
    arrivals = []
    for number in range(draw(st.integers(2, 14))):
        kind = draw(kinds)
        num_tokens = draw(st.integers(1, num_blocks * BLOCK - 2) | st.integers(1, 2 * BLOCK))
        num_output = draw(st.integers(1 + (kind == "import"), num_blocks * BLOCK - num_tokens))
        ends = draw(st.none() | st.integers(1, 4000))
        arrivals.append(
            Arrival(
                draw(st.integers(0, 1500)) / 1e3 + (number + 1) * 1.1e-6,
                kind,
                num_tokens,
                num_output,
                draw(st.integers(0, 1)),
                # A lease that nobody ends would keep its blocks for ever.
                None if ends is None and kind != "prefill" else (ends or 700) / 1e3 + 3.1e-7,
                draw(st.booleans()),
                draw(st.integers(1, 300)) / 1e3,
                draw(st.sampled_from([0.0, 1.5])),
            )
        )
    return Case(profile, draw(st.sampled_from([Role.DECODE, Role.MIXED])), tuple(arrivals))


@dataclass
class Report:
    """Keeps what a worker has reported, with times."""

    admitted: list[tuple[int, int]] = field(default_factory=list)
    """(leg, cached tokens) in that order."""
    refused: list[tuple[int, int, int]] = field(default_factory=list)
    """(leg, blocks needed, blocks missing)."""
    ended_s: dict[int, float] = field(default_factory=dict)


class EngineWorker:
    """Runs the engine's scheduler and pool as `Engine` and `ImportIntake` do, one step at a time."""

    def __init__(self, world: World, case: Case, on_step: Any) -> None:
        profile = case.profile
        self.report = Report()
        self.scheduler = engine_scheduler.Scheduler(
            BlockPool(profile.num_blocks, profile.block_size),
            engine_scheduler.SchedulerConfig(
                profile.max_num_seqs,
                profile.max_num_batched_tokens,
                max_model_len=10_000,
                max_leased_blocks=profile.num_blocks // 2 if case.roles is Role.MIXED else None,
            ),
        )
        self._world = world
        self._profile = profile
        self._on_step = on_step
        self._arrivals: dict[int, Sequence] = {}
        self._leases: dict[int, tuple[int, ...]] = {}
        self._imports: dict[int, tuple[Sequence, list[int], list[int]]] = {}
        self._policy = AdmissionPolicy()
        self._plan: StepPlan | None = None

    @property
    def load(self) -> tuple[int, ...]:
        ledger = self.scheduler.pool.ledger()
        arriving = sum(len(sequence.token_ids) for sequence in self._arrivals.values())
        return (
            ledger.importing,
            ledger.leased,
            ledger.active,
            ledger.cached,
            ledger.free,
            self.scheduler.num_running,
            self.scheduler.num_waiting + len(self._arrivals),
            self.scheduler.queued_prefill_tokens + arriving,
            len(self._imports),
            len(self._leases),
        )

    @property
    def running(self) -> list[tuple[int, int]]:
        return [(sequence.seq_id, len(sequence.token_ids)) for sequence in self.scheduler._batch]

    @property
    def preempted(self) -> list[int]:
        return [sequence.seq_id for sequence in self.scheduler._admission.preempted]

    def receive(self, leg: int, arrival: Arrival) -> None:
        sequence = Sequence(
            leg,
            [1000 * leg + number for number in range(arrival.num_tokens)],
            arrival.num_tokens,
            SamplingParams(),
            StoppingParams(arrival.num_output),
            self._world.now,
            mode=Mode.PREFILL_ONLY if arrival.kind == "prefill" else Mode.GENERATE,
            priority=arrival.priority,
        )
        hash_prompt(sequence, self._profile.block_size)
        if arrival.kind == "import":
            self._reserve(sequence, arrival.age_s)
            return
        self._arrivals[leg] = sequence
        self._begin()

    def _reserve(self, sequence: Sequence, age_s: float) -> None:
        pool, scheduler = self.scheduler.pool, self.scheduler
        prefix = pool.match_prefix(cacheable_prefix(sequence, pool.block_size))
        pool.acquire(prefix, Holder.SEQUENCE)
        num_fresh = num_blocks_for(len(sequence.token_ids), pool.block_size) - len(prefix)
        num_sequences = scheduler.num_running + scheduler.num_waiting + len(self._arrivals)
        room = EngineRoom(
            pool.num_available,
            pool.num_blocks,
            num_sequences,
            scheduler.config.max_num_seqs,
            scheduler.num_preempted,
        )
        key = (10_000 + sequence.seq_id).to_bytes(16, "big")
        refusal = self._policy.decide(key, num_fresh + 1, age_s, room, len(self._imports), self._world.now)
        if refusal is not None:
            pool.release(prefix, Holder.SEQUENCE)
            self.report.refused.append((sequence.seq_id, refusal.needed_blocks, refusal.missing_blocks))
            return
        self.report.admitted.append((sequence.seq_id, len(prefix) * pool.block_size))
        self._imports[sequence.seq_id] = sequence, prefix, pool.allocate(num_fresh, Holder.IMPORT)

    def import_ready(self, leg: int) -> None:
        sequence, prefix, fresh = self._imports.pop(leg)
        self.scheduler.pool.transfer(fresh, Holder.IMPORT, Holder.SEQUENCE)
        self.scheduler.adopt(sequence, prefix, fresh, 1)
        self._begin()

    def cancel(self, leg: int) -> None:
        pool = self.scheduler.pool
        if self._arrivals.pop(leg, None) is None:
            self.scheduler.abort(leg)
        if leg in self._leases:
            pool.release(self._leases.pop(leg), Holder.LEASE)
        if leg in self._imports:
            _, prefix, fresh = self._imports.pop(leg)
            pool.release(fresh, Holder.IMPORT)
            pool.release(prefix, Holder.SEQUENCE)
        self._begin()

    def _begin(self) -> None:
        if self._plan is not None:
            return
        for sequence in self._arrivals.values():
            self.scheduler.add(sequence)
        self._arrivals.clear()
        plan = self.scheduler.schedule(self._world.now)
        self._take(self.scheduler.take_events())
        if not plan.sequences:
            return
        self._plan = plan
        contexts = sum(part.start + 1 for part in plan.sequences if part.is_decode)
        attended = sum(
            part.num_tokens * (part.start + part.num_tokens / 2) for part in plan.sequences if not part.is_decode
        )
        step_s = self._profile.step_s(plan.num_prefill_tokens, plan.num_decodes, contexts, attended)
        self._world.after(step_s, self._end)
        self._world.after(0.37 * step_s, self._on_step)

    def _end(self) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None
        sampled = {part.seq_id: (SampledToken(1),) for part in plan.sequences if part.rows}
        self._take(self.scheduler.update(plan, StepResult(sampled), self._world.now))
        self.scheduler.check()
        self._begin()

    def _take(self, events: Many[Any]) -> None:
        for event in events:
            match event:
                case Admitted():
                    self.report.admitted.append((event.seq_id, event.num_cached))
                    if self.scheduler.sequences[event.seq_id].mode is Mode.PREFILL_ONLY:
                        self._leases[event.seq_id] = event.block_ids
                case Token() if event.finish is not None:
                    self.report.ended_s[event.seq_id] = event.now
                    if event.seq_id in self._leases:  # there is nothing to hand over
                        self.scheduler.pool.release(self._leases.pop(event.seq_id), Holder.LEASE)


class Pair:
    """Runs both workers side by side, and compares them in the middle of every step of the engine's."""

    def __init__(self, case: Case) -> None:
        self.world = World()
        self.report = Report()
        self.num_compared = 0
        self._case = case
        self.engine = EngineWorker(self.world, case, self.compare)
        self.worker = self._worker(case.profile, case.roles)
        self._lease: Any = None

    def _worker(self, profile: WorkerProfile, roles: Role) -> SimWorker:
        info = WorkerInfo(
            "w",
            roles,
            1,
            Fingerprint("f"),
            profile.block_size,
            profile.num_blocks,
            profile.max_model_len,
            profile.max_num_seqs,
        )
        return SimWorker(self.world, info, profile, self._tell, lambda seconds, count: None, rules=WorkerRules())

    def run(self) -> None:
        for leg, arrival in enumerate(self._case.arrivals, start=1):
            self.world.at(arrival.at_s, lambda leg=leg, arrival=arrival: self._arrive(leg, arrival))
            if arrival.cancelled_s is not None:
                self.world.at(arrival.at_s + arrival.cancelled_s, lambda leg=leg: self._cancel(leg))
        while self.world.step():
            pass
        self.worker.check_idle()
        self.engine.scheduler.check_idle()

    def compare(self) -> None:
        load, scheduler = self.worker.load(), self.worker.scheduler
        self.num_compared += 1
        assert [(leg, work.context) for leg, work in scheduler.running.items()] == self.engine.running
        assert [work.leg for work in scheduler.preempted] == self.engine.preempted
        assert scheduler.num_preemptions == self.engine.scheduler.num_preemptions
        assert (*_figures(load), len(scheduler.leases)) == self.engine.load
        assert load.prefix_tokens_queried == self.engine.scheduler.prefix_tokens_queried
        assert load.prefix_tokens_hit == self.engine.scheduler.prefix_tokens_hit

    def _arrive(self, leg: int, arrival: Arrival) -> None:
        handoff = None
        if arrival.kind == "import":
            handoff = HandoffRef(b"", self._leased(10_000 + leg, arrival))
        self.worker.receive(self._command(leg, arrival, handoff), PromptParts(), Stream())
        self.engine.receive(leg, arrival)

    def _leased(self, leg: int, arrival: Arrival) -> Any:
        """Returns the lease of a prompt that takes another worker as long as the transfer is to take."""
        token_ms = arrival.transfer_s * 1e3 / arrival.num_tokens
        source = self._worker(WorkerProfile("source", token_ms, 1.0, 0.0, transfer_latency_ms=0.0), Role.PREFILL)
        source.receive(self._command(leg, dataclasses.replace(arrival, kind="prefill")), PromptParts(), Stream())
        return self._lease

    def _command(self, leg: int, arrival: Arrival, handoff: HandoffRef | None = None) -> SendLeg:
        token_ids = (1,) * arrival.num_tokens
        return SendLeg(
            Role.PREFILL if arrival.kind == "prefill" else Role.DECODE,
            self.worker.info,
            leg,
            RequestSpec(str(leg), token_ids, arrival.num_output, arrival.priority),
            arrival.num_output,
            token_ids,
            0,
            None,
            1,
            handoff,
            arrival.age_s,
        )

    def _cancel(self, leg: int) -> None:
        lease = self.worker.scheduler.leases.get(leg)
        if lease is not None and lease.sealed_s is not None and self._case.arrivals[leg - 1].is_released:
            self.worker.release(lease)
        else:
            self.worker.cancel(leg)
        self.engine.cancel(leg)

    def _tell(self, worker: SimWorker, events: Many[LegEvent], load: Load) -> None:
        for event in events:
            match event:
                case PrefillStarted() if event.leg >= 10_000:
                    self._lease = event.source
                case DecodeAdmitted() | PrefillStarted():
                    self.report.admitted.append((event.leg, event.cached_tokens))
                case DecodeRefused():
                    self.report.refused.append((event.leg, event.needed_blocks, event.missing_blocks))
                case ImportReady():
                    self.engine.import_ready(event.leg)
                case Tokens() if event.finish is not None:
                    self.report.ended_s[event.leg] = self.world.now


def _figures(load: Load) -> tuple[int, ...]:
    return (
        load.blocks_importing,
        load.blocks_leased,
        load.blocks_active,
        load.blocks_cached,
        load.blocks_free,
        load.num_running,
        load.num_waiting,
        load.queued_prefill_tokens,
        load.num_importing,
    )


@given(cases())
def test_the_same_arrivals_take_the_same_steps(case: Case) -> None:
    pair = Pair(case)
    pair.run()
    assert pair.report.admitted == pair.engine.report.admitted
    assert pair.report.refused == pair.engine.report.refused
    assert pair.report.ended_s == pytest.approx(pair.engine.report.ended_s)
