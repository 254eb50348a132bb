"""Judges from outside who goes first: what is admitted before what has waited longer.

Owns: an independent account of the rules that keep anyone from starving: an aged handoff
is not overtaken at the worker that refused it, nor where it is the only place it could go, and nothing new comes in
before victims of preemption are back. Never: how long anything may wait (`clocks`).
"""

from __future__ import annotations

from typing import Any

from baton.v1 import worker_pb2
from services.engine.schedule.sequence import Sequence
from services.router import policy
from services.router.coordinator.book import Book
from services.router.coordinator.queue import handoff_order
from services.router.coordinator.request import Request
from services.router.coordinator.workers import Worker
from services.router.policy import PlacementChoice, Source
from services.worker.handoffs import Refused
from tests.sim.node import Node
from tests.sim.world import World

_AGED_S = 1.0
_ROUNDING_S = 1e-6
"""Of sums of times: the worker adds up others than this account does."""
_REMEMBERED_S = 2.0
"""For how long a worker that refused an aged handoff refuses younger ones."""


def watch_intake(node: Node, intake: Any, scheduler: Any) -> None:
    """Judges every admission of a handoff at this worker."""
    reserve, world = intake.reserve, node.world
    oldest: tuple[bytes, float, float] | None = None
    """Of those refused when they had aged: its lease, when it began to wait, and when it last asked."""

    def reserving(command: worker_pb2.DecodeCommand, sequence: Sequence) -> Any:
        nonlocal oldest
        # In the worker's own time, since it remembers in that.
        lease_id, asked_s, age_s = command.handoff.lease_id, intake._host.awake.now(), command.age_ms / 1000
        born_s = asked_s - age_s
        if oldest is not None and asked_s - oldest[2] > _REMEMBERED_S:
            oldest = None
        num_preempted = scheduler.num_preempted
        first = oldest is None or oldest[0] == lease_id or born_s <= oldest[1] + _ROUNDING_S
        try:
            reservation = reserve(command, sequence)
        except Refused:
            if age_s >= _AGED_S and first:
                oldest = lease_id, born_s, asked_s
            raise
        name = node.name
        world.require(first, f"{name}: a handoff is admitted before an aged one that was refused")
        world.require(not num_preempted, f"{name}: a handoff is admitted before preempted sequences")
        if oldest is not None and oldest[0] == lease_id:
            oldest = None
        return reservation

    intake.reserve = reserving


def watch_placements(world: World, book: Any) -> None:
    """Judges every placement of a decode: not where an aged handoff that came before has its only place."""
    open_decode = book.open_decode

    def opening(request: Request, worker: Worker, now: float, choice: PlacementChoice | None = None) -> None:
        overtaken = [other for other in book.queue.parked if _is_overtaken(book, other, request, worker, now)]
        names = [other.request_id for other in overtaken]
        world.require(not names, f"{request.request_id} goes to {worker.info.worker_id} before {names}")
        open_decode(request, worker, now, choice)

    book.open_decode = opening


def watch_turns(world: World, coordinator: Any, book: Any) -> None:
    """Judges every placement pass: after it nothing that waits could be placed, or another pass is due."""
    place = coordinator.place

    def placing(now: float) -> None:
        place(now)
        if coordinator.placement_is_due:
            return
        num_actions = len(book.actions)
        book.placement_is_due = True
        place(now)
        missed = book.actions[num_actions:]
        world.require(not missed, f"placement was not due, and there was something to place: {missed}")

    coordinator.place = placing


def _handoffs_turn(book: Book, request: Request, now: float) -> tuple[float, tuple[int, int, int]]:
    """Returns the sort key of handoffs: those that have waited long are first, by their wait."""
    waited_s = now - request.waiting_since_s
    return (-waited_s if waited_s >= book.config.aging_s else 0.0), handoff_order(request)


def _is_overtaken(book: Book, other: Request, request: Request, worker: Worker, now: float) -> bool:
    waited_s = now - other.waiting_since_s
    if (
        other is request
        or other.prefill is None
        or waited_s < book.config.overtake_limit_s
        or now < other.setbacks.not_before_s
    ):
        return False
    if request.prefill is not None:
        in_place = request.prefill.worker.worker_id == worker.info.worker_id
        if in_place or _handoffs_turn(book, other, now) > _handoffs_turn(book, request, now):
            return False
    leg = other.prefill
    source = Source(leg.worker.worker_id, leg.worker.host_id, leg.worker.fingerprint)
    job = other.job(len(leg.token_ids))
    able = [view.worker_id for view in book.workers.views() if policy.can_take_over(job, source, view)]
    return able == [worker.info.worker_id]
