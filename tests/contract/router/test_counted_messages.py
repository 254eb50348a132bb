"""Tests that what a worker's one message would become is counted before it is parsed."""

from __future__ import annotations

import asyncio
import time

import pytest
from google.rpc import status_pb2

from baton.v1 import control_pb2, types_pb2, worker_pb2
from tests.support.router_harness import TEXT, Cluster, read, request

pytestmark = pytest.mark.clock

HUGE = {
    "legs": worker_pb2.SessionResponse(live_legs=worker_pb2.LiveLegs(newest_leg=1, legs=range(1 << 20))),
    "logprobs": worker_pb2.SessionResponse(
        events=[
            worker_pb2.LegEvent(
                tokens=types_pb2.SequenceTokens(leg=99, logprobs=[types_pb2.TokenLogprobs()] * 1_000_000)
            )
        ]
    ),
    "tokens": worker_pb2.SessionResponse(
        events=[worker_pb2.LegEvent(tokens=types_pb2.SequenceTokens(leg=99, token_ids=[1] * (7 << 20)))]
    ),
    "bytes": worker_pb2.SessionResponse(
        events=[worker_pb2.LegEvent(started=worker_pb2.PrefillStarted(leg=99, lease_id=bytes(9 << 20)))]
    ),
}


@pytest.mark.parametrize("what", HUGE)
async def test_a_huge_message_ends_its_session_and_stops_nobody(cluster: Cluster, what: str) -> None:
    for role in ("prefill", "decode"):
        await cluster.add(role)
    liar = await cluster.add("decode", worker_id="liar")
    liar.say(HUGE[what])
    await liar.until(lambda: not liar.num_sessions)
    began_s, longest_s = time.monotonic(), 0.0
    for _ in range(20):
        await asyncio.sleep(0.01)
        longest_s, began_s = max(longest_s, time.monotonic() - began_s), time.monotonic()
    assert longest_s < 1.0
    assert (await read(cluster.inference.GenerateStream(request())))[1] == TEXT


async def test_a_huge_reason_is_not_kept(cluster: Cluster) -> None:
    await cluster.add("prefill")
    await cluster.add("decode")
    liar = await cluster.add("prefill", worker_id="liar")
    liar.prefill_gate.clear()
    calls = [asyncio.create_task(read(cluster.inference.GenerateStream(request()))) for _ in range(4)]
    await liar.until(lambda: liar.commands)
    status = status_pb2.Status(code=14, message="x" * (60 << 10))
    liar.say(worker_pb2.LegEvent(failed=worker_pb2.LegFailed(leg=liar.commands[0].leg, status=status)))
    liar.prefill_gate.set()
    await asyncio.gather(*calls)
    answer = await cluster.control.GetStatus(control_pb2.GetStatusRequest())
    assert answer.ByteSize() < 8192
