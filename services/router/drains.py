"""Workers that operators take out of service: told to leave, waited for, relieved of what they do not finish in time.

Owns: the drains under way. Never: who is placed where or what a failure counts for (`coordinator`), nor how a worker
leaves. A worker may have other routers' requests to finish, so it is gone only when its session here has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.core.clock import Clock
from services.core.errors import NoWorker, WorkerFailed
from services.router.coordinator import Coordinator
from services.router.sessions import WorkerLink

_ROUTER_FIRST_S = 2.0
"""A worker gets so much longer than its deadline: what is left is moved before, and known to be moved."""
_LEAVES_WITHIN_S = 15.0
"""Longest wait for a worker to end its session when its time is up."""
_FORGOTTEN_S = 30.0
"""For a worker that is back, as the same process, from a broken session in which it was told to leave."""


class Drains:
    def __init__(self, coordinator: Coordinator, clock: Clock, act: Callable[[], None]) -> None:
        """`act` does what the coordinator wants done."""
        self._coordinator = coordinator
        self._clock = clock
        self._act = act
        self._gone: dict[int, asyncio.Future[str]] = {}
        """By incarnation; why it was lost, or empty if it left in order."""
        self._changed = asyncio.Event()

    async def run(self, link: WorkerLink | None, worker_id: str, deadline_s: float) -> tuple[int, int]:
        """Returns when the worker has left: requests that finished there, and that were moved. Raises UnknownWorker,
        NoWorker if it has no session now, WorkerFailed if it was lost or does not leave."""
        worker = self._coordinator.worker(worker_id)
        if link is None or not worker.has_session:
            raise NoWorker(f"worker {worker_id!r} has no session: {worker.reason}", retry_after_s=1.0)
        gone = self._gone.setdefault(worker.info.incarnation, asyncio.get_running_loop().create_future())
        self._coordinator.drain(worker_id, self._clock.now())
        link.send_leave(deadline_s + _ROUTER_FIRST_S)
        num_requests, num_moved = len(set(worker.legs.values())), 0
        try:
            async with asyncio.timeout(deadline_s):
                while worker.legs and not gone.done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            if not gone.done():
                num_moved = self._coordinator.migrate(worker_id, self._clock.now())
                self._act()
        await self._await_gone(worker_id, gone, deadline_s)
        return num_requests - num_moved, num_moved

    async def _await_gone(self, worker_id: str, gone: asyncio.Future[str], deadline_s: float) -> None:
        """Other routers' requests have the same deadline."""
        try:
            async with asyncio.timeout(deadline_s + _ROUTER_FIRST_S + _LEAVES_WITHIN_S):
                reason = await asyncio.shield(gone)
        except TimeoutError:
            raise WorkerFailed(f"worker {worker_id!r} has nothing of this router, but does not leave") from None
        if reason:
            raise WorkerFailed(f"worker {worker_id!r} was lost while it drained: {reason}")

    # What the conductor tells

    def changed(self) -> None:
        """Legs may have ended."""
        self._changed.set()

    def link_opened(self, link: WorkerLink) -> None:
        """The process that was told to leave is back after a broken session, and may not have heard it."""
        if any(worker.info is link.info and worker.draining for worker in self._coordinator.workers()):
            link.send_leave(_FORGOTTEN_S)

    def link_lost(self, link: WorkerLink, reason: str) -> None:
        """`reason`: empty if it left in order."""
        gone = self._gone.pop(link.info.incarnation, None)
        if gone is not None and not gone.done():
            gone.set_result(reason)
