"""Drives the lease table on the event loop: wakes the streams that follow a lease, and ends in time what is due.

Owns: the timers of live leases and of what is remembered of ended ones, and the wake-ups of open streams. Never: a
rule about leases. The worker changes the table directly; the board learns of it by `on_change`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from services.core.clock import SOONEST_S, Clock
from services.kv.lease import FetchTicket, Lease
from services.kv.lease_table import LeaseTable


def _ignore(lease: Lease) -> None:
    pass


class LeaseBoard:
    """Drives one lease table. It is made on the table's event loop, and closed when its server has stopped."""

    def __init__(self, table: LeaseTable, clock: Clock) -> None:
        self.table = table
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._followers: dict[Lease, dict[asyncio.Event, None]] = {}  # in order, so that runs can be repeated
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_s = 0.0
        self._forgetting: asyncio.TimerHandle | None = None
        self._closed = False
        self.on_change: Callable[[Lease], None] = _ignore
        """Called after every change of a lease or its fetches."""
        table.on_change = self._changed

    @property
    def num_followers(self) -> int:
        """Returns the number of streams that follow a lease, even one that has just ended."""
        return sum(len(events) for events in self._followers.values())

    @contextlib.contextmanager
    def follow(self, ticket: FetchTicket) -> Iterator[asyncio.Event]:
        """Yields an event that is set at every change of the lease or its fetches. The fetch ends with the block."""
        event = asyncio.Event()
        self._followers.setdefault(ticket.lease, {})[event] = None
        try:
            yield event
        finally:
            events = self._followers[ticket.lease]
            del events[event]
            if not events:
                del self._followers[ticket.lease]
            self.table.close_fetch(ticket, self._clock.now())

    def wake(self, lease: Lease) -> None:
        """Wakes the streams that follow the lease, so that they look again at what they can do."""
        for event in self._followers.get(lease, ()):
            event.set()

    def tick(self) -> None:
        """Ends the fetches and leases that are due. The timer calls it."""
        self._stop_timer()
        self.table.expire(self._clock.now())
        self._arm(self.table.next_deadline())

    def close(self) -> None:
        self._closed = True
        self._stop_timer()
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None

    def _changed(self, lease: Lease) -> None:
        self.wake(lease)
        self._arm(lease.deadline_s)
        if not lease.live:
            self._arm_forgetting()
        self.on_change(lease)

    def _arm_forgetting(self) -> None:
        """Sets the timer for forgetting, unless it is set: what ended first is forgotten first, so one is enough."""
        at_s = self.table.next_forgetting()
        if self._closed or self._forgetting is not None or at_s is None:
            return
        self._forgetting = self._loop.call_later(max(SOONEST_S, at_s - self._clock.now()), self._forget)

    def _forget(self) -> None:
        self._forgetting = None
        self.table.forget(self._clock.now())
        self._arm_forgetting()

    def _arm(self, deadline_s: float | None) -> None:
        """Sets the timer for a deadline, unless it is set for an earlier one.

        If the deadline moves back later, the timer fires early, finds nothing due and is set again.
        """
        if self._closed or deadline_s is None:
            return
        if self._timer is not None and self._timer_deadline_s <= deadline_s:
            return
        self._stop_timer()
        self._timer_deadline_s = deadline_s
        self._timer = self._loop.call_later(max(SOONEST_S, deadline_s - self._clock.now()), self.tick)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
