"""Runs a trace through a simulated cluster: the production coordinator, unchanged, over workers that are cost models.

Owns: arrivals, messages between router and workers, the router's turns and ticks. Never: a decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from services.core.config import DAY_S
from services.core.errors import BatonError, ConfigError
from services.core.hashing import ShortHash
from services.router.coordinator import Coordinator
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.coordinator import TICK_S
from services.router.coordinator.events import (
    Action,
    CancelLeg,
    Defect,
    EjectionChanged,
    EmitFailed,
    EmitFinished,
    EmitStarted,
    EmitTokens,
    LegEvent,
    RequestSpec,
    SendLeg,
    WorkerInfo,
)
from services.router.policy import Fingerprint, Load, Role
from services.router.policy.outliers import OutlierConfig
from services.sim.pool import PromptParts
from services.sim.profile import WorkerProfile
from services.sim.scheduler import Stream, WorkerRules
from services.sim.trace import TracedRequest
from services.sim.worker import SimWorker
from services.sim.world import World

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "mixed": Role.MIXED}
MESSAGE_S = 0.0005
"""How long a message between router and worker takes."""
_PATIENCE_S = 3600.0
_TIMES_ALONE = 10
"""A simulation in which requests live but nothing begins, comes out or ends for an hour of virtual time, and as many
times as long as the longest request takes alone, goes on for ever, or nearly: its router may wait for 1e9 s."""


@dataclass(frozen=True)
class Death:
    """Says that a worker's process dies."""

    worker_id: str
    at_s: float


ROUTER = CoordinatorConfig(model_context_tokens=1 << 20, outliers=OutlierConfig(slow_factor=0.0))
"""The router of a plan that names none. It splits all prompts, whatever that costs, and ejects nobody: what a slow
worker does to others shows only so."""


@dataclass(frozen=True)
class SimPlan:
    """Says which workers a cluster has, what each kind costs and does, and what happens to them."""

    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    profile: WorkerProfile = field(kw_only=True)
    decode_profile: WorkerProfile | None = None
    """The profile of decode workers; None if it is the same."""
    router: CoordinatorConfig = ROUTER
    deaths: tuple[Death, ...] = ()
    cold_start_s: float = 10.0
    """How long after its death a worker is back, with nothing in its memory; infinite for never."""
    slowness: tuple[tuple[str, float], ...] = ()
    """Workers, each with how many times as long its steps take."""
    unreported: tuple[tuple[str, float], ...] = ()
    """Workers, each with how many times as long its steps take by a cause that its reported figures do not show, for
    instance a machine that is throttled or shared."""
    capacities: tuple[tuple[str, float], ...] = ()
    """What workers declare as their capacities; 1 for all others."""
    rules: WorkerRules = field(default_factory=WorkerRules)
    knows_caches_at_once: bool = False
    """Whether the router knows, at each choice, what stands in the prefix caches at that moment. No real router can: it
    is what one that hears of changes by messages is compared with."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Tenants' weights, by the callers that the trace names; 1 for all others."""
    asked_tokens: int = 0
    """The output that every request asks for at most, where that is more than it gets: so the router does not know how
    long outputs will be. By default each asks for what it gets."""

    @property
    def worker_ids(self) -> list[str]:
        kinds = (("prefill", self.prefill), ("decode", self.decode), ("mixed", self.mixed))
        return [f"{name}-{number}" for name, count in kinds for number in range(count)]

    @property
    def cost_per_hour(self) -> float:
        of_decode = self.decode_profile or self.profile
        return (self.prefill + self.mixed) * self.profile.cost_per_hour + self.decode * of_decode.cost_per_hour


@dataclass(slots=True)
class Served:
    """Keeps what became of one request. Times are in seconds after its arrival."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    tenant: str = ""
    queue_s: float = 0.0
    ttft_s: float | None = None
    total_s: float | None = None
    """None if it failed."""
    cached_tokens: int = 0
    """Tokens of its prompt that a prefix cache had."""
    num_retries: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Returns the time per output token after the first; None if there is at most one, or it failed."""
        if self.total_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Ejected:
    """Says that the router has found a worker slower than its peers."""

    worker_id: str
    at_s: float
    reason: str


@dataclass(slots=True)
class Outcome:
    requests: list[Served]
    seconds: float
    """Virtual time from the first arrival to the last end, also of a request that failed."""
    gaps_s: dict[float, int]
    """How often each gap between two tokens of a stream occurred, rounded up to four digits: what keeps a bound does so
    before it is rounded too."""
    busy: dict[str, float]
    """The share of the time in which each worker computed."""
    bytes_moved: int
    num_preemptions: int
    ejections: list[Ejected]


def simulate(
    plan: SimPlan,
    trace: Sequence[TracedRequest],
    progress: Callable[[int], None] = lambda done: None,
    on_end: Callable[[Served], None] = lambda served: None,
) -> Outcome:
    """Returns what becomes of the trace's requests. `progress` is called with the number of requests that have ended,
    `on_end` with each that ends; what they raise ends the simulation.

    The same plan and trace give the same outcome. Every request ends once, and no block is left in use. Raises
    AssertionError if that is not so, and ConfigError if a request alone would take more than a day: the router's
    clock ticks all the time.
    """
    if (alone_s := _alone_s(plan, trace)) > DAY_S:
        raise ConfigError(f"the longest request alone takes {alone_s:.3g} s by these profiles, more than a day")
    return _Simulation(plan, trace, progress, on_end).run()


@dataclass(slots=True)
class _Message:
    """Keeps what a worker has said at one moment."""

    sent_s: float
    events: list[LegEvent]
    load: Load
    changes: dict[ShortHash, bool]
    """Blocks that its prefix cache has since then, or has no more."""


class _Simulation:
    def __init__(
        self,
        plan: SimPlan,
        trace: Sequence[TracedRequest],
        progress: Callable[[int], None],
        on_end: Callable[[Served], None],
    ) -> None:
        self._world = World()
        self._coordinator = Coordinator(plan.router)
        self._trace = trace
        self._progress = progress
        self._on_end = on_end
        self._served: list[Served] = []
        self._live: dict[str, Served] = {}
        self._prompts: dict[str, tuple[PromptParts, Stream]] = {}
        """Prompts and outputs of those that live."""
        self._rules = plan.rules
        self._asked_tokens = plan.asked_tokens
        self._weights = plan.weights
        self._knows_caches_at_once = plan.knows_caches_at_once
        self._reading_s = plan.profile.ms_per_request / 1e3
        self._num_ended = 0
        self._last_end_s = 0.0
        self._busy_s: dict[str, float] = {}
        """How long each worker had computed when the last request ended."""
        self._progress_s = 0.0
        self._patience_s = _patience_s(plan, trace)
        self._ejections: list[Ejected] = []
        self._gaps: dict[float, int] = {}
        self._ticking = False
        self._workers: dict[str, SimWorker] = {}
        self._dead: list[SimWorker] = []
        self._under_way: dict[SimWorker, list[_Message]] = {}
        """Messages of each worker that the router does not have yet, in order."""
        slowness = dict(plan.slowness)
        self._capacities, self._unreported = dict(plan.capacities), dict(plan.unreported)
        for worker_id in plan.worker_ids:
            roles = _ROLES[worker_id.partition("-")[0]]
            profile = plan.decode_profile if roles is Role.DECODE and plan.decode_profile else plan.profile
            self._join(worker_id, roles, profile.slowed(slowness.get(worker_id, 1.0)), incarnation=1)
        for death in plan.deaths:
            self._world.at(death.at_s, partial(self._die, death.worker_id, plan.cold_start_s))

    def _join(self, worker_id: str, roles: Role, profile: WorkerProfile, incarnation: int) -> None:
        info = WorkerInfo(
            worker_id,
            roles,
            incarnation,
            Fingerprint("simulated"),
            profile.block_size,
            profile.num_blocks,
            profile.max_model_len,
            profile.max_num_seqs,
            host_id=worker_id,
            capacity=self._capacities.get(worker_id, 1.0),
        )
        worker = self._workers[worker_id] = SimWorker(
            self._world,
            info,
            profile,
            self._tell,
            self._note_gap,
            rules=self._rules,
            host=self._workers.values() if profile.shares_host else (),
            is_followed=self._coordinator.config.policy.hash_prompts,
            unreported=self._unreported.get(worker_id, 1.0),
        )
        self._coordinator.worker_joined(info, self._world.now)
        self._coordinator.session_opened(worker_id, incarnation, self._world.now)
        self._coordinator.worker_events(worker_id, incarnation, (), worker.load(), self._world.now)

    def _die(self, worker_id: str, cold_start_s: float) -> None:
        worker = self._workers[worker_id]
        if worker.dead:
            return
        info, now = worker.info, self._world.now
        # What it has sent arrives, before its end is seen.
        events = [event for message in self._under_way.pop(worker, []) for event in message.events]
        events += worker.die()
        self._coordinator.worker_events(worker_id, info.incarnation, events, None, now)
        self._coordinator.worker_lost(worker_id, info.incarnation, now, crashed=True)
        self._turn()

        def come_back() -> None:
            self._dead.append(worker)
            self._join(worker_id, info.roles, worker.profile, info.incarnation + 1)
            self._turn()

        if cold_start_s != math.inf:
            self._world.after(cold_start_s, come_back)

    def run(self) -> Outcome:
        self._turn()
        self._arrive(0)
        while self._world.step():
            pass
        assert not self._live, f"{len(self._live)} requests did not end"
        self._coordinator.check_idle()
        for worker in self._workers.values():
            if not worker.dead:
                worker.check_idle()
        seconds = self._last_end_s
        return Outcome(
            self._served,
            seconds,
            self._gaps,
            {name: self._busy_s[name] / seconds if seconds else 0.0 for name in self._workers},
            sum(worker.bytes_fetched for worker in self._every()),
            sum(worker.num_preemptions for worker in self._every()),
            self._ejections,
        )

    def _every(self) -> list[SimWorker]:
        """Returns all workers, the dead ones too."""
        return [*self._dead, *self._workers.values()]

    def _arrive(self, number: int) -> None:
        if number == len(self._trace):
            return
        traced = self._trace[number]

        def arrive() -> None:
            self._submit(number, traced)
            self._arrive(number + 1)

        self._world.at(traced.at_s + self._reading_s, arrive)

    def _submit(self, number: int, traced: TracedRequest) -> None:
        served = Served(traced.at_s, traced.prompt_tokens, traced.output_tokens, traced.priority, traced.caller)
        self._served.append(served)
        prompt = PromptParts(traced.part_names(), traced.block_tokens)
        spec = RequestSpec(
            str(number),
            (1,) * traced.prompt_tokens,
            max(traced.output_tokens, self._asked_tokens),
            traced.priority,
            deadline_s=None if traced.deadline_s is None else self._world.now + traced.deadline_s,
            conversation=traced.session,
            tenant=traced.caller,
            weight=self._weights.get(traced.caller, 1.0),
            block_hashes={size: prompt.block_hashes(size) for size in self._coordinator.block_sizes_to_hash()},
        )
        try:
            self._coordinator.submit(spec, self._world.now)
        except BatonError as error:
            self._end(served, error)
            return
        self._progress_s = self._world.now
        self._live[spec.request_id], self._prompts[spec.request_id] = served, (prompt, Stream())
        if not self._ticking:
            self._ticking = True
            self._world.after(TICK_S, self._tick)
        self._turn()

    def _tick(self) -> None:
        if self._world.now - self._progress_s > self._patience_s:
            raise AssertionError(
                f"{len(self._live)} requests live, and none has come any further for {self._patience_s:.0f} s"
            )
        self._coordinator.tick(self._world.now)
        self._turn()
        self._ticking = bool(self._live)
        if self._ticking:
            self._world.after(TICK_S, self._tick)

    def _tell(self, worker: SimWorker, events: Sequence[LegEvent], load: Load) -> None:
        """Sends what a worker says. What it says at one moment is one message, as it is of a real one."""
        # What is known at once is taken at each choice.
        changes = {} if self._knows_caches_at_once else worker.take_cache_changes()
        under_way = self._under_way.setdefault(worker, [])
        if under_way and under_way[-1].sent_s == self._world.now:
            message = under_way[-1]
            message.events += events
            message.changes.update(changes)
            message.load = load
            return
        under_way.append(_Message(self._world.now, list(events), load, changes))
        self._world.after(MESSAGE_S, partial(self._deliver, worker))

    def _deliver(self, worker: SimWorker) -> None:
        if not worker.dead:
            message = self._under_way[worker].pop(0)
            info = worker.info
            self._cache_changed(worker, message.changes)
            self._coordinator.worker_events(
                info.worker_id, info.incarnation, message.events, message.load, self._world.now
            )
            self._turn()

    def _cache_changed(self, worker: SimWorker, changes: Mapping[ShortHash, bool]) -> None:
        if changes:
            self._coordinator.cache_changed(
                worker.info.worker_id,
                worker.info.incarnation,
                whole=False,
                stored=[hash for hash, there in changes.items() if there],
                removed=[hash for hash, there in changes.items() if not there],
            )

    def _turn(self) -> None:
        """Does what a turn of the router's event loop does after its inputs."""
        coordinator = self._coordinator
        if self._knows_caches_at_once and coordinator.placement_is_due:
            for worker in self._workers.values():
                self._cache_changed(worker, worker.take_cache_changes())
        while True:
            for action in coordinator.take_actions():
                self._do(action)
            if not coordinator.placement_is_due:
                return
            coordinator.place(self._world.now)

    def _do(self, action: Action) -> None:
        match action:
            case SendLeg():
                worker, (prompt, stream) = self._workers[action.worker_id], self._prompts[action.spec.request_id]
                # It ends where the model would end it, which only the worker finds out.
                told = replace(action, max_tokens=self._live[action.spec.request_id].output_tokens)
                self._world.after(MESSAGE_S, lambda: worker.receive(told, prompt, stream))
            case CancelLeg():
                worker, leg = self._workers[action.worker.worker_id], action.leg
                self._world.after(MESSAGE_S, lambda: worker.cancel(leg))
            case EmitStarted():
                self._progress_s = self._world.now
                self._live[action.request_id].cached_tokens = action.cached_tokens
            case EmitTokens():
                self._progress_s = self._world.now
                served = self._live[action.request_id]
                if served.ttft_s is None:
                    served.ttft_s = self._world.now - served.at_s
            case EmitFinished():
                served = self._ended(action.request_id)
                served.total_s = self._world.now - served.at_s
                served.queue_s, served.num_retries = action.summary.queue_s, action.summary.num_retries
                assert action.summary.num_output_tokens == served.output_tokens
                self._end(served, None)
            case EmitFailed():
                self._end(self._ended(action.request_id), action.error)
            case EjectionChanged():
                if (ejection := action.ejection) is not None:
                    now = self._world.now
                    self._ejections.append(Ejected(action.worker_id, now, ejection.reason(now)))
            case Defect():
                raise action.error
            case _:
                pass

    def _ended(self, request_id: str) -> Served:
        del self._prompts[request_id]
        return self._live.pop(request_id)

    def _end(self, served: Served, error: BatonError | None) -> None:
        served.error = "" if error is None else error.reason
        self._num_ended += 1
        self._last_end_s = self._progress_s = self._world.now
        if self._num_ended == len(self._trace):  # a step for a request that has failed may go on after this
            for worker in self._every():
                name = worker.info.worker_id
                self._busy_s[name] = self._busy_s.get(name, 0.0) + worker.busy_until_now_s
        self._progress(self._num_ended)
        self._on_end(served)

    def _note_gap(self, seconds: float, count: int) -> None:
        key = _rounded_up(seconds)
        self._gaps[key] = self._gaps.get(key, 0) + count


def _rounded_up(seconds: float) -> float:
    """Returns the next number of four digits; the same for one that has no more but for a rounding error."""
    if seconds <= 0:
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(seconds)) - 3)
    return round(math.ceil(seconds / digit - 1e-6) * digit, 15)


def _alone_s(plan: SimPlan, trace: Sequence[TracedRequest]) -> float:
    """Returns how long the longest request computes on the slowest worker, where nothing else is."""
    longest = max((each.prompt_tokens + each.output_tokens for each in trace), default=0)
    output = max((each.output_tokens for each in trace), default=0)
    alone_ms = 0.0
    for profile in (plan.profile, plan.decode_profile or plan.profile):
        chunk = min(longest, profile.max_num_batched_tokens)
        chunks_ms = -(-longest // chunk) * profile.prefill_ms(chunk) if chunk else 0.0
        attended_ms = longest**2 / 2 * profile.ms_per_attended_token
        alone_ms = max(alone_ms, chunks_ms + attended_ms + output * profile.decode_ms(1, longest))
    return _slowest(plan) * alone_ms / 1e3


def _patience_s(plan: SimPlan, trace: Sequence[TracedRequest]) -> float:
    longest = max((each.prompt_tokens + each.output_tokens for each in trace), default=0)
    alone_s = 0.0
    for profile in (plan.profile, plan.decode_profile or plan.profile):
        computing_s = profile.step_s(longest, profile.max_num_seqs, longest * profile.max_num_seqs, longest**2 / 2)
        moving_s = longest * profile.kv_bytes_per_token / profile.transfer_bytes_per_s
        alone_s = max(alone_s, computing_s + moving_s + profile.transfer_latency_ms / 1e3)
    return _PATIENCE_S + _TIMES_ALONE * _slowest(plan) * alone_s


def _slowest(plan: SimPlan) -> float:
    """Returns how many times as long as by its profile a worker's steps may take."""
    return math.prod(max([1.0, *(times for _, times in causes)]) for causes in (plan.slowness, plan.unreported))
