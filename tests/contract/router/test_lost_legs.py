"""Tests workers that lose commands without a word, or hold what nobody knows of: their heartbeats say so. How long a
worker may take over what it has is tested without one (unit/router/test_silent_legs.py)."""

from __future__ import annotations

import pytest

from baton.v1 import types_pb2, worker_pb2
from tests.support.cluster import Cluster, read, request
from tests.support.scripted_worker import TEXT, ScriptedWorker

Pair = tuple[ScriptedWorker, ScriptedWorker]


@pytest.mark.parametrize("loses", ["prefill", "decode"])
async def test_a_leg_that_is_lost_is_placed_again(cluster: Cluster, pair: Pair, loses: str) -> None:
    """It is placed again at once, since the worker's next heartbeat does not list it."""
    worker = pair[0] if loses == "prefill" else pair[1]
    worker.num_to_lose = 1
    _, text = await read(cluster.inference.GenerateStream(request()))
    assert text == TEXT
    assert len(worker.commands) == 2
    await cluster.idle()


async def test_an_unsplit_sequence_that_is_lost_is_placed_again(cluster: Cluster) -> None:
    decode = await cluster.add("decode")
    decode.num_to_lose = 1
    _, text = await read(cluster.inference.GenerateStream(request()))
    assert text == TEXT
    await cluster.idle()


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
async def test_a_leg_that_nobody_knows_is_cancelled(cluster: Cluster, role: str) -> None:
    worker = await cluster.add(role)
    worker.phantom_legs = [4711, 4712]
    await worker.until(lambda: {4711, 4712} <= set(worker.cancelled))
    worker.phantom_legs = []
    assert worker.num_sessions == 1


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
    await cluster.idle()
