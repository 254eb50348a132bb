"""Runs a real router over grpc.aio with scripted workers behind it, and asks what clients ask.

Owns: the router and its workers. Never: what a test expects of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.core.clock import Clock
from services.router.main import Router, RouterConfig
from tests.support.patience import HANG_S
from tests.support.recording import recording_tracer
from tests.support.scripted_worker import MODEL_ID, ScriptedWorker
from tests.support.text_model import byte_tokenizer
from tests.support.trusted import CLUSTER_TOKEN, dial

TOKENIZER = byte_tokenizer()
TEXT = "the baton is passed 🙂."
OUTPUT = list(TOKENIZER.encode(TEXT, add_special_tokens=False).ids)
CONFIG = RouterConfig(
    served_model_name=MODEL_ID,
    port=0,
    control_port=0,
    heartbeat_s=0.05,
    silence_s=5.0,
    register_s=0.05,
    metrics_port=-1,
    canaries=False,  # a scripted worker counts every command
)


class Cluster:
    """Keeps one router and the workers that a test starts; all are stopped at the end."""

    def __init__(self, config: RouterConfig, clock: Clock | None = None) -> None:
        self.spans = InMemorySpanExporter()
        self.router = Router(config, recording_tracer(self.spans), CLUSTER_TOKEN, clock)
        self.workers: list[ScriptedWorker] = []
        self.leases: dict[bytes, asyncio.Event] = {}

    async def start(self) -> None:
        await self.router.start()
        self.channel = dial(self.router.address)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.control_channel = dial(self.router.control_address)
        self.control = control_pb2_grpc.ControlServiceStub(self.control_channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.control_channel.close()
        await self.router.stop()
        for worker in self.workers:
            await worker.stop()

    async def add(self, role: str, **facts: Any) -> ScriptedWorker:
        """Returns a worker that has joined."""
        worker = ScriptedWorker(role, OUTPUT, self.leases, **facts)
        self.workers.append(worker)
        await worker.start()
        await self.join(worker)
        return worker

    async def join(self, worker: ScriptedWorker) -> None:
        """Registers, again and again as workers do, until the router holds a session."""

        async def joined() -> bool:
            try:
                await worker.register(self.control_channel)
            except grpc.aio.AioRpcError as error:
                if code_of(error) is not grpc.StatusCode.UNAVAILABLE:  # as while a model's text is fetched
                    raise
                return False
            status = await self.control.GetStatus(control_pb2.GetStatusRequest())
            ready = control_pb2.WORKER_STATE_READY
            return any(w.worker.worker_id == worker.worker_id and w.state == ready for w in status.workers)

        await self.until(joined)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(HANG_S):
            while not await condition():  # noqa: ASYNC110  # the condition is an RPC: only asking tells
                await asyncio.sleep(0.01)

    async def assert_idle(self) -> None:
        async def idle() -> bool:
            return self.router.coordinator.num_live == 0 and not any(worker.num_legs for worker in self.workers)

        await self.until(idle)
        self.router.coordinator.check_idle()


def request(text: str = "hello", **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, **fields)


async def read(call: Any) -> tuple[list[inference_pb2.GenerateStreamResponse], str]:
    events = [event async for event in call]
    return events, "".join(event.chunk.text for event in events)


def code_of(error: grpc.aio.AioRpcError) -> grpc.StatusCode:
    return error.code()
