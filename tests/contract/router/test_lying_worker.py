"""Tests workers whose sessions say anything: extremes, others' legs, events in any order. Others are not disturbed."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.v1 import worker_pb2
from tests.support.cluster import Cluster, read, request
from tests.support.examples import num_examples
from tests.support.patience import HANG_S
from tests.support.scripted_worker import TEXT, ScriptedWorker

NUM_LIARS = num_examples(20)
NUM_REQUESTS, NUM_MESSAGES = 6, 8
"""For each liar."""
_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), -1, 0, 1, 2, (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), -1, 0, 1, (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e308),
    FieldDescriptor.CPPTYPE_FLOAT: (float("nan"), float("inf"), -1.0, 0.0, 3e38),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 99),
    FieldDescriptor.CPPTYPE_STRING: ("", "x", "\x1b[2J\x07", "é" * 1000),
}


def filled(message: Any, rng: random.Random, legs: list[int], depth: int = 0) -> Any:
    """Returns the message with fields at random: none, extremes, and legs that there are."""
    taken = set()
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if rng.random() < (0.2 if depth else 0.1) or (oneof is not None and oneof.name in taken):
            continue
        if oneof is not None and rng.random() < 0.7 and field is not oneof.fields[-1]:
            continue
        if oneof is not None:
            taken.add(oneof.name)
        count = rng.choice((0, 1, 2, 40)) if field.is_repeated else 1
        for _ in range(count):
            if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                part = getattr(message, field.name)
                part = part.add() if field.is_repeated else part
                if not isinstance(part, Message):
                    continue
                part.SetInParent()
                if depth < 4:
                    filled(part, rng, legs, depth + 1)
                continue
            if field.name in ("leg", "legs", "newest_leg") and legs and rng.random() < 0.9:
                value: Any = rng.choice(legs)
            elif field.type == FieldDescriptor.TYPE_BYTES:
                value = rng.choice((b"", b"?", bytes(16), b"x" * 5000))
            else:
                value = rng.choice(_NUMBERS[field.cpp_type])
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
    return message


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
async def test_whatever_a_worker_says_hurts_nobody_else(
    cluster: Cluster, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests run meanwhile, on the liars too, and all end; when these have gone, the cluster serves as before.

    The events they make up are of legs that they have, of legs that others have, and of none. A liar that is not
    believed any more is given nothing, so each says only a little before the next comes.
    """
    caplog.set_level(logging.ERROR)
    # A mixed worker is given something only where there are no others.
    kinds = ("mixed", "mixed") if role == "mixed" else ("prefill", "decode")
    rng = random.Random(role)
    honest: list[ScriptedWorker] = []
    num_given = num_answered = 0
    for number in range(NUM_LIARS):
        for worker in honest:
            await left(worker)
        # New each time: trust in a worker grows for ten seconds, and on a busy machine these would have more of it.
        honest = [await cluster.add(kind, worker_id=f"{name}-{number}") for kind, name in zip(kinds, "pd", strict=True)]
        for worker in honest:
            worker.num_running = 6  # so that liars, who have nothing to do, are preferred
        liar = await cluster.add(role, worker_id=f"liar-{number}")
        liar.prefill_gate.clear()  # it keeps what it is given
        liar.decode_gate.clear()
        calls = [asyncio.create_task(ended(cluster)) for _ in range(NUM_REQUESTS)]
        given = asyncio.create_task(liar.until(lambda liar=liar: liar.commands))
        # One that is not believed is given nothing: the others answer all.
        waits: list[asyncio.Future[Any]] = [given, asyncio.gather(*calls)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        given.cancel()
        num_given += len(liar.commands)
        for _ in range(NUM_MESSAGES):
            legs = [command.leg for worker in (liar, liar, *honest) for command in worker.commands[-4:]]
            said = filled(worker_pb2.SessionResponse(), rng, [*legs, 1, max(legs, default=0) + 1])
            said.ClearField("worker")  # which would end the session (test_roles_of_workers)
            liar.say(said)
            await asyncio.sleep(0.002)
            cluster.router.coordinator.check()
        await left(liar)
        num_answered += sum([end == "answered" for end in await asyncio.gather(*calls)])
    assert num_given >= NUM_LIARS // 2, "they were given something to lie about"
    assert num_answered > NUM_LIARS * NUM_REQUESTS / 2, "the others serve meanwhile"
    events, text = await read(cluster.inference.GenerateStream(request(), timeout=HANG_S))
    assert text == TEXT
    assert events[-1].completion.workers.prefill in [worker.worker_id for worker in honest]
    await cluster.idle()
    ours = [record for record in caplog.records if record.name.startswith("services.router")]
    assert not ours, ours[0].getMessage()


async def left(worker: ScriptedWorker) -> None:
    worker.cut()
    await worker.until(lambda: not worker.num_sessions)


async def ended(cluster: Cluster) -> str:
    """Returns how a request ended, which is never by a defect of the router."""
    try:
        events, _ = await read(cluster.inference.GenerateStream(request(), timeout=HANG_S))
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            raise
        return error.code().name
    return "answered" if events[-1].HasField("completion") else "cut off"
