"""Tests ControlService.Drain over real grpc.aio: the worker finishes or is relieved, then it leaves."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2, types_pb2, worker_pb2
from tests.support.cluster import Cluster, code_of, read, request
from tests.support.scripted_worker import TEXT, ScriptedWorker


async def drain(cluster: Cluster, worker_id: str, deadline_ms: int) -> tuple[int, int]:
    answer = await cluster.control.Drain(control_pb2.DrainRequest(worker_id=worker_id, deadline_ms=deadline_ms))
    return answer.num_finished, answer.num_migrated


async def test_what_is_not_finished_in_time_is_moved(cluster: Cluster, pair: Any) -> None:
    _, decode = pair
    decode.decode_gate.clear()
    call = cluster.inference.GenerateStream(request())
    await decode.until(lambda: decode.commands)
    other = await cluster.add("decode", worker_id="other")
    assert await drain(cluster, "decode", 50) == (0, 1)
    assert not decode.num_sessions, "it has left"
    assert (await read(call))[1] == TEXT
    assert other.commands


async def test_what_runs_is_finished_first(cluster: Cluster, pair: Any) -> None:
    _, decode = pair
    decode.decode_gate.clear()
    call = cluster.inference.GenerateStream(request())
    await decode.until(lambda: decode.commands)
    draining = asyncio.create_task(drain(cluster, "decode", 60_000))
    await decode.until(lambda: decode.leaving is not None)
    decode.decode_gate.set()
    assert (await read(call))[1] == TEXT
    assert await draining == (1, 0)


async def test_a_deadline_beyond_all_time(cluster: Cluster, pair: Any) -> None:
    assert await drain(cluster, "prefill", (1 << 63) - 1) == (0, 0)


async def test_two_operators_at_once(cluster: Cluster, pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "services.router.conductor")
    prefill, _ = pair
    prefill.leaves = False
    draining = [asyncio.create_task(drain(cluster, "prefill", 60_000)) for _ in range(2)]

    async def both_have_come() -> bool:
        return caplog.messages.count("draining worker prefill") == 2

    await cluster.until(both_have_come)
    await prefill.until(lambda: prefill.told_to_leave)
    prefill.cut(orderly=True)
    assert await asyncio.gather(*draining) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("name", ["nobody", "gone"])
async def test_who_is_not_there_cannot_leave(cluster: Cluster, name: str) -> None:
    gone = await cluster.add("decode", worker_id="gone")
    gone.cut()
    await gone.until(lambda: not gone.num_sessions)

    async def lost() -> bool:
        return not cluster.router.conductor.links

    await cluster.until(lost)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await drain(cluster, name, 0)
    expected = grpc.StatusCode.NOT_FOUND if name == "nobody" else grpc.StatusCode.UNAVAILABLE
    assert code_of(refused.value) is expected
    if name == "nobody":
        assert refused.value.details() == "no worker 'nobody'; there is gone"


async def test_one_that_is_lost_meanwhile_did_not_leave(cluster: Cluster, pair: Any) -> None:
    """It is told again when it is back: the same process may not have heard it."""
    _, decode = pair
    decode.leaves = False
    draining = asyncio.create_task(drain(cluster, "decode", 60_000))
    await decode.until(lambda: decode.told_to_leave)
    decode.told_to_leave = False
    decode.cut()
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await draining
    assert code_of(lost.value) is grpc.StatusCode.UNAVAILABLE
    await decode.until(lambda: not decode.num_sessions)
    await decode.register(cluster.control_channel)
    await decode.until(lambda: decode.told_to_leave)


async def test_another_process_gets_its_name_when_it_has_left(cluster: Cluster, pair: Any) -> None:
    _, decode = pair
    successor = ScriptedWorker("decode", decode.output[:-1], cluster.leases)
    cluster.scripted.append(successor)
    await successor.start()
    decode.leaves = False
    draining = asyncio.create_task(drain(cluster, "decode", 60_000))
    await decode.until(lambda: decode.told_to_leave)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await successor.register(cluster.control_channel)
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert not draining.done()
    decode.cut(orderly=True)
    assert await draining == (0, 0)
    await cluster.join(successor)


async def test_last_words_of_a_worker_that_leaves_count(cluster: Cluster) -> None:
    """The session ends in the next moment, and with it the legs of both phases."""
    mixed = await cluster.add("mixed")
    mixed.decode_gate.clear()
    call = cluster.inference.GenerateStream(request())
    await mixed.until(lambda: any(isinstance(command, worker_pb2.DecodeCommand) for command in mixed.commands))
    [leg] = [command.leg for command in mixed.commands if isinstance(command, worker_pb2.DecodeCommand)]
    rest = types_pb2.SequenceTokens(leg=leg, position=1, token_ids=mixed.output[1:])
    rest.finish.reason = types_pb2.FINISH_REASON_STOP
    rest.finish.stop_token_id = mixed.output[-1]
    mixed.say(worker_pb2.LegEvent(tokens=rest))
    mixed.cut(orderly=True)
    assert (await read(call))[1] == TEXT
    assert len(mixed.commands) == 2, "nothing was computed again"


async def test_one_that_left_is_not_shown_as_lost(cluster: Cluster, pair: Any) -> None:
    """A worker that was lost is an alarm for operators, and one that left in order is none."""
    prefill, _ = pair
    await drain(cluster, "decode", 60_000)
    prefill.cut(orderly=False)

    async def gone() -> bool:
        return not cluster.router.conductor.links

    await cluster.until(gone)
    status = await cluster.control.GetStatus(control_pb2.GetStatusRequest())
    shown = {each.worker.worker_id: (each.state, each.reason) for each in status.workers}
    assert shown["decode"] == (control_pb2.WORKER_STATE_LEFT, "it left in order")
    assert shown["prefill"][0] == control_pb2.WORKER_STATE_DOWN
    await cluster.join(prefill)
    status = await cluster.control.GetStatus(control_pb2.GetStatusRequest())
    assert control_pb2.WORKER_STATE_READY in {each.state for each in status.workers}
