"""Tests what a router does with workers that say that they load."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2, control_pb2_grpc, types_pb2
from services.core.errors import InvalidRequest
from services.rpc.status import from_call
from tests.support.cluster import CONFIG, Cluster, read, request
from tests.support.scripted_worker import MODEL_ID, OUTPUT, TEXT, ScriptedWorker


def loading(**changes: Any) -> control_pb2.RegisterRequest:
    fields = {
        "worker_id": "decode",
        "roles": [types_pb2.WORKER_ROLE_DECODE],
        "model_id": MODEL_ID,
        "ready_within_ms": 60_000,
        "progress": "load: weights",
    }
    return control_pb2.RegisterRequest(loading=control_pb2.LoadingWorker(**{**fields, **changes}))


async def test_a_stream_goes_on_by_replay_when_its_worker_has_loaded(model: str) -> None:
    """Status shows it meanwhile; without its announcement the stream would end after 0.2 s."""
    cluster = Cluster(replace(CONFIG, model=model, no_worker_timeout_s=0.2))
    await cluster.start()
    registry = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    await cluster.add("prefill")
    first = await cluster.add("decode")
    first.decode_gate.clear()
    reading = asyncio.create_task(read(cluster.inference.GenerateStream(request())))
    await first.until(lambda: first.commands)
    await first.stop()

    async def is_shown() -> bool:
        await registry.Register(loading())
        [found] = [each for each in (await cluster.status()).workers if each.worker.worker_id == "decode"]
        if found.state != control_pb2.WORKER_STATE_LOADING:
            return False
        assert "load: weights" in found.reason
        assert not found.has_session
        return True

    await cluster.until(is_shown)
    second = ScriptedWorker("decode", OUTPUT, cluster.leases)
    cluster.scripted.append(second)
    await second.start()
    await cluster.join(second)
    events, text = await reading
    assert text == TEXT
    assert events[-1].completion.workers.retries == 1
    await cluster.idle()
    await cluster.stop()


@pytest.mark.parametrize(
    ("field", "value"),
    [("worker_id", "a b"), ("roles", []), ("roles", [0]), ("ready_within_ms", -1)],
)
async def test_what_cannot_be_is_refused(cluster: Cluster, field: str, value: Any) -> None:
    registry = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await registry.Register(loading(**{field: value}))
    error = from_call(refused.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == f"loading.{field}"
    assert not (await cluster.status()).workers


async def test_one_of_a_model_that_is_not_served_is_not_remembered(cluster: Cluster) -> None:
    registry = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    await registry.Register(loading(model_id="other"))
    assert not (await cluster.status()).workers
