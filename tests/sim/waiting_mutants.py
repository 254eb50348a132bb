"""Plants deliberate bugs in what bounds a wait and in who goes first: nothing is corrupted, but some request waits for
ever.

Most are clocks that never run out, so they are found where nothing else would end the wait: by faults that last for
ever, and by `watch`, which measures the same waits from outside.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from services.core.awake import AwakeTime
from services.engine.schedule import step
from services.kv.handoff_admission import AdmissionPolicy, EngineRoom
from services.kv.lease_table import LeaseTable
from services.router.conductor import Conductor
from services.router.coordinator import admission, placement
from services.router.coordinator.book import Book
from services.router.coordinator.coordinator import Coordinator
from services.router.coordinator.events import RequestSpec
from services.router.coordinator.request import Request
from services.router.workers.sessions import SessionTimes
from services.worker.session import SessionHost
from tests.sim.mutation import Bug, Mutant, replaced

_FOR_EVER_S = 1e9


def a_worker_never_notices_silence() -> Bug:
    init = SessionHost.__init__

    def deaf(self: SessionHost, *args: Any, silence_s: float, **others: Any) -> None:
        init(self, *args, silence_s=_FOR_EVER_S, **others)

    return replaced(SessionHost, "__init__", deaf)


def a_router_never_notices_silence() -> Bug:
    init = Conductor.__init__

    def deaf(self: Conductor, *args: Any, times: SessionTimes, **others: Any) -> None:
        init(self, *args, times=dataclasses.replace(times, silence_s=_FOR_EVER_S), **others)

    return replaced(Conductor, "__init__", deaf)


def takes_its_own_stop_for_others_silence() -> Bug:
    return replaced(AwakeTime, "at", lambda self, now: now)


def no_stall_clock() -> Bug:
    init = LeaseTable.__init__

    def without(self: LeaseTable, *args: Any, stall_s: float, **others: Any) -> None:
        init(self, *args, stall_s=_FOR_EVER_S, **others)

    return replaced(LeaseTable, "__init__", without)


def no_time_to_live() -> Bug:
    init = LeaseTable.__init__

    def without(self: LeaseTable, *args: Any, ttl_s: float, **others: Any) -> None:
        init(self, *args, ttl_s=_FOR_EVER_S, **others)

    return replaced(LeaseTable, "__init__", without)


def holds_no_lease() -> Bug:
    """Lets nobody look at what the router's heartbeats list as still wanted."""
    return replaced(LeaseTable, "hold", lambda self, owner, lease_ids, now: None)


def admits_young_handoffs_before_aged_ones() -> Bug:
    return replaced(AdmissionPolicy, "_oldest", lambda self, key, born_s, now: True)


def claims_nothing_for_aged_handoffs() -> Bug:
    return replaced(placement, "_claim", lambda *_: None)


def imports_before_preempted_sequences() -> Bug:
    decide = AdmissionPolicy.decide

    def forgetful(
        self: AdmissionPolicy, key: bytes, needed: int, age_s: float, room: EngineRoom, *rest: Any, **others: Any
    ) -> Any:
        return decide(self, key, needed, age_s, dataclasses.replace(room, num_preempted=0), *rest, **others)

    return replaced(AdmissionPolicy, "decide", forgetful)


def keeps_orphaned_legs() -> Bug:
    init = Coordinator.__init__

    def patient(self: Coordinator, config: Any) -> None:
        init(self, dataclasses.replace(config, orphan_timeout_s=math.inf))

    return replaced(Coordinator, "__init__", patient)


def draws_every_token_with_the_same_noise() -> Bug:
    next_part = step.next_part

    def at_zero(*args: Any) -> Any:
        part = next_part(*args)
        return dataclasses.replace(part, rows=tuple(dataclasses.replace(row, position=0) for row in part.rows))

    from services.engine.schedule import scheduler

    return replaced(scheduler, "next_part", at_zero)


def crowds_out_what_has_begun() -> Bug:
    def lower(book: Book, arrival: RequestSpec, *_: object) -> list[Request]:
        return [request for request in book.queue if request.spec.priority < arrival.priority]

    return replaced(admission, "_victims", lower)


MUTANTS: tuple[Mutant, ...] = (
    a_worker_never_notices_silence,
    a_router_never_notices_silence,
    takes_its_own_stop_for_others_silence,
    no_stall_clock,
    no_time_to_live,
    holds_no_lease,
    admits_young_handoffs_before_aged_ones,
    claims_nothing_for_aged_handoffs,
    imports_before_preempted_sequences,
    keeps_orphaned_legs,
    draws_every_token_with_the_same_noise,
    crowds_out_what_has_begun,
)
