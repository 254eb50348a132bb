"""Tests streams of random requests, to every RPC that takes one: a typed status, and the server unharmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from google.protobuf.message import Message
from hypothesis import given

from baton.v1 import kvtransfer_pb2, types_pb2, worker_pb2
from services.kvtransfer.wire import layout_to_proto
from services.worker.host import WorkerHost
from tests.support.fuzz import (
    COMMAND,
    EXTRAS,
    PLAUSIBLE,
    PROMPT,
    TYPED,
    Code,
    Target,
    batches,
    check_events,
    examples,
    fields_of,
    leased,
    outcome,
    session_numbers,
    staying,
)
from tests.support.protofuzz import Overrides, extremes, messages, payloads

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSION, FETCH = "/baton.v1.WorkerService/Session", "/baton.v1.KVTransferService/Fetch"


# -- streams of requests


@given(draw=st.data())
@examples(120)
async def test_fetch(target: Target, draw: Any) -> None:
    """Some of the fetches are of a lease that exists."""
    kind, host = kvtransfer_pb2.FetchRequest, target.prefill
    async with leased(host) as lease_id:
        opened = {
            "lease_id": st.just(lease_id),
            "leg": st.integers(0, 3),
            "first_block": st.integers(0, 4),
            "transport": st.sampled_from([1, 2]),
            "layout": st.just(fields_of(layout_to_proto(host.layout))),
            "source_incarnation": st.just(host.incarnation),
        }
        plausible: Overrides = {
            "baton.v1.FetchOpen": st.fixed_dictionaries(opened, optional={"checksums": st.booleans()}),
            "baton.v1.FetchAck": st.fixed_dictionaries({"copied_blocks": st.integers(0, 4)}),
        }
        opening = messages(kvtransfer_pb2.FetchOpen, plausible).map(lambda message: kind(open=message))
        first = st.one_of(opening.map(lambda message: message.SerializePartialToString()), payloads(kind, plausible))
        data = [draw.draw(first), *draw.draw(st.lists(payloads(kind, plausible), max_size=3))]
        code = await asyncio.to_thread(outcome, host.address, FETCH, data, lambda answer: None, linger=0)
        assert code in TYPED - {Code.DEADLINE_EXCEEDED}


HOSTS: dict[str, Callable[[Target], WorkerHost]] = {
    "prefill": lambda target: target.prefill,
    "decode": lambda target: target.decode,
}


@pytest.mark.parametrize("role", HOSTS)
@given(draw=st.data())
@examples(250)
async def test_sessions(target: Target, role: str, draw: Any) -> None:
    """Most sessions are begun in order, so that the commands are looked at; the legs that are
    accepted come to an end."""
    host, kind = HOSTS[role](target), worker_pb2.SessionRequest
    source = target.prefill.source()
    handoff = {
        "address": st.sampled_from(target.addresses),
        "incarnation": st.sampled_from([source.incarnation, host.incarnation]),
        "layout": st.just(fields_of(source.layout)),
    }
    optional = {
        "handoff": st.fixed_dictionaries(
            {"lease_id": st.just(bytes(16)), "source": st.fixed_dictionaries(handoff)},
        ),
        "age_ms": st.sampled_from([-(1 << 63), 0, 5_000, (1 << 63) - 1]),
    }
    plausible: Overrides = {
        **PLAUSIBLE,
        "baton.v1.DecodeCommand": st.fixed_dictionaries(COMMAND, optional={**EXTRAS, **optional}),
    }
    hello = worker_pb2.SessionHello(
        router_incarnation=77, session_number=next(session_numbers), worker_incarnation=host.incarnation
    )
    requests = st.lists(payloads(kind, plausible), max_size=4)
    data = [staying(target.tame(each, kind), kind) for each in draw.draw(requests)]
    if draw.draw(st.integers(0, 5)):
        data.insert(0, kind(hello=hello).SerializeToString())
    code = await asyncio.to_thread(
        outcome,
        host.address,
        SESSION,
        data,
        lambda answer: check_events(worker_pb2.SessionResponse.FromString(answer)),
        linger=3 if data else 0,
    )
    assert code in TYPED - {Code.DEADLINE_EXCEEDED}


def extreme_streams(target: Target) -> dict[str, tuple[WorkerHost, str, Message]]:
    """Returns, by name, a worker, a method of its, and a message of a router's or a destination's that is in order
    otherwise."""
    command = {"leg": 1, "token_ids": PROMPT, "stopping": types_pb2.StoppingParams(max_tokens=2)}
    handoff = worker_pb2.Handoff(lease_id=bytes(16), source=target.prefill.source())
    opened = kvtransfer_pb2.FetchOpen(
        lease_id=bytes(16),
        leg=1,
        transport=types_pb2.TRANSPORT_GRPC,
        layout=layout_to_proto(target.prefill.layout),
        source_incarnation=target.prefill.incarnation,
    )
    return {
        "prefill": (
            target.prefill,
            SESSION,
            worker_pb2.SessionRequest(prefill=worker_pb2.PrefillCommand(**command)),
        ),
        "decode": (
            target.decode,
            SESSION,
            worker_pb2.SessionRequest(decode=worker_pb2.DecodeCommand(**command, handoff=handoff)),
        ),
        "fetch": (target.prefill, FETCH, kvtransfer_pb2.FetchRequest(open=opened)),
    }


@pytest.mark.parametrize("stream", ["prefill", "decode", "fetch"])
async def test_extremes_in_streams(target: Target, stream: str) -> None:
    """The session has the extreme in it, after a hello that is in order unless the hello has it."""
    host, method, base = extreme_streams(target)[stream]
    is_session = method == SESSION

    def try_one(case: tuple[str, Message]) -> None:
        what, message = case
        data = [staying(message.SerializeToString(), type(base))]
        if is_session and not what.startswith("hello"):
            hello = worker_pb2.SessionHello(
                router_incarnation=78 + hash(what) % 1000,
                session_number=next(session_numbers),
                worker_incarnation=host.incarnation,
            )
            data.insert(0, type(base)(hello=hello).SerializeToString())

        def check(answer: bytes) -> None:
            if is_session:
                check_events(worker_pb2.SessionResponse.FromString(answer))

        code = outcome(host.address, method, data, check, linger=2 if is_session else 0)
        assert code in TYPED - {Code.DEADLINE_EXCEEDED}, what

    cases = list(extremes(base))
    assert len(cases) > 10
    for batch in batches(cases):
        async with asyncio.TaskGroup() as group:
            for case in batch:
                group.create_task(asyncio.to_thread(try_one, case))
            innocent = group.create_task(target.cluster.greedy(PROMPT, 8))
        assert innocent.result().token_ids == target.known.token_ids
