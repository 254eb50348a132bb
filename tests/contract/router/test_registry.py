"""Tests who may join a router under which name, and what a worker may say of itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2, control_pb2_grpc
from services.core.errors import InvalidRequest, Overloaded, WorkerIdInUse
from services.core.ids import new_incarnation
from services.rpc.status import from_call
from tests.support.cluster import CONFIG, Cluster, read, request
from tests.support.scripted_worker import TEXT, ScriptedWorker

Code = grpc.StatusCode


async def refusal(cluster: Cluster, description: control_pb2.WorkerDescription) -> Any:
    """Returns the error with which it may not join."""
    stub = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Register(control_pb2.RegisterRequest(worker=description))
    return from_call(refused.value)


async def test_a_second_process_of_one_name_is_refused_while_the_first_lives(cluster: Cluster, pair: Any) -> None:
    """The first does not notice: it keeps its session, and the request its stream."""
    _, first = pair
    first.decode_gate.clear()
    call = cluster.inference.GenerateStream(request())
    await first.until(lambda: first.commands)
    second = ScriptedWorker("decode", first.output[:-1], cluster.leases)
    cluster.scripted.append(second)
    await second.start()
    for _ in range(3):
        error = await refusal(cluster, second.description())
        assert isinstance(error, WorkerIdInUse)
        assert "'decode'" in str(error)
    first.decode_gate.set()
    events, text = await read(call)
    assert text == TEXT
    assert events[-1].completion.workers.retries == 0
    assert (first.num_sessions, second.num_sessions) == (1, 0)

    first.cut()  # as when its process dies
    await cluster.until(lambda: _lost(cluster, "decode"))
    await cluster.join(second)
    assert second.num_sessions == 1
    assert isinstance(await refusal(cluster, first.description()), WorkerIdInUse), "the name is the second's now"


async def _lost(cluster: Cluster, worker_id: str) -> bool:
    return not cluster.router.coordinator.workers.get(worker_id).has_session


async def test_one_that_was_never_reached_does_not_keep_its_name(cluster: Cluster) -> None:
    """A process is only known to live by its session."""
    worker = ScriptedWorker("decode", [])
    cluster.scripted.append(worker)
    await worker.start()
    claim = worker.description()
    claim.incarnation, claim.address = new_incarnation(), "127.0.0.1:1"
    stub = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    await stub.Register(control_pb2.RegisterRequest(worker=claim))
    await cluster.join(worker)
    assert worker.num_sessions == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("address", text) for text in ("myhost", "myhost:0", "myhost:70000", ":50051", "a b:1", "a..b:1")),
        *(("address", text) for text in ("0.0.0.0:5000", "[::]:5000", "host:５", "host:1\n", "\x1b[2J:1")),
        *(("address", text) for text in ("999.0.0.1:1", "x" * 300 + ":1", "::1:5000", "[::g]:1")),
        *(("worker_id", text) for text in ("", "a b", "x" * 129, "\x1b[2J", "../../etc", "ünï", "-flag", "a\n")),
        *((name, -1) for name in ("pid", "num_blocks", "max_model_len", "max_num_seqs", "vocab_size")),
        *((name, (1 << 31) - 1) for name in ("num_blocks", "max_num_seqs", "max_model_len")),
        *(("capacity", number) for number in (0.0, -1.0, 1e-4, 1e7, math.inf, math.nan)),
        ("layout.block_size", 1 << 20),
        ("layout.num_layers", -1),
        *(("roles", roles) for roles in ([], [7], [1, 1], [1, 0], [2, 3])),
        ("incarnation", 0),
    ],
    ids=lambda value: ascii(value)[:30],
)
async def test_what_a_worker_says_is_bounded_field_by_field(cluster: Cluster, field: str, value: Any) -> None:
    worker = ScriptedWorker("decode", [])
    cluster.scripted.append(worker)
    await worker.start()
    description: Any = worker.description()
    owner, _, name = field.rpartition(".")
    message = getattr(description, owner) if owner else description
    if isinstance(value, list):
        getattr(message, name)[:] = value
    else:
        setattr(message, name, value)
    error = await refusal(cluster, description)
    assert isinstance(error, InvalidRequest)
    assert error.field == f"worker.{field}"
    assert error.description.isprintable()
    status = await cluster.control.GetStatus(control_pb2.GetStatusRequest())
    assert not status.workers


async def test_more_than_the_bound_are_refused_and_those_there_stay(model: str) -> None:
    cluster = Cluster(replace(CONFIG, model=model, max_workers=3))
    await cluster.start()
    pair = [await cluster.add("prefill"), await cluster.add("decode")]
    stub = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    description = pair[0].description()
    description.address = "127.0.0.1:1"
    for number in range(50):  # none of them is ever reached
        description.worker_id, description.incarnation = f"claim-{number}", number + 1
        await stub.Register(control_pb2.RegisterRequest(worker=description))
        assert len(cluster.router.coordinator.workers.all()) <= 3
    third = await cluster.add("decode", worker_id="third")
    fourth = third.description()
    fourth.worker_id = "fourth"
    assert isinstance(await refusal(cluster, fourth), Overloaded)
    assert (await cluster.inference.Generate(request())).output.text == TEXT
    await cluster.idle()
    await cluster.stop()


async def test_drain_names_a_worker_that_could_be_one(cluster: Cluster) -> None:
    for worker_id in ("", "\x1b[2J", "x" * 1000):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.control.Drain(control_pb2.DrainRequest(worker_id=worker_id))
        error = from_call(refused.value)
        assert isinstance(error, InvalidRequest)
        assert error.field == "worker_id"


async def test_one_that_cannot_be_dialled_is_told_once_and_has_a_reason(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    worker = ScriptedWorker("decode", [])
    cluster.scripted.append(worker)
    await worker.start()
    claim = worker.description()
    claim.address = "127.0.0.1:1"
    stub = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    for _ in range(5):

        async def lost() -> bool:
            await stub.Register(control_pb2.RegisterRequest(worker=claim))
            (status,) = (await cluster.control.GetStatus(control_pb2.GetStatusRequest())).workers
            return status.reason.startswith("UNAVAILABLE: ")

        await cluster.until(lost)
    said = [
        record.getMessage() for record in caplog.records if "cannot be reached at 127.0.0.1:1" in record.getMessage()
    ]
    assert len(said) == 1
