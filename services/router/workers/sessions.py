"""Runs the router's end of its session with one worker: a stream with a writer and a reader.

Owns: the channel, the heartbeats to the worker, the watch for its silence. When the stream ends, all of the worker's
legs are lost together. Never: what a message means. The reader waits only for its worker, and what a worker does not
read is kept only for as long as its silence would be allowed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from baton.v1 import control_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from services.core.clock import Clock
from services.core.errors import InvalidRequest
from services.core.hashing import HASH_BYTES
from services.router.coordinator.events import WorkerInfo
from services.router.text.streaming import panics_are_errors
from services.router.workers import wire
from services.rpc.channels import Dial
from services.rpc.silence import PeerWatch

log = logging.getLogger(__name__)

_MOST_OUTGOING = 65_536
"""Messages to a worker that wait to be written: commands, and cancels of what it reports and no router knows."""
_ROLES_EVERY_S = 1.0
"""Between two descriptions of a worker that are taken over, in seconds: new roles make all pairs anew."""
_WRITE_FAILED = "Internal error from Core"
"""The details of the error that grpc.aio raises if a write fails, with INTERNAL in place of the call's own status."""


@dataclass(frozen=True)
class SessionTimes:
    heartbeat_s: float
    silence_s: float
    """Seconds after which a worker that sends nothing, or reads nothing, is lost."""


class LinkOwner(Protocol):
    """Receives what the worker sends. All methods are called on the event loop."""

    def link_described(self, link: WorkerLink, worker: control_pb2.WorkerDescription) -> None:
        """Is called with what the worker says it is: before `link_opened`, and at most once a second from then on.

        Raises InvalidRequest if it is not the worker that was dialled.
        """

    def link_opened(self, link: WorkerLink) -> None:
        """Is called when the session is open."""

    def link_lost(self, link: WorkerLink, reason: str, *, crashed: bool) -> None:
        """Is called once, at the link's end, but not after `close`.

        `crashed` is False if the worker ended the session in order.
        """

    def link_defect(self, link: WorkerLink, error: Exception) -> None:
        """Is called before `link_lost` if the link ends because something of the router's own raised `error`."""

    def worker_message(self, link: WorkerLink, message: worker_pb2.SessionResponse) -> None: ...

    def heartbeat(self, link: WorkerLink) -> worker_pb2.RouterHeartbeat: ...


class _Ended(Exception):
    """Reports that the worker closed the session with status OK."""


class _Silent(Exception):
    """Reports that the worker sends nothing or reads nothing any more. The message says which."""


class _Untrue(Exception):
    """Reports that the worker is not what was dialled, or does not say what it is. The message says which."""


class _Excessive(Exception):
    """Reports that the worker sends or causes more at once than any worker may. The message says what."""


class WorkerLink:
    """Keeps the link to one incarnation of a worker, from dialling to its loss.

    Call `start` once; `close` ends it without a report to the owner.
    """

    def __init__(
        self,
        info: WorkerInfo,
        owner: LinkOwner,
        router_incarnation: int,
        session_number: int,
        times: SessionTimes,
        clock: Clock,
        dial: Dial,
        *,
        follows_cache: bool = False,
    ) -> None:
        """`clock` is of awake time, since it judges the worker. `follows_cache` asks the worker to tell what changes in
        its prefix cache."""
        assert info.description is not None, "whoever is dialled has described itself"
        self.info = info
        self.description = info.description
        self.load: types_pb2.LoadSnapshot | None = None
        """The newest snapshot, for operators; None before the first."""
        self.num_routers = 1
        """How many routers the worker says have sessions with it."""
        self.was_open = False
        """Whether its session has been open."""
        self.is_open = False
        self._owner = owner
        self._clock = clock
        self._is_described = False
        self._new: control_pb2.WorkerDescription | None = None
        """What the worker has said of itself since that was taken over last."""
        self._known: control_pb2.WorkerDescription | None = None
        """What was taken over last."""
        self._take_new_at_s = -math.inf
        self._times = times
        self._dial = dial
        self._hello = worker_pb2.SessionHello(
            router_incarnation=router_incarnation,
            session_number=session_number,
            worker_incarnation=info.incarnation,
            follows_cache=follows_cache,
        )
        self._num_cache_events = 0
        self._outgoing: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self._watch = PeerWatch(clock, times.silence_s)
        self._task: asyncio.Task[None] | None = None
        self._leave_by_s = math.inf

    @property
    def _is_leaving(self) -> bool:
        return self._leave_by_s < math.inf or (self.load is not None and self.load.draining)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link {self.info.worker_id}")
        self._task.add_done_callback(_log_failure)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def send(self, request: worker_pb2.SessionRequest) -> None:
        """Queues a request. Requests are written in the order in which they are sent."""
        self._outgoing.put_nowait(request)

    def send_leave(self, within_s: float) -> None:
        """Asks the worker to finish its requests, also those of other routers, and leave within `within_s` seconds.

        It is repeated only with an earlier deadline: a write that meets the end of its session would make an orderly
        end look like a failure.
        """
        leave_by_s = asyncio.get_running_loop().time() + within_s
        if leave_by_s >= self._leave_by_s:
            return
        self._leave_by_s = leave_by_s
        leave = worker_pb2.LeaveCommand(remaining_ms=wire.milliseconds(within_s))
        self.send(worker_pb2.SessionRequest(leave=leave))

    async def _run(self) -> None:
        reason, crashed = "session ended", True
        try:
            channel = self._dial(self.description.address)
            try:
                async with asyncio.TaskGroup() as group:
                    call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
                    group.create_task(self._read(call))
                    group.create_task(self._write(call))
                    group.create_task(self._raise_when_silent())
            finally:
                await channel.close()
        except* _Ended:
            crashed = False
        except* (_Silent, _Excessive, _Untrue) as judged:
            reason = str(judged.exceptions[0])
        except* grpc.aio.AioRpcError as group_error:
            error = group_error.exceptions[0]
            assert isinstance(error, grpc.aio.AioRpcError)
            reason = f"{error.code().name}: {error.details()}"
            if error.details() == _WRITE_FAILED and self._is_leaving:
                crashed = False  # a write of this router met the orderly end of the call
        except* Exception as defects:
            self._owner.link_defect(self, defects)
            reason = "internal error"
        if crashed and self.was_open:
            log.warning("worker %s lost: %s", self.info.worker_id, reason)
        elif not crashed:
            log.info("worker %s left", self.info.worker_id)
        self._owner.link_lost(self, reason, crashed=crashed)

    async def _write(self, call: Any) -> None:
        """Writes hello, then requests as they are sent, with a heartbeat at each interval, until the call ends.

        A task of this link's own does it, and not the one that grpc.aio would make for an iterator of requests: that
        one waits for ever if its call ends before it began.
        """
        loop = asyncio.get_running_loop()
        request: worker_pb2.SessionRequest | None = worker_pb2.SessionRequest(hello=self._hello)
        due_s = loop.time()
        while True:
            if request is not None:
                try:
                    with self._watch.writing():
                        await call.write(request)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the call has ended; its reader says how
            if loop.time() >= due_s:
                request = worker_pb2.SessionRequest(heartbeat=self._owner.heartbeat(self))
                due_s = loop.time() + self._times.heartbeat_s
                continue
            try:
                async with asyncio.timeout_at(due_s):
                    request = await self._outgoing.get()
            except TimeoutError:
                request = None

    async def _read(self, call: Any) -> None:
        # Else a panic would end this task, and nobody would hear of it.
        opened, deliver = panics_are_errors(self._opened), panics_are_errors(self._owner.worker_message)
        try:
            async for message in call:
                self._watch.heard()
                if message is None:
                    raise _Untrue("it sent a message that cannot be read")
                if self._outgoing.qsize() > _MOST_OUTGOING:
                    raise _Excessive(f"{self._outgoing.qsize()} messages to it wait to be written")
                if message.HasField("load"):
                    self._note(message.load)
                if message.HasField("worker"):
                    self._heard_of_itself(message.worker)
                if not self._hello.follows_cache:
                    message.ClearField("cache")  # nobody has asked for it
                elif message.HasField("cache"):
                    self._check_cache(message.cache)
                if not self.is_open:
                    self._describe()
                    opened()
                deliver(self, message)
                self._describe()
        finally:
            self.is_open = False
            call.cancel()
        raise _Ended

    async def _raise_when_silent(self) -> None:
        raise _Silent(await self._watch.verdict())

    def _opened(self) -> None:
        self.is_open = self.was_open = True
        log.info("worker %s (%s) joined", self.info.worker_id, self.info.roles.label)
        self._owner.link_opened(self)

    def _heard_of_itself(self, worker: control_pb2.WorkerDescription) -> None:
        # Each heartbeat repeats it, mostly as it was. After a change the next one counts whatever it says: meanwhile
        # the coordinator may have learnt otherwise that a role is gone.
        if worker == self._known:
            return
        self._new, self._known = worker, None

    def _describe(self) -> None:
        """Gives the owner what the worker has said of itself, but not too often."""
        if not self._is_described and self._new is None:
            raise _Untrue("it did not say what it is")
        if self._new is None or self._clock.now() < self._take_new_at_s:
            return
        try:
            self._owner.link_described(self, self._new)
        except InvalidRequest as error:
            raise _Untrue(str(error)) from None
        self._is_described, self._known, self._new = True, self._new, None
        self._take_new_at_s = self._clock.now() + _ROLES_EVERY_S

    def _check_cache(self, events: worker_pb2.CacheEvents) -> None:
        """Raises what ends the session, unless the events follow those before: to apply others would leave a wrong
        picture of the cache for good."""
        self._num_cache_events += 1
        if events.number != self._num_cache_events:
            raise _Untrue(f"its cache events have the number {events.number}, not {self._num_cache_events}")
        if events.number == 1 and not events.whole:
            raise _Untrue("its first cache events are not of the whole cache")
        if len(events.stored) % HASH_BYTES or len(events.removed) % HASH_BYTES:
            raise _Untrue("it sent a part of a hash")

    def _note(self, load: types_pb2.LoadSnapshot) -> None:
        if self.load is None or load.sequence_number > self.load.sequence_number:
            self.load = load


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s failed", task.get_name(), exc_info=error)
