"""Serves the sessions of WorkerService: the one stream between a router and this worker.

Owns: the session's legs, the hub that brings the engine's events to them, the messages in which they tell the router,
the outbox of these, how far the router knows the prefix cache, and the session's liveness. Everything a session started
ends with it, at once; a newer session of the same router incarnation ends the older first. Reader, writer and the watch
over the router are separate tasks: none of them waits for another. Never: what a message means (WorkerHost), or what a
leg does (services.prefill, services.decode).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, Protocol

from baton.v1 import control_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from services.core.clock import Clock, timeout_after
from services.core.errors import BatonError, DeadlineExceeded, ProtocolViolation, StaleIncarnation
from services.core.hashing import pack_hashes
from services.engine.config import StepReport
from services.engine.schedule.sequence import Finish, PromptScored, SequenceEvent, Token
from services.kv.index_log import IndexChanges
from services.kv.lease import Lease, LeaseState
from services.kv.verdicts import Verdicts
from services.rpc.interceptors import CallContext
from services.rpc.silence import PeerWatch
from services.worker.model_text import give_model_text

log = logging.getLogger(__name__)

WORKER_SERVICE = "baton.v1.WorkerService"
_END_REASONS = {
    LeaseState.RELEASED: worker_pb2.LEASE_END_REASON_RELEASED,
    LeaseState.EXPIRED: worker_pb2.LEASE_END_REASON_EXPIRED,
    LeaseState.ABORTED: worker_pb2.LEASE_END_REASON_ABORTED,
}
_REASONS = {Finish.STOP: types_pb2.FINISH_REASON_STOP, Finish.LENGTH: types_pb2.FINISH_REASON_LENGTH}
_MOST_MERGED_TOKENS = 2048
"""The most in one event of a leg: with twenty log-probabilities each they take half a megabyte."""
_MOST_BYTES = 1 << 20
"""The most bytes of events in one message. Events that have accumulated behind a slow router go in several."""


class Leg(Protocol):
    """A leg carries out one command of a session, from its arrival until nothing of it is left."""

    def cancel(self) -> None:
        """Gives the leg up: compute and transfer stop as soon as the rule of reuse allows.

        Calling it again has no effect.
        """
        ...

    def cancel_answer(self, index: int) -> None:
        """Gives one of the leg's answers up; the others go on. Without effect for one that is over."""
        ...


class Outbox:
    """Keeps events not yet sent.

    The tokens of an answer are merged into one event: what gathers for a slow router is tokens, not messages.
    """

    def __init__(self) -> None:
        self._events: list[worker_pb2.LegEvent] = []
        self._open_tokens: dict[tuple[int, int], types_pb2.SequenceTokens] = {}
        """By leg and index."""

    def add(self, event: worker_pb2.LegEvent) -> None:
        if event.WhichOneof("event") == "tokens":
            tokens = event.tokens
            key = (tokens.leg, tokens.index)
            earlier = self._open_tokens.get(key)
            if (
                earlier is not None
                and earlier.position + len(earlier.token_ids) == tokens.position
                and len(earlier.token_ids) + len(tokens.token_ids) <= _MOST_MERGED_TOKENS
            ):
                earlier.MergeFrom(types_pb2.SequenceTokens(token_ids=tokens.token_ids, logprobs=tokens.logprobs))
                if tokens.HasField("finish"):
                    earlier.finish.CopyFrom(tokens.finish)
                    del self._open_tokens[key]
                return
            if not tokens.HasField("finish"):
                self._open_tokens[key] = event.tokens
        self._events.append(event)

    def __len__(self) -> int:
        return len(self._events)

    def take(self, most_bytes: int = _MOST_BYTES) -> list[worker_pb2.LegEvent]:
        """Removes and returns the oldest events, as many as fit into `most_bytes`, but at least one if there is any."""
        num_bytes = num_taken = 0
        for event in self._events:
            num_bytes += event.ByteSize()
            if num_taken and num_bytes > most_bytes:
                break
            num_taken += 1
        taken, self._events = self._events[:num_taken], self._events[num_taken:]
        self._open_tokens.clear()
        return taken


class RouterSession:
    """Keeps one open session. Legs of all phases add themselves, and remove themselves when they have ended."""

    def __init__(self, hello: worker_pb2.SessionHello) -> None:
        self.router_incarnation = hello.router_incarnation
        self.number = hello.session_number
        self.legs: dict[int, Leg] = {}
        self.ended = asyncio.Event()
        self.error: BatonError | None = None
        """The error that the router is sent at the end; None if the session ends in order."""
        self.newest_leg = 0
        """The highest leg number received, whether or not the leg was accepted."""
        self.follows_cache = hello.follows_cache
        self._lists_legs_at_s = -math.inf
        self._outbox = Outbox()
        self._wake = asyncio.Event()

    def emit(self, event: worker_pb2.LegEvent) -> None:
        """Queues an event for the router. Has no effect after the session's end."""
        if not self.ended.is_set():
            self._outbox.add(event)

    def flush(self) -> None:
        self._wake.set()

    def live_legs(self, now: float, every_s: float) -> worker_pb2.LiveLegs | None:
        """Returns the legs to send with the events just taken, or None if it is too early or events are left.

        It is sent at most every `every_s` seconds, however often steps bring messages. While events are left for the
        next message it is not sent, since a leg would be missing from the list before its last event arrives.
        """
        if now < self._lists_legs_at_s or len(self._outbox):
            return None
        self._lists_legs_at_s = now + every_s
        return worker_pb2.LiveLegs(newest_leg=self.newest_leg, legs=self.legs)

    async def wait_events(self, timeout_s: float) -> list[worker_pb2.LegEvent]:
        """Returns the events to send next: empty after `timeout_s` without any, or at the session's end."""
        if not self._wake.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
        return self.take_events()

    def take_events(self) -> list[worker_pb2.LegEvent]:
        """Removes and returns the oldest events not yet sent; those that do not fit into one message are taken next."""
        events = self._outbox.take()
        if len(self._outbox):
            self._wake.set()
        return events

    def end(self, error: BatonError | None = None) -> None:
        """Ends the session and cancels every leg. Calling it again has no effect."""
        if self.ended.is_set():
            return
        self.error = error
        self.ended.set()
        self._wake.set()
        for number in list(self.legs):
            self.cancel(number)

    def cancel(self, number: int, index: int | None = None) -> None:
        """Gives a leg up, or one of its answers, if it exists. If that raises, the leg is dropped, and no other leg is
        affected."""
        if (leg := self.legs.get(number)) is not None:
            try:
                leg.cancel() if index is None else leg.cancel_answer(index)
            except Exception:
                log.exception("leg %d could not be given up in order", number)
                self.legs.pop(number, None)


class SessionHost:
    """Answers the Session RPC of every router: at most one session for each.

    `accept(session, request)` handles whatever follows the hello; `load()` returns the worker's newest snapshot,
    `describe()` what it is, and `index_changes(after)` what has changed in its prefix cache. `verdicts` are those that
    it has heard of.
    `clock` is of awake time, since it judges routers.
    """

    def __init__(
        self,
        incarnation: int,
        clock: Clock,
        *,
        accept: Callable[[RouterSession, worker_pb2.SessionRequest], None],
        load: Callable[[], types_pb2.LoadSnapshot],
        describe: Callable[[], control_pb2.WorkerDescription],
        index_changes: Callable[[int | None], IndexChanges | None],
        verdicts: Verdicts,
        heartbeat_s: float,
        silence_s: float,
    ) -> None:
        self._incarnation = incarnation
        self._clock = clock
        self._accept = accept
        self._load = load
        self._describe = describe
        self._index_changes = index_changes
        self._verdicts = verdicts
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._sessions: dict[int, RouterSession] = {}

    def __iter__(self) -> Iterator[RouterSession]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def end_all(self, error: BatonError | None = None) -> None:
        """Ends all sessions. `error` says what happened to this worker; None if it leaves in order."""
        for session in self:
            session.end(error)

    async def serve(
        self,
        requests: AsyncIterator[worker_pb2.SessionRequest],
        write: Callable[[worker_pb2.SessionResponse], Awaitable[None]],
    ) -> None:
        """Runs the body of the RPC: it writes one response per batch of events, or per heartbeat interval.

        Returns when the session has ended and its last events are written, or the router does not read them. A write
        that is given up stays with the runtime, which ends the call when the router reads again or its connection ends.
        """
        session = self._open(await self._first(requests))
        watch = PeerWatch(self._clock, self._silence_s)
        reader = self._task(self._read(session, requests, watch), "reader")
        writer = self._task(self._write(session, write, watch), "writer")
        watcher = self._task(self._end_when_silent(session, watch), "watch")
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            for task in (writer, watcher, reader):
                if task.done():
                    task.result()
            if session.error is not None:
                raise session.error
        finally:
            session.end()
            if self._sessions.get(session.router_incarnation) is session:
                del self._sessions[session.router_incarnation]
            for task in (reader, writer, watcher):
                task.cancel()
            await asyncio.wait({reader, writer, watcher})
            log.info("session %d of router %x ended", session.number, session.router_incarnation)

    def _task(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        return asyncio.create_task(work, name=f"session-{what}")

    async def _write(
        self, session: RouterSession, write: Callable[[worker_pb2.SessionResponse], Awaitable[None]], watch: PeerWatch
    ) -> None:
        cache = CacheFollower(self._index_changes) if session.follows_cache else None

        async def send(events: list[worker_pb2.LegEvent]) -> None:
            with watch.writing():
                live_legs = session.live_legs(self._clock.now(), self._heartbeat_s)
                message = worker_pb2.SessionResponse(
                    events=events,
                    load=self._load(),
                    live_legs=live_legs,
                    worker=None if live_legs is None else self._describe(),
                    num_routers=None if live_legs is None else len(self._sessions),
                    verdicts=() if live_legs is None else _as_messages(self._verdicts),
                    cache=None if cache is None else cache.take(),
                )
                await write(message)
            if cache is not None and cache.has_more:
                session.flush()

        await send([])
        while not session.ended.is_set():
            await send(await session.wait_events(self._heartbeat_s))
        # Events emitted as the session ended: from a worker that leaves, these are the last tokens.
        while events := session.take_events():
            await send(events)

    async def _end_when_silent(self, session: RouterSession, watch: PeerWatch) -> None:
        verdict = await watch.verdict()
        log.warning("session %d: router %s", session.number, verdict)
        session.end()

    async def _first(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> worker_pb2.SessionRequest | None:
        """Returns the first request, or None if there is none.

        Raises DeadlineExceeded after `silence_s`, so that streams on which no one sends anything do not accumulate.
        """
        try:
            async with timeout_after(self._silence_s, self._clock):
                return await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {self._silence_s:g} s") from None

    def _open(self, first: worker_pb2.SessionRequest | None) -> RouterSession:
        if first is None or first.WhichOneof("message") != "hello":
            raise ProtocolViolation("a session starts with hello")
        hello = first.hello
        if hello.worker_incarnation != self._incarnation:
            raise StaleIncarnation("this worker has restarted since it registered")
        older = self._sessions.get(hello.router_incarnation)
        if older is not None:
            if older.number >= hello.session_number:
                raise ProtocolViolation(f"session {hello.session_number} is not newer than {older.number}")
            older.end()
        session = RouterSession(hello)
        self._sessions[hello.router_incarnation] = session
        log.info("session %d of router %x open", session.number, session.router_incarnation)
        return session

    async def _read(
        self, session: RouterSession, requests: AsyncIterator[worker_pb2.SessionRequest], watch: PeerWatch
    ) -> None:
        try:
            async for request in requests:
                if session.ended.is_set():
                    return
                watch.heard()
                if request.WhichOneof("message") in (None, "hello"):
                    raise ProtocolViolation("hello comes first and only then")
                self._accept(session, request)
        finally:
            session.end()


def _as_messages(verdicts: Verdicts) -> list[worker_pb2.Verdict]:
    return [worker_pb2.Verdict(incarnation=each, number=number) for each, number in verdicts.num_of.items()]


_MOST_HASHES = 1 << 13
"""One message carries no more, 64 KiB: a session's messages carry tokens too, which must not wait."""


class CacheFollower:
    """Takes the changes of a prefix cache, for one session."""

    def __init__(self, index_changes: Callable[[int | None], IndexChanges | None]) -> None:
        """`index_changes` is the engine's."""
        self._index_changes = index_changes
        self._told: int | None = None
        """The number of the last change that was taken; None before the first."""
        self._unsent: deque[worker_pb2.CacheEvents] = deque()
        self._num_sent = 0

    @property
    def has_more(self) -> bool:
        """Returns whether changes that were taken are left for the next message."""
        return bool(self._unsent)

    def take(self) -> worker_pb2.CacheEvents | None:
        """Returns what the router is to be told next, or None if the cache has not changed."""
        if not self._unsent and (changes := self._index_changes(self._told)) is not None:
            self._told = changes.number
            self._unsent.extend(_parts(changes))
        if not self._unsent:
            return None
        self._num_sent += 1
        events = self._unsent.popleft()
        events.number = self._num_sent
        return events


def _parts(changes: IndexChanges) -> Iterator[worker_pb2.CacheEvents]:
    """Yields the changes in messages of at most `_MOST_HASHES` hashes, of which only the first may say `whole`."""
    tagged = [(hash, False) for hash in changes.removed] + [(hash, True) for hash in changes.stored]
    for start in range(0, max(1, len(tagged)), _MOST_HASHES):
        part = tagged[start : start + _MOST_HASHES]
        yield worker_pb2.CacheEvents(
            whole=changes.whole and start == 0,
            stored=pack_hashes(hash for hash, there in part if there),
            removed=pack_hashes(hash for hash, there in part if not there),
        )


def lease_ended_of(leg: int, lease: Lease) -> worker_pb2.LegEvent:
    """Returns the event that tells the router how a leg's lease has ended."""
    ended = worker_pb2.LeaseEnded(leg=leg, reason=_END_REASONS[lease.state])
    return worker_pb2.LegEvent(lease_ended=ended)


def tokens_of(leg: int, event: Token, index: int = 0) -> types_pb2.SequenceTokens:
    """Returns the message that carries one sampled token, of the leg's answer with that index, to the router."""
    message = types_pb2.SequenceTokens(leg=leg, index=index, position=event.position, token_ids=[event.token.token_id])
    if event.token.logprob is not None:
        message.logprobs.append(types_pb2.TokenLogprobs(logprob=event.token.logprob, top=_top(event.token.top)))
    if event.finish is not None:
        message.finish.reason = _REASONS[event.finish]
        if event.stop_token_id is not None:
            message.finish.stop_token_id = event.stop_token_id
    return message


def prompt_tokens_of(leg: int, event: PromptScored) -> worker_pb2.LegEvent:
    """Returns the event that carries log-probabilities of the prompt to the router."""
    message = worker_pb2.PromptTokens(leg=leg, position=event.position)
    for token in event.tokens:
        message.logprobs.add(logprob=token.logprob, top=_top(token.top), rank=token.rank)
    return worker_pb2.LegEvent(prompt_tokens=message)


def _top(top: Iterable[tuple[int, float]]) -> list[types_pb2.TopLogprob]:
    return [types_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in top]


class EventSink(Protocol):
    def on_event(self, event: SequenceEvent, report: StepReport) -> None: ...

    def on_defect(self, event: SequenceEvent, error: Exception) -> None:
        """Ends the sequence, and reports it to the router, after `on_event` raised `error`."""
        ...


class EventHub:
    """Brings step events from the engine thread to the event loop, and each to the leg it belongs to.

    It neither blocks the engine thread nor computes on the loop. A leg that raises over an event ends alone: the others
    of its step still get theirs.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        flush: Callable[[], None],
        abandon: Callable[[int], None],
        on_defect: Callable[[Exception], None],
    ) -> None:
        """`flush` sends the events that a step has queued and is called once per step.

        `abandon` ends a sequence whose leg fails to do so itself; `on_defect` is called with each exception.
        """
        self._loop = loop
        self._flush = flush
        self._abandon = abandon
        self._on_defect = on_defect
        self._sinks: dict[int, EventSink] = {}
        self._seq_ids = itertools.count(1)

    def new_seq_id(self) -> int:
        return next(self._seq_ids)

    def register(self, seq_id: int, sink: EventSink) -> None:
        self._sinks[seq_id] = sink

    def unregister(self, seq_id: int) -> None:
        self._sinks.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._sinks)

    def on_step(self, report: StepReport) -> None:
        """Hands a step's report to the event loop. Call on the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, report)
        except RuntimeError:
            # The loop closed while the last step ran, so there is no one left to report to.
            if not self._loop.is_closed():
                raise

    def _dispatch(self, report: StepReport) -> None:
        for event in report.events:
            sink = self._sinks.get(event.seq_id)
            if sink is not None:
                try:
                    sink.on_event(event, report)
                except Exception as error:
                    self._end(sink, event, error)
        self._flush()

    def _end(self, sink: EventSink, event: SequenceEvent, error: Exception) -> None:
        self._on_defect(error)
        try:
            sink.on_defect(event, error)
        except Exception as again:
            self._on_defect(again)
            self.unregister(event.seq_id)
            self._abandon(event.seq_id)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, sessions: SessionHost, model: str | None) -> None:
        """`model` is the model's directory; None is that of a worker that has no model."""
        self._sessions = sessions
        self._model = model

    async def Session(self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: CallContext) -> None:
        await self._sessions.serve(aiter(request_iterator), context.write)

    async def GetModelText(self, request: worker_pb2.GetModelTextRequest, context: CallContext) -> None:
        await give_model_text(self._model, context.write)
