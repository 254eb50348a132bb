"""The router's side of its sessions with one worker: one stream per phase, a writer and a reader each.

Owns: the channel, heartbeats out, silence in. If one stream breaks the whole link is over: the worker's legs are lost
together. Never: what a message means. A reader never waits for anyone but its worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from baton.v1 import control_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from services.router.coordinator.events import WorkerInfo
from services.rpc.channels import dial

log = logging.getLogger(__name__)

Dial = Callable[[str], grpc.aio.Channel]

_NAPS = 4
_WRITE_FAILED = "Internal error from Core"
"""How grpc.aio tells it, with INTERNAL and not with the status that the call had."""
_MOST_MS = (1 << 63) - 1


@dataclass(frozen=True)
class SessionTimes:
    heartbeat_s: float
    silence_s: float
    """A worker that says nothing for so long is lost."""


class LinkOwner(Protocol):
    """Who hears what the worker says. All calls come from the event loop."""

    def link_opened(self, link: WorkerLink) -> None:
        """All sessions are open."""

    def link_lost(self, link: WorkerLink, reason: str, *, crashed: bool) -> None:
        """Once, at the end; not after `close`. `crashed` is False if the worker ended the session in order."""

    def prefill_message(self, link: WorkerLink, message: prefill_pb2.PrefillServiceSessionResponse) -> None: ...

    def decode_message(self, link: WorkerLink, message: decode_pb2.DecodeServiceSessionResponse) -> None: ...

    def held_leases(self, link: WorkerLink) -> list[bytes]: ...


class _Ended(Exception):
    """The worker closed a session with status OK."""


class _Stream:
    """One session: what goes out is queued, what comes in is handed over."""

    def __init__(self, hello: Any, heartbeat: Callable[[], Any], heartbeat_s: float) -> None:
        self.is_open = False
        self.over = asyncio.Event()
        """It has ended, with status OK."""
        self.heard = False
        """The worker said something since `heard` was last cleared."""
        self._hello = hello
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, request: Any) -> None:
        self._outgoing.put_nowait(request)

    async def requests(self) -> AsyncIterator[Any]:
        """Hello, then commands as they come, with a heartbeat at each interval."""
        yield self._hello
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            if loop.time() >= due_s:
                yield self._heartbeat()
                due_s = loop.time() + self._heartbeat_s
            try:
                async with asyncio.timeout_at(due_s):
                    request = await self._outgoing.get()
            except TimeoutError:
                continue
            yield request


class WorkerLink:
    """From dialling to the loss of one incarnation of a worker. `start` once; `close` ends it without a report."""

    def __init__(
        self,
        info: WorkerInfo,
        owner: LinkOwner,
        router_incarnation: int,
        session_number: int,
        times: SessionTimes,
        dial: Dial = dial,
    ) -> None:
        assert isinstance(info.description, control_pb2.WorkerDescription)
        self.info = info
        self.description = info.description
        self.load: types_pb2.LoadSnapshot | None = None
        """The newest, for operators."""
        self._owner = owner
        self._times = times
        self._dial = dial
        self._hello = types_pb2.SessionHello(
            router_incarnation=router_incarnation, session_number=session_number, worker_incarnation=info.incarnation
        )
        self._prefill = self._prefill_stream() if info.role.can_prefill else None
        self._decode = self._decode_stream() if info.role.can_decode else None
        self._task: asyncio.Task[None] | None = None
        self._leave_by_s = math.inf

    @property
    def num_sessions(self) -> int:
        return sum(stream is not None and stream.is_open for stream in (self._prefill, self._decode))

    @property
    def _is_leaving(self) -> bool:
        return self._leave_by_s < math.inf or (self.load is not None and self.load.draining)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link {self.info.worker_id}")
        self._task.add_done_callback(_tell_failure)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def send_prefill(self, request: prefill_pb2.PrefillServiceSessionRequest) -> None:
        assert self._prefill is not None
        self._prefill.send(request)

    def send_decode(self, request: decode_pb2.DecodeServiceSessionRequest) -> None:
        assert self._decode is not None
        self._decode.send(request)

    def send_leave(self, within_s: float) -> None:
        """The worker finishes what it has, also for others, and leaves the cluster. Once is enough, in any session.

        Said again only to hurry it: a write that meets the end of its session would make an orderly end a failure.
        """
        leave_by_s = asyncio.get_running_loop().time() + within_s
        if leave_by_s >= self._leave_by_s:
            return
        self._leave_by_s = leave_by_s
        leave = types_pb2.LeaveCommand(remaining_ms=min(round(within_s * 1000), _MOST_MS))
        if self._prefill is not None:
            self._prefill.send(prefill_pb2.PrefillServiceSessionRequest(leave=leave))
        elif self._decode is not None:
            self._decode.send(decode_pb2.DecodeServiceSessionRequest(leave=leave))

    async def _run(self) -> None:
        reason, crashed = "session ended", True
        channel = self._dial(self.description.address)
        try:
            async with asyncio.TaskGroup() as group:
                if self._prefill is not None:
                    call = prefill_pb2_grpc.PrefillServiceStub(channel).Session(self._prefill.requests())
                    group.create_task(self._read(call, self._prefill, self._owner.prefill_message))
                    group.create_task(self._await_silence(self._prefill))
                if self._decode is not None:
                    call = decode_pb2_grpc.DecodeServiceStub(channel).Session(self._decode.requests())
                    group.create_task(self._read(call, self._decode, self._owner.decode_message))
                    group.create_task(self._await_silence(self._decode))
        except* _Ended:
            crashed = False
        except* TimeoutError:
            reason = f"silent for {self._times.silence_s:g} s"
        except* grpc.aio.AioRpcError as group_error:
            error = group_error.exceptions[0]
            assert isinstance(error, grpc.aio.AioRpcError)
            reason = f"{error.code().name}: {error.details()}"
            if error.details() == _WRITE_FAILED and self._is_leaving:
                crashed = False  # a write of ours met the orderly end of the call
        except* Exception:
            log.exception("worker %s: its messages could not be handled", self.info.worker_id)
            reason = "internal error"
        finally:
            await channel.close()
        if crashed:
            log.warning("worker %s lost: %s", self.info.worker_id, reason)
        else:
            log.info("worker %s left", self.info.worker_id)
        self._owner.link_lost(self, reason, crashed=crashed)

    async def _read(self, call: Any, stream: _Stream, take: Callable[[WorkerLink, Any], None]) -> None:
        try:
            async for message in call:
                stream.heard = True
                if message.HasField("load"):
                    self._note(message.load)
                if not stream.is_open:
                    stream.is_open = True
                    self._opened()
                take(self, message)
        finally:
            stream.is_open = False
            call.cancel()
        stream.over.set()
        await self._last_words()
        raise _Ended

    async def _last_words(self) -> None:
        """One session ended in order. If the worker leaves, the other does so too, and what it has still to say are
        the last tokens of its requests."""
        others = [stream.over.wait() for stream in (self._prefill, self._decode) if stream is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._times.heartbeat_s):
                await asyncio.gather(*others)

    async def _await_silence(self, stream: _Stream) -> None:
        """Raises TimeoutError when the worker has said nothing for `silence_s`.

        Counted in naps: a router that was itself stopped for a while finds what the workers said meanwhile before it
        has counted to the end, and does not take its own silence for theirs.
        """
        num_silent = 0
        while num_silent < _NAPS:
            stream.heard = False
            await asyncio.sleep(self._times.silence_s / _NAPS)
            num_silent = 0 if stream.heard else num_silent + 1
        raise TimeoutError

    def _opened(self) -> None:
        if all(stream is None or stream.is_open for stream in (self._prefill, self._decode)):
            log.info("worker %s (%s) joined", self.info.worker_id, self.info.role.value)
            self._owner.link_opened(self)

    def _note(self, load: types_pb2.LoadSnapshot) -> None:
        if self.load is None or load.sequence_number > self.load.sequence_number:
            self.load = load

    def _prefill_stream(self) -> _Stream:
        def heartbeat() -> prefill_pb2.PrefillServiceSessionRequest:
            held = types_pb2.RouterHeartbeat(held_leases=self._owner.held_leases(self))
            return prefill_pb2.PrefillServiceSessionRequest(heartbeat=held)

        hello = prefill_pb2.PrefillServiceSessionRequest(hello=self._hello)
        return _Stream(hello, heartbeat, self._times.heartbeat_s)

    def _decode_stream(self) -> _Stream:
        def heartbeat() -> decode_pb2.DecodeServiceSessionRequest:
            return decode_pb2.DecodeServiceSessionRequest(heartbeat=types_pb2.RouterHeartbeat())

        hello = decode_pb2.DecodeServiceSessionRequest(hello=self._hello)
        return _Stream(hello, heartbeat, self._times.heartbeat_s)


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s failed", task.get_name(), exc_info=error)
