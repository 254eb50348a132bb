"""Tests workers that accept commands and never begin them, lose them without a word, or hold what nobody knows of.

Their heartbeats are healthy all the while. No request waits for ever, and no leg is left at a worker.
"""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from baton.v1 import types_pb2, worker_pb2
from tests.support.router_harness import TEXT, Cluster, read, request
from tests.support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.clock

Pair = tuple[ScriptedWorker, ScriptedWorker]


def impatient(cluster: Cluster, **config: float) -> None:
    """The bounds of phases, shorter than anyone would set them."""
    book = cluster.router.coordinator._book
    book.config = replace(book.config, **config)  # type: ignore[arg-type]


@pytest.mark.parametrize("loses", ["prefill", "decode"])
async def test_a_leg_that_is_lost_is_placed_again(cluster: Cluster, pair: Pair, loses: str) -> None:
    """It is placed again at once, since the worker's next heartbeat does not list it."""
    worker = pair[0] if loses == "prefill" else pair[1]
    worker.num_to_lose = 1
    _, text = await read(cluster.inference.GenerateStream(request()))
    assert text == TEXT
    assert len(worker.commands) == 2
    await cluster.assert_idle()


async def test_an_unsplit_sequence_that_is_lost_is_placed_again(cluster: Cluster) -> None:
    decode = await cluster.add("decode")
    decode.num_to_lose = 1
    _, text = await read(cluster.inference.GenerateStream(request()))
    assert text == TEXT
    await cluster.assert_idle()


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("decode",), ("mixed",)])
async def test_a_leg_that_is_never_begun_is_placed_again(cluster: Cluster, roles: tuple[str, ...]) -> None:
    """The worker has nothing else to do."""
    impatient(cluster, answer_timeout_s=0.3)
    workers = [await cluster.add(role) for role in roles]
    workers[0].num_to_sit_on = 1
    _, text = await read(cluster.inference.GenerateStream(request()))
    assert text == TEXT
    assert set(workers[0].cancelled) == {workers[0].commands[0].leg}, "it was given up there"
    await cluster.assert_idle()


async def test_a_handoff_that_is_admitted_and_goes_no_further(cluster: Cluster, pair: Pair) -> None:
    """Its tokens stop to come, and its worker works on nothing."""
    impatient(cluster, answer_timeout_s=0.3)
    decode = pair[1]
    decode.decode_gate.clear()
    call = cluster.inference.GenerateStream(request())
    await decode.until(lambda: decode.cancelled)
    decode.decode_gate.set()
    _, text = await read(call)
    assert text == TEXT
    assert len(decode.commands) >= 2
    await cluster.assert_idle()


async def test_a_busy_worker_is_not_blamed_for_its_queue(cluster: Cluster, pair: Pair) -> None:
    """A request waits there no longer than in the router's own queue."""
    prefill, _ = pair
    impatient(cluster, answer_timeout_s=0.2, queue_timeout_s=1.0)
    prefill.num_running = 1
    prefill.num_to_sit_on = 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.inference.Generate(request())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(prefill.commands) == 1
    assert not cluster.router.coordinator.worker("prefill").health.num_failures
    await cluster.assert_idle()


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
async def test_a_leg_that_nobody_knows_is_cancelled(cluster: Cluster, role: str) -> None:
    worker = await cluster.add(role)
    worker.phantom_legs = [4711, 4712]
    await worker.until(lambda: {4711, 4712} <= set(worker.cancelled))
    worker.phantom_legs = []
    assert worker.num_sessions == 1


async def test_a_worker_that_lists_no_end_of_legs_harms_itself_only(cluster: Cluster, pair: Pair) -> None:
    prefill, _ = pair
    prefill.phantom_legs = list(range(10_000, 30_000))
    _, text = await read(cluster.inference.GenerateStream(request()))
    assert text == TEXT
    prefill.phantom_legs = []
    await cluster.assert_idle()


async def test_three_lost_legs_end_a_request(cluster: Cluster, pair: Pair) -> None:
    prefill, _ = pair
    prefill.num_to_lose = 3
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.inference.Generate(request())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await cluster.assert_idle()


async def test_a_leg_that_ends_in_the_message_that_no_longer_lists_it_has_ended(cluster: Cluster, pair: Pair) -> None:
    """Its last tokens are counted before its absence."""
    decode = pair[1]
    decode.decode_gate.clear()
    call = cluster.inference.GenerateStream(request())
    await decode.until(lambda: decode.commands)
    (command,) = decode.commands
    rest = decode.output[command.output_base + 1 :]
    tokens = types_pb2.SequenceTokens(leg=command.leg, position=command.output_base + 1, token_ids=rest)
    tokens.finish.reason = types_pb2.FINISH_REASON_STOP
    tokens.finish.stop_token_id = rest[-1]
    decode.num_to_lose = 1  # should it be placed again, nothing would come of it
    decode.say(
        worker_pb2.SessionResponse(
            events=[worker_pb2.LegEvent(tokens=tokens)],
            load=types_pb2.LoadSnapshot(sequence_number=decode.next_snapshot(), blocks_free=decode.num_blocks),
            live_legs=worker_pb2.LiveLegs(newest_leg=command.leg),
        )
    )
    _, text = await read(call)
    assert text == TEXT
    assert len(decode.commands) == 1
    decode.decode_gate.set()
    await cluster.assert_idle()
