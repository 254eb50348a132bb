"""Takes workers out of service for operators: a worker is told to leave, is waited for, and loses what it does not
finish in time to others.

Owns: the drains under way. Never: which worker a request is placed on or what a failure counts for (`coordinator`), nor
how a worker leaves. A worker may have other routers' requests to finish, so it is gone only when its session with this
router has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.core.clock import Clock
from services.core.errors import NoWorker, WorkerFailed
from services.router.coordinator import Coordinator
from services.router.workers.sessions import WorkerLink

_ROUTER_LEAD_S = 2.0
"""Seconds by which a worker's deadline is later than the router's, so that the router moves the rest first.
"""
_LEAVE_TIMEOUT_S = 15.0
"""Longest wait, in seconds, for a worker to end its session after its deadline."""
_REPEATED_LEAVE_S = 30.0
"""Seconds that a worker process gets if it is back after a broken session in which it was told to leave."""


class Drains:
    def __init__(
        self,
        coordinator: Coordinator,
        clock: Clock,
        act: Callable[[], None],
        until: Callable[[Callable[[], bool]], Awaitable[None]],
    ) -> None:
        """`act` performs the actions that the coordinator asks for; `until` returns when a condition holds, at which it
        looks after each `act`."""
        self._coordinator = coordinator
        self._clock = clock
        self._act = act
        self._until = until
        self._gone: dict[int, asyncio.Future[str]] = {}
        """Why each worker was lost, by incarnation; an empty text if it left in order."""

    async def run(self, link: WorkerLink | None, worker_id: str, deadline_s: float) -> tuple[int, int]:
        """Drains a worker. Returns the numbers of requests (finished there, moved) when the worker has left.

        Raises UnknownWorker, NoWorker if the worker has no session now, WorkerFailed if it was lost or does not leave.
        """
        worker = self._coordinator.workers.get(worker_id)
        if link is None or not worker.has_session:
            raise NoWorker(f"worker {worker_id!r} has no session: {worker.reason}", retry_after_s=1.0)
        gone = self._gone.setdefault(worker.info.incarnation, asyncio.get_running_loop().create_future())
        self._coordinator.drain(worker_id, self._clock.now())
        link.send_leave(deadline_s + _ROUTER_LEAD_S)
        num_requests, num_moved = len(set(worker.legs.values())), 0
        try:
            async with asyncio.timeout(deadline_s):
                await self._until(lambda: not worker.legs or gone.done())
        except TimeoutError:
            if not gone.done():
                num_moved = self._coordinator.migrate(worker_id, self._clock.now())
                self._act()
        await self._await_gone(worker_id, gone, deadline_s)
        return num_requests - num_moved, num_moved

    async def _await_gone(self, worker_id: str, gone: asyncio.Future[str], deadline_s: float) -> None:
        """Waits until the worker has left. Other routers' requests there have the same deadline."""
        try:
            async with asyncio.timeout(deadline_s + _ROUTER_LEAD_S + _LEAVE_TIMEOUT_S):
                reason = await asyncio.shield(gone)
        except TimeoutError:
            raise WorkerFailed(f"worker {worker_id!r} has nothing of this router, but does not leave") from None
        if reason:
            raise WorkerFailed(f"worker {worker_id!r} was lost while it drained: {reason}")

    # What the conductor reports

    def link_opened(self, link: WorkerLink) -> None:
        """Asks a draining worker to leave again, if it is back from a broken session that may have lost the request."""
        process = (link.info.worker_id, link.info.incarnation)
        known = self._coordinator.workers.all()
        if any((each.info.worker_id, each.info.incarnation) == process and each.draining for each in known):
            link.send_leave(_REPEATED_LEAVE_S)

    def link_lost(self, link: WorkerLink, reason: str) -> None:
        """Notes that a worker's session has ended. `reason` is empty if the worker left in order."""
        gone = self._gone.pop(link.info.incarnation, None)
        if gone is not None and not gone.done():
            gone.set_result(reason)
