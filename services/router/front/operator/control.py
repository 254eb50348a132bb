"""Serves ControlService: what operators see and may do."""

from __future__ import annotations

import asyncio
import dataclasses
import os

from baton.v1 import control_pb2, control_pb2_grpc
from services.core.clock import Clock
from services.core.config import DAY_S
from services.core.errors import InvalidRequest, UnknownRequest
from services.router.catalogue import Catalogue
from services.router.front.operator.explanation_messages import explained
from services.router.front.operator.timeline_messages import now_of, told
from services.router.status import components_of, pair_status, pairs, status
from services.router.telemetry.recent_requests import LONGEST_S, RecentRequest
from services.router.telemetry.slo import Objectives
from services.router.telemetry.timelines import Timelines
from services.router.workers.description import check_worker_id
from services.rpc.interceptors import CallContext
from services.rpc.parameters import MAX_LABEL_CHARS

FULL_NAME = "baton.v1.ControlService"
DEFAULT_DRAIN_MS = 30_000
DEFAULT_TIMELINES = 500
MOST_TIMELINES = 4096
_AT_ONCE = 64


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    def __init__(
        self, catalogue: Catalogue, *, incarnation: int, clock: Clock, timelines: Timelines, objectives: Objectives
    ) -> None:
        self._catalogue = catalogue
        self._timelines = timelines
        self._objectives = objectives
        self._incarnation = incarnation
        self._clock = clock
        self._started_s = clock.now()
        self.port = 0
        self.http_port = 0
        """The router's HTTP port; 0 if it serves no HTTP."""
        self.has_http_tls = False

    async def GetStatus(
        self, request: control_pb2.GetStatusRequest, context: CallContext
    ) -> control_pb2.GetStatusResponse:
        found = status(self._catalogue, self._clock.now())
        found.router_incarnation, found.router_pid = self._incarnation, os.getpid()
        found.port, found.http_port, found.has_http_tls = self.port, self.http_port, self.has_http_tls
        found.up_ms = round((self._clock.now() - self._started_s) * 1000)
        found.components.extend(components_of(self._catalogue, found))
        found.pairs.extend(pair_status(worker, pair) for worker, pair in pairs(self._catalogue))
        return found

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
