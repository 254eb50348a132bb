"""The session between a router and a worker: outbox, hello, fencing, silence, end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.v1 import prefill_pb2, types_pb2
from services.core.clock import ManualClock
from services.core.errors import DeadlineExceeded, ProtocolViolation, StaleIncarnation, WorkerFailed
from services.worker.session import Outbox, RouterSession, SessionHost

Request = prefill_pb2.PrefillServiceSessionRequest


def tokens(leg: int, position: int, *ids: int, finish: bool = False) -> prefill_pb2.PrefillEvent:
    message = types_pb2.SequenceTokens(leg=leg, position=position, token_ids=ids)
    if finish:
        message.finish.reason = types_pb2.FINISH_REASON_STOP
    return prefill_pb2.PrefillEvent(tokens=message)


def test_tokens_of_one_leg_coalesce_in_order() -> None:
    outbox = Outbox()
    for event in (tokens(1, 0, 10), tokens(2, 0, 20), tokens(1, 1, 11), tokens(1, 2, 12, finish=True)):
        outbox.add(event)
    first, second = outbox.take()
    assert list(first.tokens.token_ids) == [10, 11, 12]
    assert first.tokens.HasField("finish")
    assert list(second.tokens.token_ids) == [20]
    assert outbox.take() == []


def test_a_gap_is_not_hidden_by_coalescing() -> None:
    outbox = Outbox()
    outbox.add(tokens(1, 0, 10))
    outbox.add(tokens(1, 2, 12))
    assert [list(event.tokens.token_ids) for event in outbox.take()] == [[10], [12]]


def test_what_was_taken_is_not_changed_any_more() -> None:
    outbox = Outbox()
    outbox.add(tokens(1, 0, 10))
    (sent,) = outbox.take()
    outbox.add(tokens(1, 1, 11))
    assert list(sent.tokens.token_ids) == [10]


class FakeLeg:
    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


class Harness:
    """A SessionHost with a clock of its own; requests are fed by hand."""

    def __init__(self, silence_s: float = 5.0) -> None:
        self.clock = ManualClock()
        self.accepted: list[tuple[RouterSession, Any]] = []
        self.host: SessionHost[Any, list[Any]] = SessionHost(
            "prefill",
            7,
            self.clock,
            accept=lambda session, request: self.accepted.append((session, request)),
            respond=lambda events: events,
            heartbeat_s=0.01,
            silence_s=silence_s,
        )
        self.requests: asyncio.Queue[Any] = asyncio.Queue()

    async def stream(self) -> AsyncIterator[Any]:
        while (request := await self.requests.get()) is not None:
            yield request

    def hello(self, number: int = 1, router: int = 1, worker: int = 7) -> Request:
        return Request(
            hello=types_pb2.SessionHello(router_incarnation=router, session_number=number, worker_incarnation=worker)
        )


@pytest.fixture
def harness() -> Harness:
    return Harness()


async def test_commands_reach_the_phase_and_the_end_cancels_every_leg(harness: Harness) -> None:
    harness.requests.put_nowait(harness.hello())
    harness.requests.put_nowait(Request(cancel=prefill_pb2.CancelPrefill(leg=3)))
    responses = harness.host.serve(harness.stream())
    assert await anext(responses) == []
    while not harness.accepted:
        await anext(responses)
    session, request = harness.accepted[0]
    assert request.cancel.leg == 3
    leg = FakeLeg()
    session.legs[3] = leg
    session.emit(tokens(3, 0, 5))
    session.flush()
    assert [event.tokens.leg for event in await anext(responses)] == [3]
    await responses.aclose()  # type: ignore[attr-defined]
    assert leg.cancelled == 1
    assert len(harness.host) == 0


async def test_a_newer_session_of_the_same_router_ends_the_older_first(harness: Harness) -> None:
    harness.requests.put_nowait(harness.hello(number=1))
    older = harness.host.serve(harness.stream())
    await anext(older)
    (session,) = harness.host
    session.legs[1] = leg = FakeLeg()
    other = Harness()
    other.requests.put_nowait(harness.hello(number=2))
    newer = harness.host.serve(other.stream())
    await anext(newer)
    assert leg.cancelled == 1
    assert session.ended.is_set()
    async for _ in older:
        pass
    assert [s.number for s in harness.host] == [2]
    await newer.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (Request(cancel=prefill_pb2.CancelPrefill(leg=1)), ProtocolViolation),
        (Request(hello=types_pb2.SessionHello(router_incarnation=1, worker_incarnation=8)), StaleIncarnation),
    ],
)
async def test_a_wrong_hello_is_refused(harness: Harness, first: Request, error: type[Exception]) -> None:
    harness.requests.put_nowait(first)
    with pytest.raises(error):
        await anext(harness.host.serve(harness.stream()))
    assert len(harness.host) == 0


async def test_a_router_that_hangs_up_without_a_hello(harness: Harness) -> None:
    harness.requests.put_nowait(None)
    with pytest.raises(ProtocolViolation):
        await anext(harness.host.serve(harness.stream()))


async def test_a_router_that_never_says_hello() -> None:
    harness = Harness(silence_s=0.01)
    with pytest.raises(DeadlineExceeded):
        await anext(harness.host.serve(harness.stream()))


async def test_a_worker_that_fails_tells_its_routers(harness: Harness) -> None:
    harness.requests.put_nowait(harness.hello())
    responses = harness.host.serve(harness.stream())
    await anext(responses)
    (session,) = harness.host
    session.legs[1] = leg = FakeLeg()
    harness.host.end_all(WorkerFailed("no steps any more"))
    with pytest.raises(WorkerFailed):
        async for _ in responses:
            pass
    assert leg.cancelled == 1


async def test_a_silent_router_loses_its_session(harness: Harness) -> None:
    harness.requests.put_nowait(harness.hello())
    responses = harness.host.serve(harness.stream())
    await anext(responses)
    harness.clock.advance(5.1)
    async for _ in responses:
        pass
    assert len(harness.host) == 0


async def test_what_was_said_in_the_moment_of_the_end_is_sent(harness: Harness) -> None:
    """The router is slow to read when the worker leaves: its last tokens must not be lost."""
    harness.requests.put_nowait(harness.hello())
    responses = harness.host.serve(harness.stream())
    await anext(responses)
    (session,) = harness.host
    session.emit(tokens(3, 0, 5))
    session.flush()
    assert len(await anext(responses)) == 1
    session.emit(tokens(3, 1, 6, finish=True))  # the stream waits for its reader
    session.flush()
    harness.host.end_all()
    assert [list(event.tokens.token_ids) for events in [each async for each in responses] for event in events] == [[6]]
