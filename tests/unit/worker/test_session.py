"""Tests the session between a router and a worker: outbox, hello, fencing, silence, end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.v1 import control_pb2, types_pb2, worker_pb2
from services.core.clock import ManualClock
from services.core.errors import DeadlineExceeded, ProtocolViolation, StaleIncarnation, WorkerFailed
from services.kv.index_log import IndexChanges, IndexLog
from services.kv.verdicts import Verdicts
from services.worker.session import Outbox, RouterSession, SessionHost
from tests.support.patience import HANG_S

Request = worker_pb2.SessionRequest


def tokens(leg: int, position: int, *ids: int, finish: bool = False) -> worker_pb2.LegEvent:
    message = types_pb2.SequenceTokens(leg=leg, position=position, token_ids=ids)
    if finish:
        message.finish.reason = types_pb2.FINISH_REASON_STOP
    return worker_pb2.LegEvent(tokens=message)


def test_tokens_of_one_leg_coalesce_in_order() -> None:
    outbox = Outbox()
    for event in (tokens(1, 0, 10), tokens(2, 0, 20), tokens(1, 1, 11), tokens(1, 2, 12, finish=True)):
        outbox.add(event)
    first, second = outbox.take()
    assert list(first.tokens.token_ids) == [10, 11, 12]
    assert first.tokens.HasField("finish")
    assert list(second.tokens.token_ids) == [20]
    assert outbox.take() == []


def test_what_has_piled_up_goes_in_several_messages() -> None:
    """The messages come in order, and nothing that was taken is changed by what comes later."""
    outbox = Outbox()
    for leg in range(1, 6):
        outbox.add(tokens(leg, 0, *range(100)))
    size = tokens(1, 0, *range(100)).ByteSize()
    first = outbox.take(most_bytes=2 * size)
    outbox.add(tokens(5, 100, 7))
    rest = outbox.take(most_bytes=1 << 20)
    assert [event.tokens.leg for event in first] == [1, 2]
    assert [(event.tokens.leg, event.tokens.position) for event in rest] == [(3, 0), (4, 0), (5, 0), (5, 100)]
    outbox.add(tokens(1, 100, 7))
    assert len(outbox.take(most_bytes=0)) == 1, "one goes, however large"


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
    """A SessionHost with a clock of its own; requests are fed by hand, and responses are read by hand too."""

    def __init__(self, silence_s: float = 5.0) -> None:
        self.clock = ManualClock()
        self.verdicts = Verdicts()
        self.verdicts_told: dict[int, int] = {}
        self.accepted: list[tuple[RouterSession, Any]] = []
        self.host = SessionHost(
            7,
            self.clock,
            accept=lambda session, request: self.accepted.append((session, request)),
            load=types_pb2.LoadSnapshot,
            describe=control_pb2.WorkerDescription,
            index_changes=self.index_changes,
            verdicts=self.verdicts,
            heartbeat_s=0.01,
            silence_s=silence_s,
        )
        self.index = IndexLog()
        """The changes of the prefix cache, of which all are kept."""
        self.told: list[worker_pb2.CacheEvents] = []
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.responses: asyncio.Queue[list[worker_pb2.LegEvent]] = asyncio.Queue()
        self.reads = asyncio.Event()
        """While it is set the router takes what it is sent."""
        self.reads.set()

    def index_changes(self, after: int | None) -> IndexChanges | None:
        return self.index.since(after, list)

    async def stream(self) -> AsyncIterator[Any]:
        while (request := await self.requests.get()) is not None:
            yield request

    async def write(self, response: worker_pb2.SessionResponse) -> None:
        await self.reads.wait()
        if response.HasField("cache"):
            self.told.append(response.cache)
        if response.HasField("live_legs"):
            self.verdicts_told = {each.incarnation: each.number for each in response.verdicts}
        self.responses.put_nowait(list(response.events))

    def serve(self, host: SessionHost | None = None) -> asyncio.Task[None]:
        return asyncio.create_task((host or self.host).serve(self.stream(), self.write))

    async def serving(self) -> tuple[asyncio.Task[None], RouterSession]:
        """Serves a session, after hello."""
        self.requests.put_nowait(self.hello())
        task = self.serve()
        assert await self.responses.get() == []
        (session,) = self.host
        return task, session

    async def events(self) -> list[Any]:
        """Returns the next events that are not only a heartbeat."""
        async with asyncio.timeout(HANG_S):
            while not (events := await self.responses.get()):
                pass
        return events

    def hello(self, number: int = 1, router: int = 1, worker: int = 7) -> Request:
        return Request(
            hello=worker_pb2.SessionHello(router_incarnation=router, session_number=number, worker_incarnation=worker)
        )


@pytest.fixture
def harness() -> Harness:
    return Harness()


async def test_commands_are_passed_on_and_the_end_cancels_every_leg(harness: Harness) -> None:
    harness.requests.put_nowait(Request(cancel=worker_pb2.CancelLeg(leg=3)))
    harness.requests._queue.appendleft(harness.hello())  # type: ignore[attr-defined]
    task = harness.serve()
    async with asyncio.timeout(HANG_S):
        while not harness.accepted:
            await harness.responses.get()
    session, request = harness.accepted[0]
    assert request.cancel.leg == 3
    leg = FakeLeg()
    session.legs[3] = leg
    session.emit(tokens(3, 0, 5))
    session.flush()
    assert [event.tokens.leg for event in await harness.events()] == [3]
    task.cancel()
    await asyncio.wait([task])
    assert leg.cancelled == 1
    assert len(harness.host) == 0


async def test_a_newer_session_of_the_same_router_ends_the_older_first(harness: Harness) -> None:
    older, session = await harness.serving()
    session.legs[1] = leg = FakeLeg()
    other = Harness()
    other.requests.put_nowait(harness.hello(number=2))
    newer = other.serve(harness.host)
    await other.responses.get()
    assert leg.cancelled == 1
    assert session.ended.is_set()
    await older
    assert [s.number for s in harness.host] == [2]
    newer.cancel()
    await asyncio.wait([newer])


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (Request(cancel=worker_pb2.CancelLeg(leg=1)), ProtocolViolation),
        (Request(hello=worker_pb2.SessionHello(router_incarnation=1, worker_incarnation=8)), StaleIncarnation),
    ],
)
async def test_a_wrong_hello_is_refused(harness: Harness, first: Request, error: type[Exception]) -> None:
    harness.requests.put_nowait(first)
    with pytest.raises(error):
        await harness.serve()
    assert len(harness.host) == 0


def test_an_event_of_merged_tokens_has_no_more_fields_than_a_router_takes() -> None:
    """What piles up for a slow router is merged, but not into one event without a bound."""
    outbox = Outbox()
    for position in range(0, 5000, 1000):
        outbox.add(tokens(1, position, *range(1000), finish=position == 4000))
    events = outbox.take()
    assert [len(event.tokens.token_ids) for event in events] == [2000, 2000, 1000]
    assert [event.tokens.HasField("finish") for event in events] == [False, False, True]


async def test_a_router_that_hangs_up_without_a_hello(harness: Harness) -> None:
    harness.requests.put_nowait(None)
    with pytest.raises(ProtocolViolation):
        await harness.serve()


async def test_a_router_that_never_says_hello() -> None:
    harness = Harness(silence_s=0.01)
    serving = harness.serve()
    await asyncio.sleep(0)
    harness.clock.advance(0.02)
    with pytest.raises(DeadlineExceeded):
        await serving


async def test_a_worker_that_fails_tells_its_routers(harness: Harness) -> None:
    task, session = await harness.serving()
    session.legs[1] = leg = FakeLeg()
    harness.host.end_all(WorkerFailed("no steps any more"))
    with pytest.raises(WorkerFailed):
        await task
    assert leg.cancelled == 1


@pytest.mark.parametrize("reads", [True, False], ids=["that reads", "whose session's write is blocked"])
async def test_a_silent_router_loses_its_session(reads: bool) -> None:
    harness = Harness(silence_s=0.05)
    task, session = await harness.serving()
    session.legs[1] = leg = FakeLeg()
    if not reads:
        harness.reads.clear()
    harness.clock.advance(0.06)
    await task
    assert leg.cancelled == 1
    assert len(harness.host) == 0


async def test_a_router_that_takes_nothing_loses_its_session_though_it_speaks() -> None:
    harness = Harness(silence_s=0.05)
    task, session = await harness.serving()
    session.legs[1] = leg = FakeLeg()
    harness.reads.clear()
    async with asyncio.timeout(HANG_S):
        while not task.done():
            harness.requests.put_nowait(Request(heartbeat=worker_pb2.RouterHeartbeat()))
            await asyncio.sleep(0.01)
            harness.clock.advance(0.01)
    await task
    assert leg.cancelled == 1
    assert harness.clock.now() < 1000.0 + 4 * 0.05


async def test_what_was_said_in_the_moment_of_the_end_is_sent(harness: Harness) -> None:
    """The router is slow to read when the worker leaves: its last tokens must not be lost."""
    task, session = await harness.serving()
    harness.reads.clear()
    session.emit(tokens(3, 0, 5))
    session.flush()
    await asyncio.sleep(0.02)  # the write waits for its reader
    session.emit(tokens(3, 1, 6, finish=True))
    session.flush()
    harness.host.end_all()
    harness.reads.set()
    await task
    sent = [event.tokens for _ in range(harness.responses.qsize()) for event in harness.responses.get_nowait()]
    assert [token for part in sent for token in part.token_ids] == [5, 6]


async def test_legs_are_not_listed_while_events_are_left_for_the_next_message() -> None:
    """A leg that has ended is not listed any more: its end must not come after that."""
    session = RouterSession(worker_pb2.SessionHello(router_incarnation=1, session_number=1))
    for leg in (1, 2, 3):
        session.emit(tokens(leg, 0, *range(1_000_000), finish=True))
    listed = []
    while session.take_events():
        listed.append(session.live_legs(now=10.0, every_s=0.5) is not None)
    assert len(listed) > 1
    assert listed == [False] * (len(listed) - 1) + [True]


@pytest.mark.parametrize("follows", [True, False])
async def test_a_router_that_asks_for_it_is_told_of_the_cache(harness: Harness, follows: bool) -> None:
    hello = worker_pb2.SessionHello(router_incarnation=1, session_number=1, worker_incarnation=7, follows_cache=follows)
    harness.requests.put_nowait(Request(hello=hello))
    task = harness.serve()
    await harness.responses.get()
    first, second = bytes(range(16)), bytes(range(16, 32))
    harness.index.store(first, 0)
    (session,) = harness.host
    for token in range(3):
        session.emit(tokens(3, token, 5))
        session.flush()
        await harness.events()
        if token == 1:
            harness.index.store(second, 1)
            harness.index.remove(first, 0)
    harness.host.end_all()
    await task
    told = [(events.number, events.whole, events.stored, events.removed) for events in harness.told]
    assert told == ([(1, True, b"", b""), (2, False, first[:8], b""), (3, False, second[:8], first[:8])] * follows)


async def test_a_router_is_told_of_all_verdicts_with_the_first_message(harness: Harness) -> None:
    """So a router that starts knows them before anything is placed."""
    harness.verdicts.merge({7: 1, 8: 2})
    task, session = await harness.serving()
    assert harness.verdicts_told == {7: 1, 8: 2}
    session.end()
    await task
