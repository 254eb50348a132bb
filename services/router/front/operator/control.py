"""Serves ControlService: what operators see and may do."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os

from baton.v1 import control_pb2, control_pb2_grpc
from services.core.clock import Clock
from services.core.config import DAY_S
from services.core.errors import InvalidRequest, UnknownRequest
from services.router.catalogue import Catalogue, ServedModel
from services.router.conductor import Conductor
from services.router.coordinator.request import Phase
from services.router.coordinator.workers import Pair, Worker, WorkerState
from services.router.front.labels import MAX_LABEL_CHARS
from services.router.front.operator.explained import explained
from services.router.front.operator.timelines import now_of, told
from services.router.policy import BreakEven, PrefixBreakEven
from services.router.policy.health import Health, HealthRecord
from services.router.telemetry.recent_requests import LONGEST_S, RecentRequest
from services.router.telemetry.slo import Objectives
from services.router.telemetry.timelines import Timelines
from services.router.workers.description import check_worker_id
from services.rpc.interceptors import CallContext

FULL_NAME = "baton.v1.ControlService"
DEFAULT_DRAIN_MS = 30_000
DEFAULT_TIMELINES = 500
MOST_TIMELINES = 4096
_AT_ONCE = 64

_STATES = {
    WorkerState.JOINING: control_pb2.WORKER_STATE_JOINING,
    WorkerState.READY: control_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: control_pb2.WORKER_STATE_DRAINING,
    WorkerState.LOST: control_pb2.WORKER_STATE_DOWN,
    WorkerState.LEFT: control_pb2.WORKER_STATE_LEFT,
}
_UNHEALTHY = {
    Health.NEW: control_pb2.WORKER_STATE_JOINING,
    Health.DOWN: control_pb2.WORKER_STATE_DOWN,
    Health.PROBING: control_pb2.WORKER_STATE_DOWN,
}
"""The state that is shown for a worker with an open session instead of READY, if its health is one of these."""
PAIR_STATES = {
    Health.UP: control_pb2.PAIR_STATE_PROVEN,
    Health.RISING: control_pb2.PAIR_STATE_PROVEN,
    Health.DOWN: control_pb2.PAIR_STATE_BROKEN,
    Health.PROBING: control_pb2.PAIR_STATE_BROKEN,
}


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    def __init__(
        self, catalogue: Catalogue, *, incarnation: int, clock: Clock, timelines: Timelines, objectives: Objectives
    ) -> None:
        self._catalogue = catalogue
        self._timelines = timelines
        self._objectives = objectives
        self._incarnation = incarnation
        self._clock = clock
        self.http_port = 0
        """The router's HTTP port; 0 if it serves no HTTP."""

    async def GetStatus(
        self, request: control_pb2.GetStatusRequest, context: CallContext
    ) -> control_pb2.GetStatusResponse:
        models = self._catalogue.all()
        phases = self._catalogue.phases()
        return control_pb2.GetStatusResponse(
            router_incarnation=self._incarnation,
            router_pid=os.getpid(),
            ready=self._catalogue.ready,
            workers=[
                self._worker(model.conductor, worker)
                for model in models
                for worker in model.conductor.coordinator.workers()
            ],
            num_queued=phases[Phase.QUEUED],
            num_prefilling=phases[Phase.PREFILLING],
            num_parked=phases[Phase.PARKED],
            num_decoding=phases[Phase.BINDING] + phases[Phase.DECODING],
            models=[_model(model, self._clock.now()) for model in models],
            http_port=self.http_port,
            pairs=[_pair(worker, pair) for model in models for worker, pair in model.conductor.pairs()],
        )

    async def Drain(self, request: control_pb2.DrainRequest, context: CallContext) -> control_pb2.DrainResponse:
        deadline_ms = request.deadline_ms if request.HasField("deadline_ms") else DEFAULT_DRAIN_MS
        if deadline_ms < 0:
            raise InvalidRequest("deadline_ms", f"is {deadline_ms}; it must not be negative")
        deadline_s = min(deadline_ms / 1000, DAY_S)
        check_worker_id("worker_id", request.worker_id)
        conductor = self._catalogue.with_worker(request.worker_id).conductor
        num_finished, num_migrated = await conductor.drain_worker(request.worker_id, deadline_s)
        return control_pb2.DrainResponse(num_finished=num_finished, num_migrated=num_migrated)

    async def ListRecentRequests(
        self, request: control_pb2.ListRecentRequestsRequest, context: CallContext
    ) -> control_pb2.ListRecentRequestsResponse:
        within_ms = request.within_ms if request.HasField("within_ms") else LONGEST_S * 1000
        if within_ms < 0:
            raise InvalidRequest("within_ms", f"is {within_ms}; it must not be negative")
        now, model = self._clock.now(), self._catalogue.get(request.model or None)
        since_s = now - min(within_ms / 1000, LONGEST_S)
        return control_pb2.ListRecentRequestsResponse(
            requests=[_recent(each, now) for each in model.metrics.recent.since(since_s)]
        )

    async def ListTimelines(
        self, request: control_pb2.ListTimelinesRequest, context: CallContext
    ) -> control_pb2.ListTimelinesResponse:
        most = request.most if request.HasField("most") else DEFAULT_TIMELINES
        if not 1 <= most <= MOST_TIMELINES:
            raise InvalidRequest("most", f"is {most}; it must be in [1, {MOST_TIMELINES}]")
        found = self._timelines.changed_since(request.after, most)
        newest, now, messages = self._timelines.newest, self._clock.now(), []
        for index, each in enumerate(found):
            messages.append(told(each, now_of(self._catalogue, each), now))
            if index % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)  # thousands take as long as a decode step
        return control_pb2.ListTimelinesResponse(
            timelines=messages,
            newest=newest,
            router_incarnation=self._incarnation,
            objectives=control_pb2.Objectives(**dataclasses.asdict(self._objectives)),
        )

    async def Explain(self, request: control_pb2.ExplainRequest, context: CallContext) -> control_pb2.ExplainResponse:
        if not request.request_id:
            raise InvalidRequest("request_id", "is empty")
        found = explained(self._catalogue.all(), request.request_id, self._clock.now())
        if not found:
            named = request.request_id[:MAX_LABEL_CHARS]
            raise UnknownRequest(
                f"nothing is remembered of a request {named!r}: it was refused on arrival, ended too long ago, or "
                "never came"
            )
        return control_pb2.ExplainResponse(requests=found)

    def _worker(self, conductor: Conductor, worker: Worker) -> control_pb2.WorkerStatus:
        description = worker.info.description
        assert description is not None, "every worker has described itself"
        status = control_pb2.WorkerStatus(
            worker=description,
            state=state_of(worker),
            reason=why_unready(worker, self._clock.now()),
            num_requests=len(set(worker.legs.values())),
        )
        link = conductor.links.get(worker.info.worker_id)
        if link is not None:
            status.has_session = link.is_open
            if link.load is not None and worker.load_s is not None:
                status.load.CopyFrom(link.load)
                status.load_age_ms = round((self._clock.now() - worker.load_s) * 1000)
        return status


def state_of(worker: Worker) -> control_pb2.WorkerState:
    state = _STATES[worker.state]
    if worker.state is WorkerState.READY:
        usual = control_pb2.WORKER_STATE_EJECTED if worker.ejection is not None else state
        state = _UNHEALTHY.get(worker.health.state, usual)
    return state


def why_unready(worker: Worker, now: float) -> str:
    """Returns, for people, why the worker is not ready, or what it is blamed for; empty when all is well."""
    ejected = "" if worker.ejection is None else worker.ejection.reason(now)
    return worker.reason or reason_of(worker.health) or ejected


def _model(model: ServedModel, now: float) -> control_pb2.ModelStatus:
    coordinator = model.conductor.coordinator
    phases = coordinator.phases()
    return control_pb2.ModelStatus(
        model_id=model.model_id,
        ready=model.ready,
        context_tokens=model.context_tokens,
        num_workers=sum(worker.has_session for worker in coordinator.workers()),
        num_queued=phases[Phase.QUEUED],
        num_live=phases.total(),
        kv_groups=[control_pb2.KVGroup(**group._asdict()) for group in coordinator.kv_groups()],
        policy=model.policy,
        split_break_even=_break_even(found) if (found := coordinator.split_break_even(now)) is not None else None,
        prefix_break_even=_of_prefixes(prefix) if (prefix := coordinator.prefix_break_even()) is not None else None,
    )


_MOST_TOKENS = 1 << 31
"""No prompt is so long: where splitting pays only beyond, it pays for none."""


def tokens_to_split(found: BreakEven) -> int | None:
    """Returns from how many uncached tokens on splitting pays; None if for no prompt."""
    return None if found.tokens > _MOST_TOKENS else math.ceil(found.tokens)


def _break_even(found: BreakEven) -> control_pb2.SplitBreakEven:
    return control_pb2.SplitBreakEven(
        prefill=found.prefill_id,
        decode=found.decode_id,
        tokens=tokens_to_split(found),
        handoff_ms=found.handoff_ms,
    )


def _of_prefixes(found: PrefixBreakEven) -> control_pb2.PrefixBreakEven:
    return control_pb2.PrefixBreakEven(
        source=found.source_id,
        target=found.target_id,
        tokens=None if found.tokens > _MOST_TOKENS else math.ceil(found.tokens),
        fixed_ms=found.fixed_ms,
        token_ms=found.token_ms,
        num_seen=found.num_seen,
    )


def _recent(request: RecentRequest, now: float) -> control_pb2.RecentRequest:
    return control_pb2.RecentRequest(
        age_us=round((now - request.arrived_s) * 1e6),
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        max_tokens=request.max_tokens,
        priority=request.priority,
        ttft_us=None if request.ttft_s is None else round(request.ttft_s * 1e6),
        total_us=round(request.total_s * 1e6),
        failed=request.failed,
    )


def _pair(worker: Worker, pair: Pair) -> control_pb2.PairStatus:
    status = control_pb2.PairStatus(
        prefill=pair.source.worker_id,
        decode=worker.info.worker_id,
        state=PAIR_STATES.get(pair.health.state, control_pb2.PAIR_STATE_UNPROVEN),
        reason=reason_of(pair.health),
    )
    if pair.timings is not None and pair.timings.HasField("transport"):
        status.transport = pair.timings.transport
    if (bytes_per_s := worker.sources.bytes_per_s(pair.source.worker_id)) is not None:
        status.bytes_per_s = int(bytes_per_s)
    return status


def reason_of(health: HealthRecord) -> str:
    """Returns, for people, why the worker or pair is not fully trusted; empty if it is."""
    match health.state:
        case Health.UP:
            return ""
        case Health.NEW:
            return f"not proven yet: {health.reason}" if health.reason else "not proven yet"
        case Health.RISING:
            return f"back again; it was down: {health.reason}"
        case _:
            return f"{health.state.value}: {health.reason}"
