"""Plants deliberate bugs in what surrounds the handoff: the engine, a worker's legs and sessions, the router."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from baton.v1 import worker_pb2
from services.core.errors import BatonError
from services.core.hashing import num_blocks_for
from services.decode.leg import DecodeLeg
from services.engine.engine import Engine
from services.engine.schedule import batch, prefix
from services.engine.schedule.scheduler import Scheduler
from services.engine.schedule.sequence import Admitted, StepPlan
from services.engine.schedule.sequence import Sequence as EngineSequence
from services.kv.pool import Holder
from services.prefill.leg import PrefillLeg
from services.router.conductor import Conductor
from services.router.coordinator import handoff, silent_legs
from services.router.coordinator.book import Book
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.coordinator import Coordinator
from services.router.coordinator.events import EmitTokens
from services.router.coordinator.queue import Queue
from services.router.coordinator.request import Request, Setbacks
from services.router.coordinator.workers import WorkerTable
from services.router.policy import Job
from services.worker.session import RouterSession
from tests.sim.mutation import Bug, Mutant, both, replaced

# The engine.


def frees_blocks_under_a_step() -> Bug:
    abort = Scheduler.abort

    def abort_at_once(self: Scheduler, seq_id: int) -> bool:
        sequence = self.sequences.get(seq_id)
        if sequence is not None and seq_id in self._in_flight:
            batch.release_blocks(self.pool, sequence)
        return abort(self, seq_id)

    return replaced(Scheduler, "abort", abort_at_once)


def indexes_blocks_of_a_failed_step() -> Bug:
    fail = Scheduler.fail

    def fail_and_index(self: Scheduler, plan: StepPlan, error: Exception, now: float) -> Any:
        for part in plan.sequences:
            sequence = self.sequences[part.seq_id]
            before, sequence.num_computed = sequence.num_computed, sequence.num_computed + part.num_tokens
            prefix.index_computed(self.pool, sequence, before)
        return fail(self, plan, error, now)

    return replaced(Scheduler, "fail", fail_and_index)


def shares_blocks_between_salts() -> Bug:
    root_hash = prefix.root_hash
    return replaced(prefix, "root_hash", lambda cache_salt="": root_hash(""))


def preempts_leased_sequences() -> Bug:
    def grow(self: batch.Batch, sequence: EngineSequence) -> list[EngineSequence]:
        num_missing = num_blocks_for(len(sequence.token_ids), self._pool.block_size) - len(sequence.block_ids)
        victims: list[EngineSequence] = []
        while self._pool.num_available < num_missing:
            victim = max(self, key=batch.rank)
            self.leave(victim)
            victim.num_computed, victim.state = 0, batch.State.PREEMPTED
            victims.append(victim)
            if victim is sequence:
                return victims
        sequence.block_ids += self._pool.allocate(num_missing, Holder.SEQUENCE)
        return victims

    return replaced(batch.Batch, "grow", grow)


def does_not_wake_who_waits_for_blocks() -> Bug:
    def abort(self: Engine, seq_id: int) -> None:
        with self._lock:
            if self._arrivals.pop(seq_id, None) is None:
                self._scheduler.abort(seq_id)

    def release(self: Engine, block_ids: Iterable[int], holder: Holder) -> None:
        with self._lock:
            self._pool.release(list(block_ids), holder)

    return both(replaced(Engine, "abort", abort), replaced(Engine, "release", release))


# The worker's legs and sessions.


def keeps_legs_after_the_session() -> Bug:
    def end(self: RouterSession, error: BatonError | None = None) -> None:
        self.error = error
        self.ended.set()
        self._wake.set()

    return replaced(RouterSession, "end", end)


def forgets_the_references_of_a_cancelled_prefill() -> Bug:
    admitted = PrefillLeg._admitted

    def admitted_or_forgotten(self: PrefillLeg, event: Admitted) -> None:
        if self._given_up:
            self._close()
        else:
            admitted(self, event)

    return replaced(PrefillLeg, "_admitted", admitted_or_forgotten)


def does_not_stop_a_cancelled_decode() -> Bug:
    def cancel(self: DecodeLeg) -> None:
        self._over = True
        if self._task is None:
            self._close()

    return replaced(DecodeLeg, "cancel", cancel)


def does_not_repeat_the_first_token() -> Bug:
    """The decode worker may be quicker than the prefill worker, or the only one left."""

    def emit(self: DecodeLeg, event: worker_pb2.LegEvent) -> None:
        if not event.HasField("tokens") or event.tokens.HasField("finish"):
            self._session.emit(event)
        self._session.flush()

    return replaced(DecodeLeg, "_emit", emit)


# The router.


def emits_repeated_tokens() -> Bug:
    def receive(book: Any, request: Any, leg: Any, answer: Any, event: Any, now: float) -> bool:
        have = len(answer.output)
        answer.output.extend(event.token_ids)
        book.actions.append(EmitTokens(request.request_id, have, event.token_ids, event.logprobs))
        return True

    return replaced(handoff, "_receive", receive)


def asks_a_worker_that_refused_never_again() -> Bug:
    """Removes parking: a refused handoff has nowhere to go."""
    return replaced(Setbacks, "may_ask", lambda self, view, now: view.worker_id not in self.refusals)


def does_not_try_again_on_heartbeats() -> Bug:
    set_load = WorkerTable.set_load

    def without_news(self: WorkerTable, worker: Any, load: Any, now: float) -> None:
        had_news = self.has_news
        set_load(self, worker, load, now)
        self.has_news = had_news

    return both(
        replaced(WorkerTable, "set_load", without_news),
        replaced(Queue, "is_news", lambda self, worker_id, now: False),
        replaced(Coordinator, "tick", lambda self, now: None),
    )


def keeps_legs_on_a_lost_worker() -> Bug:
    return replaced(handoff, "worker_gone", lambda *_, **__: None)


def does_not_cancel_at_the_worker() -> Bug:
    return replaced(Conductor, "_send_cancel", lambda self, action: None)


def replays_without_the_received_tokens() -> Bug:
    return replaced(Request, "leg_tokens", lambda self: self.spec.token_ids)


def replays_with_other_weights() -> Bug:
    """A stream goes on wherever there is room."""
    job = Request.job

    def unbound(self: Request, num_tokens: int) -> Job:
        return dataclasses.replace(job(self, num_tokens), fingerprint=None)

    ignored = replaced(Book, "_fix_fingerprint", lambda self, request, worker: None)
    return both(replaced(Request, "job", unbound), ignored)


def waits_for_ever_for_a_silent_leg() -> Bug:
    return replaced(silent_legs, "_silent_too_long", lambda *_, **__: None)


def queues_without_a_bound() -> Bug:
    init = Coordinator.__init__

    def unbound(self: Coordinator, config: CoordinatorConfig) -> None:
        init(self, dataclasses.replace(config, max_queue=1 << 30))

    return replaced(Coordinator, "__init__", unbound)


def admits_requests_while_it_stops() -> Bug:
    return replaced(Coordinator, "stop_admission", lambda *_: None)


def stops_without_waiting() -> Bug:
    drain = Conductor.drain
    return replaced(Conductor, "drain", lambda self, deadline_s: drain(self, 0.0))


MUTANTS: tuple[Mutant, ...] = (
    frees_blocks_under_a_step,
    indexes_blocks_of_a_failed_step,
    shares_blocks_between_salts,
    preempts_leased_sequences,
    does_not_wake_who_waits_for_blocks,
    keeps_legs_after_the_session,
    forgets_the_references_of_a_cancelled_prefill,
    does_not_stop_a_cancelled_decode,
    does_not_repeat_the_first_token,
    emits_repeated_tokens,
    asks_a_worker_that_refused_never_again,
    does_not_try_again_on_heartbeats,
    keeps_legs_on_a_lost_worker,
    does_not_cancel_at_the_worker,
    replays_without_the_received_tokens,
    replays_with_other_weights,
    waits_for_ever_for_a_silent_leg,
    queues_without_a_bound,
    admits_requests_while_it_stops,
    stops_without_waiting,
)
