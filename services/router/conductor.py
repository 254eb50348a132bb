"""The coordinator in the real world: its actions become messages, answers and spans; what workers say is its input.

Owns: the coordinator, the links to workers, the open answers and traces, the tick. Never: rules. Everything here runs
on the event loop, and no input waits for anything.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton.v1 import decode_pb2, prefill_pb2
from services.core.clock import Clock
from services.core.errors import BatonError, Cancelled, DeadlineExceeded, Draining, InvalidRequest
from services.core.ids import new_incarnation
from services.router import wire
from services.router.answer import Answer, timings_of
from services.router.coordinator import Coordinator
from services.router.coordinator.actions import (
    Action,
    CancelDecode,
    CancelPrefill,
    EmitFailed,
    EmitFinished,
    EmitStarted,
    EmitTokens,
    HealthChanged,
    SendDecode,
    SendPrefill,
    Stage,
    StageEnded,
)
from services.router.coordinator.events import FinishReason, WorkerInfo
from services.router.coordinator.requests import RequestSpec
from services.router.drains import Drains
from services.router.health import Health
from services.router.metrics import RouterMetrics
from services.router.request_metrics import RequestRecord
from services.router.sessions import Dial, SessionTimes, WorkerLink
from services.router.tracing import RequestTrace
from services.rpc.channels import dial
from services.rpc.logging import ids
from services.rpc.telemetry import UNTRACED

log = logging.getLogger(__name__)

TICK_S = 0.1
_CLIENTS_DOING = (InvalidRequest, Cancelled, DeadlineExceeded)


@dataclass(slots=True)
class _Live:
    """What a live request has outside of the coordinator."""

    answer: Answer
    trace: RequestTrace
    record: RequestRecord


class Conductor:
    def __init__(
        self,
        coordinator: Coordinator,
        *,
        clock: Clock,
        metrics: RouterMetrics,
        times: SessionTimes,
        dial: Dial = dial,
    ) -> None:
        self.coordinator = coordinator
        self.incarnation = new_incarnation()
        self.links: dict[str, WorkerLink] = {}
        self._clock = clock
        self._metrics = metrics
        self._times = times
        self._dial = dial
        self._live: dict[str, _Live] = {}
        self._session_numbers = itertools.count(1)
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._drains = Drains(coordinator, clock, self.act)

    # Clients

    def submit(self, spec: RequestSpec, answer: Answer, trace: RequestTrace, record: RequestRecord) -> None:
        """Raises what `Coordinator.submit` does; trace and record are then the caller's to end."""
        self.coordinator.submit(spec, self._clock.now())
        self._live[spec.request_id] = _Live(answer, trace, record)
        record.accepted(len(spec.token_ids))
        log.info("request queued: %d tokens", len(spec.token_ids), extra=ids(spec.request_id, trace.traceparent))
        self.act()

    def cancel(self, request_id: str, answer: Answer) -> None:
        """The client is gone. Without effect once the answer is over."""
        if not answer.over:
            self.coordinator.cancel(request_id, self._clock.now())
            self.act()

    # Workers

    def register(self, info: WorkerInfo) -> None:
        """A worker says that it is there; it is dialled back if that is news."""
        if not self.coordinator.worker_joined(info, self._clock.now()):
            return
        self._close_link(info.worker_id, "")  # another process has its name, so it is gone
        link = WorkerLink(info, self, self.incarnation, next(self._session_numbers), self._times, self._dial)
        self.links[info.worker_id] = link
        link.start()
        self.act()

    def link_opened(self, link: WorkerLink) -> None:
        if self._is_current(link):
            self.coordinator.session_opened(link.info.worker_id, link.info.incarnation, self._clock.now())
            self._drains.link_opened(link)
            self.act()

    def link_lost(self, link: WorkerLink, reason: str, *, crashed: bool) -> None:
        if self._is_current(link):
            del self.links[link.info.worker_id]
            self.coordinator.worker_lost(
                link.info.worker_id, link.info.incarnation, self._clock.now(), crashed=crashed, reason=reason
            )
            self._drains.link_lost(link, reason if crashed else "")
            self.act()

    def prefill_message(self, link: WorkerLink, message: prefill_pb2.PrefillServiceSessionResponse) -> None:
        if self._is_current(link):
            load = wire.load(message.load) if message.HasField("load") else None
            events = wire.prefill_events(message)
            self.coordinator.prefill_events(link.info.worker_id, link.info.incarnation, events, load, self._clock.now())
            self.act()

    def decode_message(self, link: WorkerLink, message: decode_pb2.DecodeServiceSessionResponse) -> None:
        if self._is_current(link):
            load = wire.load(message.load) if message.HasField("load") else None
            events = wire.decode_events(message)
            self.coordinator.decode_events(link.info.worker_id, link.info.incarnation, events, load, self._clock.now())
            self.act()

    def held_leases(self, link: WorkerLink) -> list[bytes]:
        return self.coordinator.held_leases(link.info.worker_id) if self._is_current(link) else []

    # Operators

    async def drain_worker(self, worker_id: str, deadline_s: float) -> tuple[int, int]:
        """Places nothing there, waits until it has left, and at the deadline moves what it still has. Returns requests
        (finished, moved). Raises what `Drains.run` does."""
        log.info("draining worker %s", worker_id)
        return await self._drains.run(self.links.get(worker_id), worker_id, deadline_s)

    async def drain(self, deadline_s: float) -> None:
        """Admits nothing more and waits for the requests under way, at most so long."""
        self.coordinator.stop_admission()
        try:
            async with asyncio.timeout(deadline_s):
                await self._until(lambda: not self._live)
        except TimeoutError:
            log.warning("drain deadline: %d requests are given up", len(self._live))

    async def tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.coordinator.tick(self._clock.now())
            self.act()
            self._metrics.observe(self.coordinator)

    async def close(self) -> None:
        """Fails what still lives and ends every session. Leaves no task."""
        for request_id in list(self._live):
            self.coordinator.cancel(request_id, self._clock.now(), Draining("the router has stopped"))
        self.act()
        for worker_id in list(self.links):
            self._close_link(worker_id, "the router has stopped")
        await asyncio.gather(*self._closing)

    # Actions

    def act(self) -> None:
        """Does what the coordinator wants done. A stop string found on the way is one more input."""
        while actions := self.coordinator.take_actions():
            for action in actions:
                self._do(action)
        self._changed.set()
        self._drains.changed()

    def _do(self, action: Action) -> None:
        match action:
            case SendPrefill() | SendDecode():
                self._send(action)
            case CancelPrefill() | CancelDecode():
                self._send_cancel(action)
            case EmitStarted():
                self._live[action.request_id].answer.started(action)
            case EmitTokens():
                self._tokens(action)
            case EmitFinished():
                self._finished(action)
            case EmitFailed():
                self._failed(action.request_id, action.error)
            case StageEnded():
                self._live[action.request_id].trace.stage_ended(action)
                if action.stage is Stage.QUEUE:
                    self._metrics.requests.queued(action)
            case HealthChanged():
                _log_health(action)

    def _send(self, command: SendPrefill | SendDecode) -> None:
        live = self._live.get(command.spec.request_id)
        # Canaries are the coordinator's own: no client, no trace.
        traceparent = live.trace.leg_sent(command, self._clock.now()) if live is not None else UNTRACED
        kind = "prefill" if isinstance(command, SendPrefill) else "decode"
        log.log(
            logging.INFO if live is not None else logging.DEBUG,
            "leg %d: %s on %s",
            command.leg,
            kind,
            command.worker_id,
            extra=ids(command.spec.request_id, traceparent),
        )
        link = self._link(command.worker_id, command.incarnation)
        if link is None:
            return  # lost in this very moment; the coordinator hears of it next
        if isinstance(command, SendPrefill):
            link.send_prefill(wire.prefill_request(command, traceparent))
        else:
            link.send_decode(wire.decode_request(command, traceparent))

    def _send_cancel(self, action: CancelPrefill | CancelDecode) -> None:
        link = self._link(action.worker_id, action.incarnation)
        if link is None:
            return
        if isinstance(action, CancelPrefill):
            cancel = prefill_pb2.CancelPrefill(leg=action.leg)
            link.send_prefill(prefill_pb2.PrefillServiceSessionRequest(cancel=cancel))
        else:
            link.send_decode(decode_pb2.DecodeServiceSessionRequest(cancel=decode_pb2.CancelDecode(leg=action.leg)))

    def _tokens(self, action: EmitTokens) -> None:
        live, now = self._live[action.request_id], self._clock.now()
        if action.position == 0:
            live.trace.first_token(now)
        num_before = live.answer.num_output_tokens
        stopped = live.answer.tokens(action.token_ids, action.logprobs)
        live.record.tokens(live.answer.num_output_tokens - num_before, now)
        if stopped:
            self.coordinator.finish_stopped(action.request_id, now)

    def _finished(self, action: EmitFinished) -> None:
        live, now = self._live.pop(action.request_id), self._clock.now()
        live.answer.finished(action)
        num_output_tokens = live.answer.num_output_tokens
        reason = action.reason if live.answer.stop_string is None else FinishReason.STOP
        live.record.finished(reason, timings_of(action.summary), now)
        live.trace.finished(action.summary, reason, num_output_tokens=num_output_tokens, now=now)
        log.info(
            "request finished: %d tokens, %s",
            num_output_tokens,
            reason.value,
            extra=ids(action.request_id, live.trace.traceparent),
        )

    def _failed(self, request_id: str, error: BatonError) -> None:
        live, now = self._live.pop(request_id), self._clock.now()
        live.answer.failed(error)
        live.record.failed(error, now)
        live.trace.failed(error, now)
        level = logging.INFO if isinstance(error, _CLIENTS_DOING) else logging.WARNING
        log.log(level, "request failed: %s: %s", error.reason, error, extra=ids(request_id, live.trace.traceparent))

    def _link(self, worker_id: str, incarnation: int) -> WorkerLink | None:
        link = self.links.get(worker_id)
        return link if link is not None and link.info.incarnation == incarnation else None

    def _is_current(self, link: WorkerLink) -> bool:
        return self.links.get(link.info.worker_id) is link

    def _close_link(self, worker_id: str, reason: str) -> None:
        link = self.links.pop(worker_id, None)
        if link is not None:
            self._drains.link_lost(link, reason)
            task = asyncio.create_task(link.close(), name=f"close link {worker_id}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def _log_health(change: HealthChanged) -> None:
    what = f"transfers from {change.source_id} to {change.worker_id}" if change.source_id else change.worker_id
    level = logging.WARNING if change.state in (Health.SUSPECT, Health.DOWN) else logging.INFO
    log.log(level, "health of %s: %s%s", what, change.state.value, f" ({change.reason})" if change.reason else "")
