"""Provides a ControlService that says what a test has it say, and the messages to say it with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from baton.v1 import control_pb2, control_pb2_grpc, types_pb2
from tests.support.trusted import CLUSTER_TOKEN

ROLES = {"prefill": types_pb2.WORKER_ROLE_PREFILL, "decode": types_pb2.WORKER_ROLE_DECODE}
OBJECTIVES = {"ttft_ms": 500.0, "tpot_ms": 50.0, "itl_ms": 200.0, "e2e_ms": 5000.0, "queue_ms": 100.0}


class ScriptedControl(control_pb2_grpc.ControlServiceServicer):
    """Answers as a router does whose timelines have changed in the order in which they were set: those that live are
    always among them."""

    def __init__(self, incarnation: int = 7) -> None:
        self.status = status()
        self.status.router_incarnation = incarnation
        self.explained: list[control_pb2.ExplainedRequest] = []
        self.asked_after: list[int] = []
        """What was asked for with each ListTimelines."""
        self.answers = asyncio.Event()
        """Set unless a test has calls wait for it."""
        self.answers.set()
        self.waiting = asyncio.Event()
        """Set once a call does."""
        self._incarnation = incarnation
        self._changes = 0
        self._timelines: dict[int, tuple[int, control_pb2.Timeline]] = {}

    def set(self, *timelines: control_pb2.Timeline) -> None:
        for each in timelines:
            self._changes += 1
            self._timelines[each.number] = (self._changes, each)

    async def GetStatus(
        self, request: control_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetStatusResponse:
        assert dict(context.invocation_metadata())["authorization"] == f"Bearer {CLUSTER_TOKEN}"
        if not self.answers.is_set():
            self.waiting.set()
            await self.answers.wait()
        return self.status

    async def ListTimelines(
        self, request: control_pb2.ListTimelinesRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ListTimelinesResponse:
        assert request.most <= 4096
        self.asked_after.append(request.after)
        heard = [each for each in self._timelines.values() if is_live(each[1]) or each[0] > request.after]
        changed = sorted(heard, key=lambda each: each[0])
        return control_pb2.ListTimelinesResponse(
            timelines=[timeline for _, timeline in changed[-request.most :]],
            newest=self._changes,
            router_incarnation=self._incarnation,
            objectives=control_pb2.Objectives(**OBJECTIVES),
        )

    async def Explain(
        self, request: control_pb2.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ExplainResponse:
        found = [each for each in self.explained if each.request_id == request.request_id]
        if not found:
            await context.abort(grpc.StatusCode.NOT_FOUND, "nothing is remembered of it")
        return control_pb2.ExplainResponse(requests=found)


def is_live(timeline: control_pb2.Timeline) -> bool:
    return timeline.phase != control_pb2.REQUEST_PHASE_ENDED


@contextlib.asynccontextmanager
async def serving(service: ScriptedControl, port: int = 0) -> AsyncIterator[str]:
    """Serves until the block ends, and yields the address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    control_pb2_grpc.add_ControlServiceServicer_to_server(service, server)
    target = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield target
    finally:
        await server.stop(None)


def status(*workers: control_pb2.WorkerStatus, **fields: Any) -> control_pb2.GetStatusResponse:
    """Returns a status with these workers, or with one of each role, and their pair."""
    message = control_pb2.GetStatusResponse(router_pid=42, ready=True, num_queued=3, num_decoding=1, **fields)
    message.workers.extend(workers or [worker("decode-0", "decode"), worker("prefill-0", "prefill")])
    message.models.add(model_id="tiny", ready=True)
    message.pairs.add(
        prefill="prefill-0",
        decode="decode-0",
        state=control_pb2.PAIR_STATE_PROVEN,
        transport=types_pb2.TRANSPORT_SHM,
    )
    return message


def worker(
    worker_id: str, *roles: str, blocks: Sequence[int] = (1, 2, 3, 4, 90), reason: str = "", state: str = "READY"
) -> control_pb2.WorkerStatus:
    """Returns a worker with so many blocks importing, leased, active, cached and free."""
    message = control_pb2.WorkerStatus(
        state=control_pb2.WorkerState.Value(f"WORKER_STATE_{state}"), load_age_ms=12, has_session=True, reason=reason
    )
    message.worker.worker_id = worker_id
    message.worker.roles.extend(ROLES[role] for role in roles)
    load = message.load
    load.blocks_importing, load.blocks_leased, load.blocks_active, load.blocks_cached, load.blocks_free = blocks
    load.num_running, load.num_waiting = 5, 6
    for role in roles:
        getattr(load, f"{role}_step").ms = {"prefill": 41.25, "decode": 12.5}[role]
    return message


def split_timeline(number: int, **fields: Any) -> control_pb2.Timeline:
    """Returns a request that was split, and succeeded: the first token after 120 ms, four more in 280 ms."""
    message = control_pb2.Timeline(
        number=number,
        request_id=f"req-{number}",
        model="tiny",
        trace_id="ab" * 16,
        age_us=2_000_000,
        phase=control_pb2.REQUEST_PHASE_ENDED,
        prompt_tokens=1536,
        cached_tokens=32,
        output_tokens=5,
        ttft_us=120_000,
        total_us=400_000,
        tpot_us=70_000,
        longest_itl_us=90_000,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        outcome="length",
        timings=types_pb2.PhaseTimings(
            queue_ms=4.0,
            prefill_wait_ms=2.0,
            prefill_compute_ms=108.0,
            transfer_ms=60.0,
            transfer_overlapped_ms=56.0,
            transfer_exposed_ms=4.0,
            transfer_bytes=3 << 20,
            transfer_blocks=96,
            transport=types_pb2.TRANSPORT_SHM,
            decode_wait_ms=1.0,
            decode_run_ms=275.0,
            ttft_ms=120.0,
            total_ms=400.0,
        ),
    )
    for name, start_us, end_us, worker_id in (
        ("tokenize", 0, 2_000, ""),
        ("queue", 2_000, 6_000, ""),
        ("prefill", 6_000, 119_000, "prefill-0"),
        ("place", 8_000, 9_000, ""),
        ("decode", 9_000, 399_000, "decode-0"),
    ):
        message.stages.add(
            name=name, start_us=start_us, end_us=end_us, worker_id=worker_id, attempt=1, outcome="done", leg=number
        )
    message.MergeFrom(control_pb2.Timeline(**fields))
    return message


def live_timeline(number: int, **fields: Any) -> control_pb2.Timeline:
    """Returns a request that has waited in the queue since it arrived, 1.5 s ago."""
    message = control_pb2.Timeline(
        number=number,
        request_id=f"req-{number}",
        model="tiny",
        age_us=1_500_000,
        phase=control_pb2.REQUEST_PHASE_QUEUED,
        prompt_tokens=100,
        **fields,
    )
    message.stages.add(name="queue", start_us=0, attempt=1)
    return message


def failed_timeline(number: int, outcome: str, **fields: Any) -> control_pb2.Timeline:
    """Returns a request that failed 300 ms after it arrived, without a token."""
    return control_pb2.Timeline(
        number=number,
        request_id=f"req-{number}",
        model="tiny",
        age_us=3_000_000,
        phase=control_pb2.REQUEST_PHASE_ENDED,
        outcome=outcome,
        failure=f"it was {outcome}",
        **{"total_us": 300_000, **fields},
    )
