"""Connects the coordinator with workers and clients: performs its actions, and gives it what workers and clients send.

Owns: the coordinator, the links to workers, the open answers and traces, the tick, and that what waits is placed once
per turn of the event loop, after all of the turn's inputs. Never: rules. Everything here runs on the event loop, and no
input waits for anything.

One request never harms another. Whatever raises on a request's behalf (an action, an event, its part of the tick) is
logged with its traceback and counted, and ends that request with INTERNAL; the rest of the batch goes on. Nor does one
worker's session harm another's: what its beginning or its end raises is counted too, and ends that session at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from baton.v1 import control_pb2, worker_pb2
from services.core.clock import AwakeClock, Clock
from services.core.errors import BatonError, Cancelled, DeadlineExceeded, Draining, InvalidRequest, unforeseen
from services.core.hashing import unpack_hashes
from services.router.answer import Answer, timings_of
from services.router.coordinator import Coordinator
from services.router.coordinator.events import (
    Action,
    CancelLeg,
    Defect,
    EjectionChanged,
    EmitFailed,
    EmitFinished,
    EmitPromptTokens,
    EmitStarted,
    EmitTokens,
    GroupsChanged,
    HealthChanged,
    LegEvent,
    RequestSpec,
    SendLeg,
    Stage,
    StageEnded,
    WorkerInfo,
)
from services.router.coordinator.workers import Pair, Worker
from services.router.policy import Role
from services.router.policy.explanation import ExplainedRequest, Explanations
from services.router.policy.health import Health
from services.router.telemetry.metrics import ConductorMetrics
from services.router.telemetry.request_metrics import RequestRecord
from services.router.telemetry.tracing import RequestTrace
from services.router.workers import wire
from services.router.workers.description import check_description
from services.router.workers.drains import Drains
from services.router.workers.sessions import SessionTimes, WorkerLink
from services.rpc.channels import Dial
from services.rpc.logging import ids
from services.rpc.telemetry import UNTRACED

log = logging.getLogger(__name__)

_MAX_UNREACHED = 1024
_CLIENT_ERRORS = (InvalidRequest, Cancelled, DeadlineExceeded)


@dataclass(slots=True)
class _Live:
    """Holds what a live request has outside the coordinator."""

    answer: Answer
    trace: RequestTrace
    record: RequestRecord
    explained: ExplainedRequest


class Conductor:
    """Connects one model's coordinator with its workers' sessions and with the answers to its clients."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        clock: Clock,
        metrics: ConductorMetrics,
        times: SessionTimes,
        dial: Dial,
        incarnation: int,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
        run_delay: Callable[[], float] | None = None,
    ) -> None:
        """`incarnation` is the router's. `call_soon` calls a function in the next turn of the event loop; by default it
        is the running loop's. `run_delay` is `AwakeClock`'s."""
        self.coordinator = coordinator
        self.incarnation = incarnation
        self.links: dict[str, WorkerLink] = {}
        self.explanations = Explanations()
        self._clock = clock
        self._awake = AwakeClock(clock, run_delay)
        self._metrics = metrics
        self._times = times
        self._dial = dial
        self._live: dict[str, _Live] = {}
        self._session_numbers = itertools.count(1)
        self._unreached: dict[str, str] = {}
        """Workers that registered but could not be dialled, with the reason, so that it is logged once."""
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._call_soon = call_soon
        self._turn_is_ordered = False
        self._drains = Drains(coordinator, clock, self.act, self._until)

    @property
    def in_use(self) -> bool:
        """Returns whether it has requests, or knows workers other than stores."""
        computing = any(worker.info.roles is not Role.STORE for worker in self.coordinator.workers.all())
        return bool(self._live or self.coordinator.num_expected or computing)

    @property
    def num_routers(self) -> int:
        """Returns how many routers share its workers, this one too, as far as workers say."""
        return max((link.num_routers for link in self.links.values() if link.is_open), default=1)

    def pairs(self) -> Iterator[tuple[Worker, Pair]]:
        """Yields each worker that has a session with each linked source from which it could take over."""
        for worker in self.coordinator.workers.all():
            if worker.has_session:
                yield from ((worker, pair) for pair in worker.sources.all() if pair.source.worker_id in self.links)

    # Clients

    def submit(self, spec: RequestSpec, answer: Answer, trace: RequestTrace, record: RequestRecord) -> None:
        """Submits a request to the coordinator.

        Raises what `Coordinator.submit` does; the caller then ends trace and record.

        Anything that fails after that is reported in the answer.
        """
        now = self._clock.now()
        try:
            self.coordinator.submit(spec, now)
        except BatonError as error:
            self.explanations.refused(spec.request_id, spec.label, now, str(error))
            raise
        explained = self.explanations.begin(spec.request_id, spec.label, now)
        self._live[spec.request_id] = _Live(answer, trace, record, explained)
        with self.isolated("action", spec.request_id):
            record.accepted(len(spec.token_ids))
            log.info("request queued: %d tokens", len(spec.token_ids), extra=trace.log_ids)
        self.act()

    def cancel(self, request_id: str, answer: Answer) -> None:
        """Cancels a request whose client is gone. Has no effect once the answer is over."""
        if not answer.over:
            self.coordinator.cancel(request_id, self._clock.now())
            self.act()

    # Workers

    def register(self, info: WorkerInfo) -> None:
        """Takes a worker's registration, and dials the worker unless this process of it is known already."""
        if not self.coordinator.worker_joined(info, self._clock.now()):
            return
        # Its process has ended, or the coordinator has forgotten it to make room.
        gone = [worker_id for worker_id in self.links if worker_id not in self.coordinator.workers]
        for worker_id in (info.worker_id, *gone):
            self._close_link(worker_id, "")
        number = next(self._session_numbers)
        link = WorkerLink(
            info,
            self,
            self.incarnation,
            number,
            self._times,
            self._awake,
            self._dial,
            follows_cache=self.coordinator.config.policy.hash_prompts,
        )
        self.links[info.worker_id] = link
        link.start()
        self.act()

    def withdraw(self, worker_id: str) -> None:
        """Forgets a worker whose name is another's from now on. Raises WorkerIdInUse while it has a session."""
        if self.coordinator.withdraw(worker_id, self._clock.now()):
            self._close_link(worker_id, "")
            self.act()

    def link_described(self, link: WorkerLink, worker: control_pb2.WorkerDescription) -> None:
        """Takes over the roles that the worker states. Raises InvalidRequest if it is not the one that was dialled."""
        check_description(worker)
        info = wire.worker_info(worker)
        if not info.is_as(link.info):
            raise InvalidRequest("worker", "is not what was registered at its address")
        if not self._is_current(link) or info.worker_id not in self.coordinator.workers:
            return
        before = self.coordinator.workers.get(info.worker_id).info.roles
        if before is not info.roles and Role.STORE in (before, info.roles):
            raise InvalidRequest("worker.roles", "a store stays one, and nothing becomes one")
        self.coordinator.worker_described(info, self._clock.now())
        if before is not info.roles:
            log.info("worker %s is now %s, no longer %s", info.worker_id, info.roles.label, before.label)
        self.act()

    def link_opened(self, link: WorkerLink) -> None:
        """Tells the coordinator that the worker can be used.

        What it raises ends the session, after which the worker may join again: one that the coordinator takes for
        closed is of no use.
        """
        if self._is_current(link):
            self.coordinator.session_opened(link.info.worker_id, link.info.incarnation, self._clock.now())
            with self.isolated("session"):
                self._drains.link_opened(link)
            self._unreached.pop(link.info.worker_id, None)
            self.act()

    def link_lost(self, link: WorkerLink, reason: str, *, crashed: bool) -> None:
        """Takes the worker's requests to others. Raises nothing: whatever fails, the rest of it is done."""
        if self._is_current(link):
            del self.links[link.info.worker_id]
            with self.isolated("session"):
                self._log_unreached(link, reason)
            self._lose(link.info, reason, crashed=crashed)
            with self.isolated("session"):
                self._drains.link_lost(link, reason if crashed else "")
            self.act()

    def link_defect(self, link: WorkerLink, error: Exception) -> None:
        self._defect("session", "", error)

    def _lose(self, info: WorkerInfo, reason: str, *, crashed: bool) -> None:
        with self.isolated("session"):
            now = self._clock.now()
            self.coordinator.worker_lost(info.worker_id, info.incarnation, now, crashed=crashed, reason=reason)

    def _lose_unlinked(self) -> None:
        """Loses the workers that the coordinator believes to be there although they have no link.

        A defect while a link began or ended leaves such workers. They could never join again.
        """
        for worker in self.coordinator.workers.all():
            if not worker.is_gone and worker.info.worker_id not in self.links:
                self._lose(worker.info, "it has no link", crashed=True)

    def _log_unreached(self, link: WorkerLink, reason: str) -> None:
        worker_id = link.info.worker_id
        if link.was_open or self._unreached.get(worker_id) == reason:
            return
        if len(self._unreached) >= _MAX_UNREACHED:
            self._unreached.clear()
        self._unreached[worker_id] = reason
        log.warning("worker %s cannot be reached at %s: %s", worker_id, link.description.address, reason)

    def worker_message(self, link: WorkerLink, message: worker_pb2.SessionResponse) -> None:
        if self._is_current(link):
            with self.isolated("event"):
                load = wire.load(message.load) if message.HasField("load") else None
                info, now = link.info, self._clock.now()
                if message.verdicts:
                    self.coordinator.verdicts_heard({each.incarnation: each.number for each in message.verdicts}, now)
                events = self._read(info, message.events)
                self.coordinator.worker_events(info.worker_id, info.incarnation, events, load, now)
                if message.HasField("cache"):
                    self.coordinator.cache_changed(
                        info.worker_id,
                        info.incarnation,
                        whole=message.cache.whole,
                        stored=unpack_hashes(message.cache.stored),
                        removed=unpack_hashes(message.cache.removed),
                    )
                if message.HasField("num_routers"):
                    link.num_routers = message.num_routers
                if message.HasField("live_legs"):
                    listed = message.live_legs
                    legs = frozenset(listed.legs)
                    self.coordinator.live_legs(info.worker_id, info.incarnation, listed.newest_leg, legs, now)
            self.act()

    def heartbeat(self, link: WorkerLink) -> worker_pb2.RouterHeartbeat:
        """Returns the link's next heartbeat. A defect here must not end the session: the heartbeat is then empty."""
        heartbeat = worker_pb2.RouterHeartbeat()
        with self.isolated("event"):
            heartbeat.verdicts.extend(wire.verdicts(self.coordinator.verdicts.num_of))
            if self._is_current(link):
                heartbeat.held_leases.extend(self.coordinator.held_leases(link.info.worker_id))
        return heartbeat

    def _read(self, info: WorkerInfo, events: Iterable[worker_pb2.LegEvent]) -> list[LegEvent]:
        """Reads a worker's events. An event that cannot be read ends its own request only."""
        found = []
        for event in events:
            try:
                if (read := wire.leg_event(event)) is not None:
                    found.append(read)
            except Exception as error:
                leg = getattr(event, event.WhichOneof("event") or "").leg
                self.coordinator.spoil_leg(info, leg, "event", error, self._clock.now())
        return found

    # Operators

    async def drain_worker(self, worker_id: str, deadline_s: float) -> tuple[int, int]:
        """Places nothing more on the worker, waits until it has left, and at the deadline moves its requests.

        Returns the numbers of requests (finished, moved). Raises what `Drains.run` does.
        """
        log.info("draining worker %s", worker_id)
        return await self._drains.run(self.links.get(worker_id), worker_id, deadline_s)

    async def drain(self, deadline_s: float) -> None:
        """Admits no more requests, and waits for those under way, at most `deadline_s` seconds."""
        self.coordinator.stop_admission()
        if self._live:
            log.info("draining: %d requests run still, and get at most %g s", len(self._live), deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                await self._until(lambda: not self._live)
        except TimeoutError:
            log.warning("drain deadline: %d requests are given up", len(self._live))

    def tick(self) -> None:
        """Does the coordinator's timed work and everything that follows from it. Called every TICK_S."""
        with self.isolated("tick"):
            # Unless read regularly, the awake clock takes a quiet time for a suspension.
            self.coordinator.awake.delayed(self._awake.tick())
        with self.isolated("tick"):
            self._lose_unlinked()
        with self.isolated("tick"):
            self.coordinator.tick(self._clock.now())
        self.act()
        with self.isolated("tick"):
            self._metrics.observe(self.coordinator)

    async def close(self) -> None:
        """Fails the requests that still live and ends every session. Leaves no task."""
        for request_id in list(self._live):
            self.coordinator.cancel(request_id, self._clock.now(), Draining("the router has stopped"))
        self.act()
        for worker_id in list(self.links):
            self._close_link(worker_id, "the router has stopped")
        await asyncio.gather(*self._closing)

    # Actions

    def act(self) -> None:
        """Performs the actions that the coordinator asks for, until there are none.

        A stop string that an action finds is one more input, and so is a failure of an action, which ends its request.
        """
        while actions := self.coordinator.take_actions():
            for action in actions:
                try:  # as `isolated` does; a context manager costs as much as passing on a token
                    self._do(action)
                except Exception as error:
                    self._failed_in("action", _request_of(action), error)
        self._changed.set()
        if self.coordinator.placement_is_due and not self._turn_is_ordered:
            self._turn_is_ordered = True
            (self._call_soon or asyncio.get_running_loop().call_soon)(self._place)

    def _place(self) -> None:
        """Places what waits, once per turn of the event loop for all of its inputs together."""
        self._turn_is_ordered = False
        with self.isolated("placement"):
            self.coordinator.place(self._clock.now())
        self.act()

    def _do(self, action: Action) -> None:
        """Performs one action, except where its request has ended meanwhile because an earlier action of it failed."""
        match action:
            case EmitTokens():  # first, since most actions are of this kind
                self._tokens(action)
            case SendLeg():
                try:
                    self._send(action)
                except Exception as error:  # reported by leg, since a canary has no request id here
                    self.coordinator.spoil_leg(action.worker, action.leg, "action", error, self._clock.now())
            case CancelLeg():
                self._send_cancel(action)
            case EmitStarted():
                if live := self._live.get(action.request_id):
                    live.answer.started(action)
            case EmitPromptTokens():
                if live := self._live.get(action.request_id):
                    live.answer.prompt_scored(action)
            case EmitFinished():
                self._finished(action)
            case EmitFailed():
                self._failed(action.request_id, action.error)
            case StageEnded():
                if action.stage is Stage.QUEUE:
                    self._metrics.requests.queued(action)
                elif action.stage is Stage.PARK:
                    self._metrics.requests.parked(action)
                if live := self._live.get(action.request_id):
                    self._note_stage(live.explained, action)
                    live.trace.stage_ended(action)
            case HealthChanged():
                _log_health(action)
            case EjectionChanged():
                _log_ejection(action, self._clock.now())
            case GroupsChanged():
                _log_groups(action)
            case Defect():
                self._defect(action.where, action.request_id, action.error)

    def _note_stage(self, explained: ExplainedRequest, ended: StageEnded) -> None:
        if ended.leg:
            self.explanations.leg_ended(explained, ended.leg, ended.outcome)
        explained.unplaced = ended.vain_attempt

    @contextlib.contextmanager
    def isolated(self, where: str, request_id: str = "") -> Iterator[None]:
        """Counts what the block raises as a defect, and ends the request with it; without `request_id` it ends none."""
        try:
            yield
        except Exception as error:
            self._failed_in(where, request_id, error)

    def _failed_in(self, where: str, request_id: str, error: Exception) -> None:
        self._defect(where, request_id, error)
        if request_id:
            self._give_up(request_id, error)

    def _give_up(self, request_id: str, error: Exception) -> None:
        internal = unforeseen(error)
        with self.isolated("action"):
            self.coordinator.cancel(request_id, self._clock.now(), internal)
        # Done at once: the client has missed a part of its answer and must not receive the rest of this batch.
        self._failed(request_id, internal)

    def _defect(self, where: str, request_id: str, error: Exception) -> None:
        live = self._live.get(request_id)
        log.error("internal error (%s)", where, exc_info=error, extra=live.trace.log_ids if live is not None else None)
        self._metrics.internal_error(where)

    def _send(self, command: SendLeg) -> None:
        live = self._live.get(command.spec.request_id)
        if live is None and command.spec.payload is not None:
            return
        if live is not None and command.choice is not None:
            self.explanations.placed(live.explained, command.leg, command.attempt, command.choice)
        # Canaries are the coordinator's own requests: they have no client, no payload and no trace.
        traceparent = live.trace.leg_sent(command, self._clock.now()) if live is not None else UNTRACED
        kind = "park" if command.phase is Role.STORE else command.phase.label
        log.log(
            logging.INFO if live is not None else logging.DEBUG,
            "leg %d: %s on %s",
            command.leg,
            kind,
            command.worker_id,
            extra=ids(command.spec.label, traceparent),
        )
        link = self._link(command.worker)
        if link is None:
            return  # the link was lost just now; the coordinator is informed next
        link.send(wire.request_of(command, traceparent))

    def _send_cancel(self, action: CancelLeg) -> None:
        link = self._link(action.worker)
        if link is not None:
            link.send(worker_pb2.SessionRequest(cancel=worker_pb2.CancelLeg(leg=action.leg, index=action.index)))

    def _tokens(self, action: EmitTokens) -> None:
        live, now = self._live.get(action.request_id), self._clock.now()
        if live is None:
            return
        num_before = live.answer.num_output_tokens
        if action.position == 0 and not num_before:
            live.trace.first_token(now)
        stopped = live.answer.tokens(action.token_ids, action.logprobs, action.index, is_stopped=action.is_stopped)
        num_new, is_split = live.answer.num_output_tokens - num_before, live.trace.is_split
        live.record.tokens(num_new, now, action.index, is_split=is_split)
        if stopped:
            self.coordinator.finish_stopped(action.request_id, now, action.index)

    def _finished(self, action: EmitFinished) -> None:
        live, now = self._live.get(action.request_id), self._clock.now()
        if live is None:
            return
        live.answer.finished(action)
        if not action.is_last:
            return
        num_output_tokens, reason = live.answer.num_output_tokens, live.answer.reason
        live.trace.show_output(live.answer.kept_text)
        timings = timings_of(action.summary)
        live.record.finished(reason, timings, now)
        live.trace.finished(action.summary, reason, timings, usage=live.answer.usage, now=now)
        log.info(
            "request finished: %d tokens, %s",
            num_output_tokens,
            reason.value,
            extra=live.trace.log_ids,
        )
        del self._live[action.request_id]
        self.explanations.end(live.explained)

    def _failed(self, request_id: str, error: BatonError) -> None:
        """Ends a request: its answer, its metrics and its trace each learn of the error, even if one of them raises."""
        live, now = self._live.pop(request_id, None), self._clock.now()
        if live is None:
            return
        self.explanations.end(live.explained, str(error))
        with self.isolated("action"):
            if not live.answer.over:  # if it is over, the client has all of it, and only what came after that failed
                live.answer.failed(error)
        with self.isolated("action"):
            live.record.failed(error, now)
        with self.isolated("action"):
            live.trace.show_output(live.answer.kept_text)
            live.trace.failed(error, now, live.answer.usage)
        level = logging.INFO if isinstance(error, _CLIENT_ERRORS) else logging.WARNING
        log.log(level, "request failed: %s: %s", error.reason, error, extra=live.trace.log_ids)

    def _link(self, worker: WorkerInfo) -> WorkerLink | None:
        link = self.links.get(worker.worker_id)
        return link if link is not None and link.info.incarnation == worker.incarnation else None

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


def _request_of(action: Action) -> str:
    """Returns the request that a failure of the action would end; empty if it would end none by this way."""
    match action:
        case SendLeg() | CancelLeg():
            return ""  # `_do` ends the leg of a command that cannot be sent; a cancel that fails ends nothing
        case HealthChanged() | EjectionChanged() | GroupsChanged() | Defect():
            return ""
        case _:
            return action.request_id


def _log_health(change: HealthChanged) -> None:
    what = f"transfers from {change.source_id} to {change.worker_id}" if change.source_id else change.worker_id
    level = logging.WARNING if change.state in (Health.SUSPECT, Health.DOWN) else logging.INFO
    log.log(level, "health of %s: %s%s", what, change.state.value, f" ({change.reason})" if change.reason else "")


def _log_ejection(change: EjectionChanged, now: float) -> None:
    if change.ejection is None:
        log.info("worker %s is no longer ejected: its share grows again", change.worker_id)
    else:
        log.warning("worker %s is %s", change.worker_id, change.ejection.reason(now))


def _log_groups(change: GroupsChanged) -> None:
    if len(change.groups) < 2:
        log.info("all ready workers compute alike again, and pair")
        return
    named = " | ".join(f"{', '.join(group.worker_ids)} ({group.engine} {group.kv[:8]})" for group in change.groups)
    if change.are_engines:
        log.info("workers of the same model are of several engines, and pair within their own: %s", named)
        return
    log.warning(
        "workers of the same model compute differently and do not pair, by fingerprint: %s; give all of an engine the "
        "same weights, --dtype, --kv-dtype and --quantization",
        named,
    )
