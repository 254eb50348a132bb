"""The stream between one router and one phase of this worker.

Owns: the session's legs, its outbox, its liveness. Everything a session started ends with it, at once; a newer session
of the same router incarnation ends the older first (DESIGN §5, "Sessions own everything").
Never: what a leg does (services.prefill, services.decode).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from baton.v1 import types_pb2
from services.core.clock import Clock
from services.core.errors import BatonError, DeadlineExceeded, ProtocolViolation, StaleIncarnation

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")


class Leg(Protocol):
    """One command of a session, from its arrival until nothing of it is left."""

    def cancel(self) -> None:
        """Gives the leg up: compute and transfer stop as soon as the rule of reuse lets them. Idempotent."""
        ...


class Outbox:
    """Events not yet sent. A leg's tokens coalesce, so a slow router costs tokens, not messages."""

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._open_tokens: dict[int, types_pb2.SequenceTokens] = {}

    def add(self, event: Any) -> None:
        """`event`: a PrefillEvent or DecodeEvent."""
        if event.WhichOneof("event") == "tokens":
            tokens = event.tokens
            earlier = self._open_tokens.get(tokens.leg)
            if earlier is not None and earlier.position + len(earlier.token_ids) == tokens.position:
                earlier.MergeFrom(types_pb2.SequenceTokens(token_ids=tokens.token_ids, logprobs=tokens.logprobs))
                if tokens.HasField("finish"):
                    earlier.finish.CopyFrom(tokens.finish)
                    del self._open_tokens[tokens.leg]
                return
            if not tokens.HasField("finish"):
                self._open_tokens[tokens.leg] = event.tokens
        self._events.append(event)

    def take(self) -> list[Any]:
        events, self._events = self._events, []
        self._open_tokens.clear()
        return events


class RouterSession:
    """One open session. Legs are added by the phase's servicer and remove themselves when they are over."""

    def __init__(self, hello: types_pb2.SessionHello, clock: Clock) -> None:
        self.router_incarnation = hello.router_incarnation
        self.number = hello.session_number
        self.legs: dict[int, Leg] = {}
        self.ended = asyncio.Event()
        self.error: BatonError | None = None
        """What the router is told at the end; None if all is in order."""
        self.heard_s = clock.now()
        self._outbox = Outbox()
        self._wake = asyncio.Event()

    def emit(self, event: Any) -> None:
        """Queues an event for the router. After the end there is no one to tell."""
        if not self.ended.is_set():
            self._outbox.add(event)

    def flush(self) -> None:
        self._wake.set()

    async def wait_events(self, timeout_s: float) -> list[Any]:
        """Events since the last call; empty after `timeout_s` without any, or at the end."""
        if not self._wake.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
        return self.take_events()

    def take_events(self) -> list[Any]:
        """Events since the last call."""
        return self._outbox.take()

    def end(self, error: BatonError | None = None) -> None:
        """Cancels every leg. Idempotent."""
        if self.ended.is_set():
            return
        self.error = error
        self.ended.set()
        self._wake.set()
        for leg in list(self.legs.values()):
            leg.cancel()


class SessionHost(Generic[Request, Response]):
    """Serves the Session RPC of one phase.

    `accept(session, request)` handles commands, cancels and heartbeats; `respond(events, load)` builds a response;
    `load()` is the worker's newest snapshot.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        clock: Clock,
        *,
        accept: Callable[[RouterSession, Request], None],
        respond: Callable[[list[Any]], Response],
        heartbeat_s: float,
        silence_s: float,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._clock = clock
        self._accept = accept
        self._respond = respond
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._sessions: dict[int, RouterSession] = {}

    def __iter__(self) -> Iterator[RouterSession]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def end_all(self, error: BatonError | None = None) -> None:
        """`error`: what happened to this worker, if it does not leave in order."""
        for session in self:
            session.end(error)

    async def serve(self, requests: AsyncIterator[Request]) -> AsyncIterator[Response]:
        """The body of the RPC: one response per batch of events, or per heartbeat interval."""
        session = self._open(await self._first(requests))
        reader = asyncio.create_task(self._read(session, requests), name=f"{self._name}-session-reader")
        try:
            yield self._respond([])
            while not session.ended.is_set():
                yield self._respond(await session.wait_events(self._heartbeat_s))
                if self._clock.now() - session.heard_s > self._silence_s:
                    log.warning("%s session %d: router silent for %.1f s", self._name, session.number, self._silence_s)
                    break
            # What was said in the very moment of the end: of a worker that leaves these are the last tokens.
            if events := session.take_events():
                yield self._respond(events)
            if reader.done():
                reader.result()
            if session.error is not None:
                raise session.error
        finally:
            session.end()
            if self._sessions.get(session.router_incarnation) is session:
                del self._sessions[session.router_incarnation]
            reader.cancel()
            log.info("%s session %d of router %x ended", self._name, session.number, session.router_incarnation)

    async def _first(self, requests: AsyncIterator[Request]) -> Request | None:
        """Bounded in time: whoever opens streams and says nothing must not collect them here."""
        try:
            async with asyncio.timeout(self._silence_s):
                return await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {self._silence_s:g} s") from None

    def _open(self, first: Any) -> RouterSession:
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
        session = RouterSession(hello, self._clock)
        self._sessions[hello.router_incarnation] = session
        log.info("%s session %d of router %x open", self._name, session.number, session.router_incarnation)
        return session

    async def _read(self, session: RouterSession, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                if session.ended.is_set():
                    return
                session.heard_s = self._clock.now()
                if request.WhichOneof("message") in (None, "hello"):
                    raise ProtocolViolation("hello comes first and only then")
                self._accept(session, request)
        finally:
            session.end()
