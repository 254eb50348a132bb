"""Tests a request that the router fails on, beside others that stream: over real sessions, nobody else notices."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from baton.v1 import worker_pb2
from services.router.coordinator.events import SendLeg
from services.router.workers import wire
from tests.support.cluster import Cluster, read, request
from tests.support.scripted_worker import TEXT, ScriptedWorker

POISONED = "poisoned"


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of one request cannot be encoded."""
    request_of = wire.request_of

    def raises(command: SendLeg, traceparent: str) -> worker_pb2.SessionRequest:
        if command.spec.label == POISONED:
            raise ValueError("Value out of range: secret")
        return request_of(command, traceparent)

    monkeypatch.setattr(wire, "request_of", raises)


async def _status(cluster: Cluster) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.inference.Generate(request(request_id=POISONED))
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.usefixtures("poison")
async def test_others_stream_on(
    cluster: Cluster, pair: tuple[ScriptedWorker, ScriptedWorker], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    decode.decode_gate.clear()
    calls = [cluster.inference.GenerateStream(request(request_id=f"r{number}")) for number in range(3)]
    readers = [asyncio.create_task(read(call)) for call in calls]
    await decode.until(lambda: len(decode.commands) == 3)
    with caplog.at_level(logging.ERROR):
        code, details = await _status(cluster)
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in details
    assert "Value out of range: secret" in caplog.text, "the log has the whole of it"
    decode.decode_gate.set()
    for reader in readers:
        assert (await reader)[1] == TEXT
    assert (prefill.num_sessions, decode.num_sessions) == (1, 1)
    assert len(prefill.commands) == 3
    await cluster.idle()


@pytest.mark.usefixtures("poison")
async def test_queued_poison_breaks_no_worker_that_joins(cluster: Cluster) -> None:
    """It is placed while the session of an innocent worker is read."""
    poisoned = asyncio.create_task(_status(cluster))
    calls = [cluster.inference.GenerateStream(request(request_id=f"r{number}")) for number in range(3)]
    readers = [asyncio.create_task(read(call)) for call in calls]

    async def queued() -> bool:
        return cluster.router.coordinator.num_live == 4

    await cluster.until(queued)
    workers = [await cluster.add("prefill"), await cluster.add("decode")]
    assert (await poisoned)[0] is grpc.StatusCode.INTERNAL
    for reader in readers:
        assert (await reader)[1] == TEXT
    assert [worker.num_sessions for worker in workers] == [1, 1]
    assert all(worker.state.value == "ready" for worker in cluster.router.coordinator.workers.all())
    assert not any(worker.health.num_failures for worker in cluster.router.coordinator.workers.all())
    await cluster.idle()
