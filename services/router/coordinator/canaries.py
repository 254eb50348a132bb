"""Sends canaries to workers and pairs, and judges their health by the answers. Pure.

A canary is a small request of the router's own that takes a request's ordinary path and shows what a heartbeat cannot.
A *generation* is bound to one worker: a prompt on a prefill worker, a whole tiny sequence on any other. A *transfer* is
bound to a pair: the source computes a prompt of one block and one token, and the destination takes its lease over and
decodes a token. Each canary has its own cache salt, so that nothing of it is cached and all its blocks are copied. The
prompt is always the same, so that answers can be compared.

Owns: which canaries are under way, what the end of each means for whose health, and what a verdict on a worker that
computes wrong means for requests. Never: queues, metrics, or which answer is right (`known_answers.py`). A canary is
never retried or moved and is given up after `canary_timeout_s`. A worker has at most one at a time, and may refuse it
without harm when it is full. Workers that are up are checked again from time to time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from services.core.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    ProtocolViolation,
    SequencePreempted,
    WrongOutput,
)
from services.router.coordinator.book import Book
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    HandoffRef,
    ImportFailed,
    ImportReady,
    LegEvent,
    LegFailed,
    PrefillStarted,
    RequestSpec,
    SendLeg,
    Tokens,
    WorkerInfo,
)
from services.router.coordinator.handoff import FATAL, is_leaving, is_the_pairs, leaves, takes_no_more
from services.router.coordinator.known_answers import KnownAnswers, Said, said
from services.router.coordinator.request import Origin
from services.router.coordinator.workers import Worker, WorkerState
from services.router.policy import Role
from services.router.policy.health import Health, HealthRecord

if TYPE_CHECKING:
    from baton.v1 import types_pb2

_PRIORITY = 100
"""A canary goes before all requests: it is over in a step or two, and its time limit must not run out in a queue."""
_NUM_TOKENS = 2
_NUM_TOKEN_IDS = 8
"""A prompt uses only token ids below this one; every model has these."""


@dataclass(slots=True)
class Canary:
    spec: RequestSpec
    source: WorkerInfo | None
    """The worker that computes the prompt; the target, if there is one, takes its lease over."""
    target: WorkerInfo | None
    """The destination, which decodes; without a source, it computes the prompt too."""
    started_s: float
    asked_s: float
    """`started_s` in awake time, by which the time limit is judged."""
    prefill_leg: int = 0
    decode_leg: int = 0
    begun: bool = False
    """Whether the worker whose turn it is, first the source and then the target, has admitted the canary."""
    sealed: bool = False
    imported: bool = False
    answer: list[Said] = field(default_factory=list)
    """What was received, from output position 0 on."""

    def asked_for(self, tokens: Tokens) -> bool:
        """Returns whether they are within the answer that was asked for, which is all that is kept of any."""
        return 0 <= tokens.position <= self.num_asked - len(tokens.token_ids)

    def hear(self, tokens: Tokens) -> None:
        """Adds tokens to the answer, except those received before: both workers of a handoff report token 0."""
        if tokens.position <= len(self.answer):
            self.answer += said(tokens)[len(self.answer) - tokens.position :]

    @property
    def num_asked(self) -> int:
        """Returns how many tokens the answer must have: 1 if only a prompt is computed, else `_NUM_TOKENS`."""
        return 1 if self.target is None else _NUM_TOKENS

    @property
    def worker_ids(self) -> set[str]:
        return {worker.worker_id for worker in (self.source, self.target) if worker is not None}

    def involves(self, worker_id: str) -> bool:
        return worker_id in self.worker_ids


def new_canary(
    name: str, source: WorkerInfo | None, target: WorkerInfo | None, now: float, awake_s: float = 0.0
) -> Canary:
    """Returns a canary for a source, a target, or a pair.

    `name` is unique; it is the canary's id, its label and its cache salt. `awake_s` is `now` in awake time.
    """
    workers = [worker for worker in (source, target) if worker is not None]
    room = min(worker.max_model_len for worker in workers) - _NUM_TOKENS
    num_tokens = max(1, min(workers[0].block_size + 1, room))
    token_ids = tuple(1 + index % (_NUM_TOKEN_IDS - 1) for index in range(num_tokens))
    model = workers[0].model_id
    spec = RequestSpec(name, token_ids, _NUM_TOKENS, _PRIORITY, cache_salt=name, model=model, label=name)
    return Canary(spec, source, target, now, awake_s)


def prefill_command(canary: Canary, timeout_s: float) -> SendLeg:
    """Returns the command for the canary's source. Alone, its first token is its last."""
    assert canary.source is not None
    return _command(canary, Role.PREFILL, canary.source, canary.prefill_leg, canary.num_asked, timeout_s)


def decode_command(canary: Canary, handoff: HandoffRef | None, timeout_s: float) -> SendLeg:
    """Returns the command for the canary's target."""
    assert canary.target is not None
    command = _command(canary, Role.DECODE, canary.target, canary.decode_leg, _NUM_TOKENS, timeout_s)
    return replace(command, handoff=handoff)


def _command(canary: Canary, phase: Role, worker: WorkerInfo, leg: int, max_tokens: int, remaining_s: float) -> SendLeg:
    spec = canary.spec
    return SendLeg(phase, worker, leg, spec, max_tokens, spec.token_ids, 0, remaining_s, attempt=1)


class Canaries:
    def __init__(self, book: Book) -> None:
        self._book = book
        self._legs: dict[int, Canary] = {}
        self._live: list[Canary] = []
        self._at_work: set[str] = set()
        """The workers that live canaries involve: each is in one at most."""
        self._num_sent = 0
        self._answers = KnownAnswers(book.verdicts.num_of)
        self.checking = False
        """Whether a worker or a pair that is there has not been checked yet, and soon will be."""

    # Sending

    def run(self, now: float) -> None:
        """Gives up canaries that take too long, and sends those that are due. To be called a few times a second."""
        awake_s = self._book.awake.at(now)
        for canary in list(self._live):
            if awake_s - canary.asked_s >= self._book.config.canary_timeout_s:
                self._timed_out(canary, now)
        ready = {worker.info.worker_id: worker for worker in self._book.workers.all() if _open(worker)}
        for worker in ready.values():
            busy = worker.load is not None and worker.load.num_waiting > 0
            if worker.health.wants_probe(now, busy=busy) and self._is_free(worker.info):
                worker.health.probed(now)
                whole = worker.info.roles.can_decode
                self._start(None if whole else worker.info, worker.info if whole else None, now)
        for target in ready.values():
            for pair in target.sources.unsettled if self._is_free(target.info) else ():
                source = ready.get(pair.source.worker_id)
                if source is None or source.info.incarnation != pair.source.incarnation:
                    continue
                both_work = source.health.usable and target.health.usable
                free = self._is_free(source.info) and self._is_free(target.info)
                if free and both_work and pair.health.wants_probe(now):
                    pair.health.probed(now)
                    self._start(source.info, target.info, now)
        usable = {worker_id for worker_id, worker in ready.items() if worker.health.usable}
        self.checking = any(self._unchecked(worker, usable, now) for worker in ready.values())

    def _unchecked(self, worker: Worker, usable: set[str], now: float) -> bool:
        """Says whether the first check is still to come: of the worker, or of a pair in which it is the destination.

        A check that has not come within `canary_timeout_s` is no longer waited for.
        """
        if not worker.health.usable:
            return self._is_new(worker.health, now)
        pairs = worker.sources.unsettled
        return any(pair.source.worker_id in usable and self._is_new(pair.health, now) for pair in pairs)

    def _is_new(self, record: HealthRecord, now: float) -> bool:
        return record.state is Health.NEW and now - record.since_s < self._book.config.canary_timeout_s

    def _is_free(self, info: WorkerInfo) -> bool:
        return info.worker_id not in self._at_work

    def _start(self, source: WorkerInfo | None, target: WorkerInfo | None, now: float) -> None:
        self._num_sent += 1
        name = f"{self._book.config.canary_salt}-{self._num_sent}"
        canary = new_canary(name, source, target, now, self._book.awake.at(now))
        self._live.append(canary)
        self._at_work |= canary.worker_ids
        if source is None:
            self._send_decode(canary, None)
        else:
            canary.prefill_leg = self._open_leg(canary)
            self._book.actions.append(prefill_command(canary, self._book.config.canary_timeout_s))

    def _send_decode(self, canary: Canary, handoff: HandoffRef | None) -> None:
        canary.decode_leg, canary.begun = self._open_leg(canary), False
        self._book.actions.append(decode_command(canary, handoff, self._book.config.canary_timeout_s))

    def _open_leg(self, canary: Canary) -> int:
        leg = self._book.new_leg()
        self._legs[leg] = canary
        return leg

    # Events of workers

    def event(self, worker: Worker, event: LegEvent, now: float) -> bool:
        """Handles an event of a canary's leg. Returns False if the event is not about a canary."""
        canary = self._canary_at(worker, event.leg)
        if canary is None:
            return False
        if event.leg == canary.prefill_leg:
            self._prefill_event(canary, worker, event, now)
        else:
            self._decode_event(canary, worker, event, now)
        return True

    def _prefill_event(self, canary: Canary, worker: Worker, event: LegEvent, now: float) -> None:
        match event:
            case PrefillStarted():
                if canary.begun or canary.decode_leg:
                    self._failed(canary, worker, ProtocolViolation("a second lease"), now)
                    return
                canary.begun = True
                if canary.target is not None:
                    self._send_decode(canary, HandoffRef(event.lease_id, event.source))
            case Tokens() if canary.asked_for(event):
                canary.sealed = True
                canary.hear(event)
                if canary.target is None:
                    self._passed(canary, now)
            case Tokens():
                self._failed(canary, worker, ProtocolViolation("tokens beyond those asked for"), now)
            case LegFailed():
                self._failed(canary, worker, event.error, now)

    def _decode_event(self, canary: Canary, worker: Worker, event: LegEvent, now: float) -> None:
        match event:
            case DecodeAdmitted():
                canary.begun = True
            case DecodeRefused():
                self._end(canary)  # the worker has no room now; a later canary checks it
            case ImportReady():
                canary.imported = True
            case ImportFailed():
                self._import_failed(canary, event.error, now)
            case LegFailed():
                self._failed(canary, worker, event.error, now)
            case Tokens() if canary.asked_for(event):
                canary.hear(event)
                if event.finish is not None:
                    self._passed(canary, now, event.finish.timings)
            case Tokens():
                self._failed(canary, worker, ProtocolViolation("tokens beyond those asked for"), now)

    def worker_gone(self, worker_id: str) -> None:
        """Ends the canaries of a worker that is gone. They say nothing of its health; the loss counts by itself."""
        for canary in [canary for canary in self._live if canary.involves(worker_id)]:
            self._end(canary)
        self._answers.gone(worker_id)

    def has_leg(self, leg: int) -> bool:
        return leg in self._legs

    def give_up(self, worker: Worker, leg: int) -> None:
        """Ends the canary of a leg whose event could not be handled. That says nothing of the worker's health."""
        if (canary := self._canary_at(worker, leg)) is not None:
            self._end(canary)

    def _canary_at(self, worker: Worker, leg: int) -> Canary | None:
        """Returns the canary of which that leg runs at this worker."""
        canary = self._legs.get(leg)
        if canary is None:
            return None
        runs_at = canary.source if leg == canary.prefill_leg else canary.target
        return canary if runs_at is not None and runs_at.worker_id == worker.info.worker_id else None

    # Judging

    def _passed(self, canary: Canary, now: float, timings: types_pb2.PhaseTimings | None = None) -> None:
        """Ends a canary whose answer is complete, and judges the workers and the pair by that answer."""
        self._end(canary, cancel=False)
        first, last = canary.source or canary.target, canary.target or canary.source
        assert first is not None
        assert last is not None
        if len(canary.answer) < canary.num_asked:
            short = f"canary: {len(canary.answer)} tokens instead of {canary.num_asked}"
            self._book.workers.failed(last.worker_id, short, now)
            return
        # The source alone answers for its own token. If a token decoded from its blocks is wrong, the source, the
        # destination or the transfer may be at fault, so that counts against the pair.
        num_own = len(canary.answer) if first is last else 1
        prompt = canary.spec.token_ids
        own, moved = canary.answer[:num_own], canary.answer[num_own:]
        if (reason := self._answers.wrong(first, prompt, own)) is not None:
            self._wrong(first, reason, now)
        elif (reason := self._answers.wrong(last, (*prompt, *(each.token_id for each in own)), moved)) is not None:
            self._book.workers.transfer_failed(first, last.worker_id, f"{reason}, after a transfer", now)
        else:
            for worker_id in dict.fromkeys((first.worker_id, last.worker_id)):
                self._book.workers.succeeded(worker_id, now)
            if first is not last and canary.imported:
                self._book.workers.transfer_succeeded(first, last.worker_id, now, timings)
        self._recheck_outvoted(first, now)
        self.run(now)

    def _wrong(self, info: WorkerInfo, reason: str, now: float) -> None:
        """Takes a worker whose answer is wrong out of use: its weights or its computation cannot be trusted. For one
        that was not used since the last time, it is no new verdict."""
        worker = self._book.workers.get(info.worker_id)
        if worker.was_usable:
            self._book.verdicts.add(worker.info.incarnation)
            self._carry_out(worker.info.incarnation, worker, reason, now)
        else:
            self._book.workers.failed(worker.info.worker_id, reason, now, at_once=True)

    def heard(self, num_of: Mapping[int, int], now: float) -> None:
        """Takes over the verdicts of other routers, of which workers tell."""
        for incarnation in self._book.verdicts.merge(num_of):
            worker = next((each for each in self._book.workers.all() if each.info.incarnation == incarnation), None)
            self._carry_out(incarnation, worker, "wrong answer: another router has found it", now)
            if worker is not None:
                self.worker_gone(worker.info.worker_id)  # what it was to answer must not be the first answer

    def _carry_out(self, incarnation: int, worker: Worker | None, reason: str, now: float) -> None:
        """Lets what a worker that computes wrong has computed go with it.

        From a verdict on, blocks have other names (`services.kv.verdicts`). A request under way ends with `WrongOutput`
        if its client may have something from the worker, and is begun again if only its KV may be from there. Any block
        that was found in a cache may be: nobody keeps who has computed which. `worker` is the one of that incarnation;
        None if this router does not know it, nor what it computes.
        """
        book = self._book
        affected = book.workers.all() if worker is None else [worker]
        origins: set[Origin] = {incarnation, *(each.info.fingerprint.kv for each in affected)}
        if worker is not None:
            book.workers.failed(worker.info.worker_id, reason, now, at_once=True)
            worker.was_usable = False
        for request in book.queue:
            request.name_blocks(book.verdicts.epoch)
        for request in list(book.requests.values()):
            with book.isolated("event", request, now):
                if book.requests.get(request.key) is not request:
                    continue  # it has ended with another part of the same request
                if not request.output_from.isdisjoint(origins):
                    error = WrongOutput("a worker that has computed some of it was found to compute wrong")
                    book.fail(request, error, now)
                # What a store has, or is given, was sealed: whoever computed it has sent output too.
                elif any(not leg.origins.isdisjoint(origins) for leg in (request.prefill, request.decode) if leg):
                    book.begin_again(request, now)

    def _recheck_outvoted(self, heard: WorkerInfo, now: float) -> None:
        """Has those workers checked again at once whose answers are wrong by the votes as they now are."""
        for worker_id in self._answers.outvoted(heard.fingerprint) - {heard.worker_id}:
            if worker_id in self._book.workers:
                self._book.workers.get(worker_id).health.wants_one_now(now)
        self._answers.forget(self._book.workers.__contains__)

    def _failed(self, canary: Canary, worker: Worker, error: BatonError, now: float) -> None:
        if isinstance(error, DeadlineExceeded):
            self._timed_out(canary, now)  # the worker has the same limit, and was the first to notice
            return
        self._end(canary)
        is_source = canary.source is not None and canary.source.worker_id == worker.info.worker_id
        role = Role.PREFILL if is_source else Role.DECODE
        if takes_no_more(self._book, worker.info, role, error, now) or isinstance(error, SequencePreempted):
            return
        if isinstance(error, FATAL):
            # The canary itself is at fault, for instance too long for the worker. The worker has answered: it is alive.
            self._book.workers.succeeded(worker.info.worker_id, now)
        else:
            self._book.workers.failed(worker.info.worker_id, f"canary: {error.reason}: {error}", now)

    def _import_failed(self, canary: Canary, error: BatonError, now: float) -> None:
        self._end(canary)
        assert canary.target is not None
        if canary.source is None:
            return
        if isinstance(error, Draining):
            leaves(self._book, canary.source, now)
        elif is_the_pairs(error) and not is_leaving(self._book, canary.source):
            reason = f"{error.reason}: {error}"
            self._book.workers.transfer_failed(canary.source, canary.target.worker_id, reason, now)

    def _timed_out(self, canary: Canary, now: float) -> None:
        """Ends a canary that took too long, and counts that against the worker, or the pair, that was to act next.

        It does not count against a worker that has succeeded meanwhile, or that is busy with other sequences.
        """
        self._end(canary)
        seconds = self._book.config.canary_timeout_s
        source, target = canary.source, canary.target
        if source is not None and target is not None and canary.sealed and canary.begun and not canary.imported:
            self._book.workers.transfer_failed(source, target.worker_id, f"no transfer within {seconds:g} s", now)
            return
        culprit = source if source is not None and not canary.sealed else target
        assert culprit is not None
        worker = self._book.workers.get(culprit.worker_id)
        if worker.health.last_success_s >= canary.started_s:
            return
        if worker.load is not None and worker.load.num_running > canary.begun:
            # The worker has other work, perhaps another router's, whose steps are long. A stuck one would show in its
            # snapshot.
            self._book.workers.succeeded(culprit.worker_id, now)
        else:
            self._book.workers.failed(culprit.worker_id, f"canary: no answer within {seconds:g} s", now)

    def _end(self, canary: Canary, *, cancel: bool = True) -> None:
        self._live.remove(canary)
        self._at_work -= canary.worker_ids
        for leg, worker in ((canary.prefill_leg, canary.source), (canary.decode_leg, canary.target)):
            if leg:
                assert worker is not None
                del self._legs[leg]
                if cancel:
                    self._book.cancel_leg(worker, leg)


def _open(worker: Worker) -> bool:
    return worker.state is WorkerState.READY
