"""Tests that what a router takes a worker for is what the worker says in its own session, whoever registers it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2, control_pb2_grpc, types_pb2
from services.core.errors import RoleGone, WorkerIdInUse
from services.rpc.status import from_call
from tests.support.cluster import Cluster, read, request
from tests.support.patience import HANG_S
from tests.support.scripted_worker import TEXT, ScriptedWorker

Description = control_pb2.WorkerDescription
PREFILL, DECODE = types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE


async def register(cluster: Cluster, description: Description) -> None:
    stub = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    await stub.Register(control_pb2.RegisterRequest(worker=description))


async def shown(cluster: Cluster, worker_id: str) -> control_pb2.WorkerStatus:
    status = await cluster.control.GetStatus(control_pb2.GetStatusRequest())
    return next(each for each in status.workers if each.worker.worker_id == worker_id)


def with_roles(description: Description, *roles: types_pb2.WorkerRole) -> Description:
    changed = Description()
    changed.CopyFrom(description)
    changed.roles[:] = roles
    return changed


async def test_nobody_else_takes_a_workers_role(cluster: Cluster, pair: Any) -> None:
    """Name and incarnation are no secrets: GetStatus shows them."""
    _, decode = pair
    seen = (await shown(cluster, "decode")).worker
    for _ in range(20):
        await register(cluster, with_roles(seen, PREFILL))
    assert list((await shown(cluster, "decode")).worker.roles) == [DECODE]
    _, text = await read(cluster.inference.GenerateStream(request()))
    assert text == TEXT
    assert decode.num_sessions == 1


CHANGES: dict[str, Callable[[Description], None]] = {
    "address": lambda each: setattr(each, "address", "127.0.0.1:1"),
    "blocks": lambda each: setattr(each, "num_blocks", 1 << 20),
    "fingerprint": lambda each: setattr(each.fingerprint, "kv", "0" * 32),
}


@pytest.mark.parametrize("what", CHANGES)
async def test_nobody_else_describes_a_worker_that_lives(cluster: Cluster, pair: Any, what: str) -> None:
    before = (await shown(cluster, "decode")).worker
    claim = with_roles(before, DECODE)
    CHANGES[what](claim)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await register(cluster, claim)
    assert isinstance(from_call(refused.value), WorkerIdInUse)
    assert (await shown(cluster, "decode")).worker == before


@pytest.mark.parametrize("what", ["address", "blocks", "fingerprint", "roles"])
async def test_a_lie_that_comes_first_does_not_last(cluster: Cluster, what: str) -> None:
    """Somebody registers a worker, at its own address or another, before the worker does."""
    worker = ScriptedWorker("decode", [])
    cluster.scripted.append(worker)
    await worker.start()
    claim = with_roles(worker.description(), *([PREFILL] if what == "roles" else [DECODE]))
    if what != "roles":
        CHANGES[what](claim)
    await register(cluster, claim)
    await cluster.join(worker)

    async def is_true() -> bool:
        return (await shown(cluster, "decode")).worker == worker.description()

    await cluster.until(is_true)


@pytest.mark.parametrize("what", CHANGES)
async def test_a_worker_that_says_it_is_another_has_no_session(cluster: Cluster, what: str) -> None:
    worker = ScriptedWorker("decode", [])
    cluster.scripted.append(worker)
    await worker.start()
    worker.claim = worker.description()
    CHANGES[what](worker.claim)
    await register(cluster, worker.description())

    async def refused() -> bool:
        return "is not what was registered" in (await shown(cluster, "decode")).reason

    await cluster.until(refused)
    worker.claim = None
    await cluster.join(worker)


async def test_a_worker_that_does_not_say_what_it_is_has_no_session(cluster: Cluster) -> None:
    worker = ScriptedWorker("decode", [])
    cluster.scripted.append(worker)
    await worker.start()
    worker.claim = Description()
    await register(cluster, worker.description())

    async def refused() -> bool:
        return "worker_id" in (await shown(cluster, "decode")).reason

    await cluster.until(refused)


async def test_new_roles_are_taken_over_and_told_in_the_log_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.router")
    worker = await cluster.add("mixed", worker_id="w")
    worker.role = "decode"

    async def changed() -> bool:
        return list((await shown(cluster, "w")).worker.roles) == [DECODE]

    await cluster.until(changed)
    num_said = worker._num_snapshots
    await cluster.until(lambda: _is(worker._num_snapshots > num_said + 20))
    assert caplog.text.count("worker w is now decode, no longer mixed") == 1
    assert worker.num_sessions == 1


async def _is(value: bool) -> bool:
    return value


async def test_a_role_that_was_only_taken_for_gone_is_there_again(cluster: Cluster) -> None:
    """A worker may give a role up and take it again, and refuse one command in between."""
    worker = await cluster.add("mixed", worker_id="w")
    worker.failure = RoleGone("this worker takes no prefill commands")
    assert (await read(cluster.inference.GenerateStream(request(), timeout=HANG_S)))[1] == TEXT
    assert list((await shown(cluster, "w")).worker.roles) == [PREFILL, DECODE]
