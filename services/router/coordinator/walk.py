"""Keeps, for one walk over the queue, who goes next, which workers are claimed, and which are left to whom. Pure.

Owns: what counts as having waited long, the turns, and the claims of queued requests. Never: where a request starts
(`placement.py`), or the queue's own order (`waiting.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.router.coordinator.book import Book
from services.router.coordinator.request import Phase, Request
from services.router.coordinator.waiting import TenantLine
from services.router.policy import WorkerSubset


def has_waited_long(book: Book, request: Request, now: float) -> bool:
    return now - request.waiting_since_s >= book.config.aging_s


def is_aged(book: Book, request: Request, now: float) -> bool:
    """Returns whether the request has waited longer than others may overtake it."""
    return now - request.waiting_since_s >= book.config.overtake_limit_s


class Walk:
    """Keeps, for one walk over the queue, the workers that aged requests have claimed and those left to others."""

    def __init__(self, book: Book, for_handoffs: set[str], now: float) -> None:
        """`for_handoffs` holds the workers that parked handoffs have claimed."""
        self.for_handoffs = for_handoffs
        self.now = now
        self._book = book
        book.claims = {}
        self._claimed: frozenset[str] = frozenset()
        self._must_not_overtake = book.must_not_overtake()

    def in_turn(self) -> Iterator[Request]:
        """Yields the queue in order, and of each tenant a request that has waited long when its next start is that
        one's turn.

        It is to be started, or not, before the next is asked for.
        """
        return self._book.queue.in_order(self._line_in_turn)

    def _line_in_turn(self, line: TenantLine) -> Iterator[Request]:
        book, turns, first = self._book, line.turns, None
        waiting: Sequence[Request] | None = None  # those that may have a turn; most walks have none
        for request in line:
            is_turn = turns.num_starts >= book.config.turn_every - 1
            if is_turn and waiting != [] and (first is None or first.phase is not Phase.QUEUED):
                if waiting is None:
                    waiting = [each for each in line if has_waited_long(book, each, self.now)]
                waiting = [each for each in waiting if each.phase is Phase.QUEUED and not self.passes_over(each)]
                first = min(waiting, key=turns.order, default=None)
                if first is not None:
                    yield first
                    if first.phase is not Phase.QUEUED:  # else it has found no room, and the turn stays its own
                        turns.taken(first.spec.priority)
            if request is not first and request.phase is Phase.QUEUED:
                yield request
                turns.num_starts += request.phase is not Phase.QUEUED

    def left_to(self, request: Request) -> WorkerSubset:
        """Returns the workers that no queued request has claimed, and where it would not overtake too often."""
        if not self._must_not_overtake:
            return self._book.workers.cluster.without(self._claimed)
        mine = request.spec.worker_priority(goes_ahead=request.share.is_behind)
        not_overtaken = {worker_id for worker_id, priority in self._must_not_overtake.items() if priority < mine}
        return self._book.workers.cluster.without(self._claimed | not_overtaken)

    @property
    def is_over(self) -> bool:
        """Returns whether every worker is claimed, or none is ready."""
        return not self._book.workers.cluster.without(self._claimed).longest_sequence

    def passes_over(self, request: Request) -> bool:
        """Returns whether the request is not to be placed now, and holds up nobody."""
        return self.now < request.setbacks.not_before_s or self._is_out_of_reach(request)

    def note_start(self) -> None:
        """Looks again at who must not be overtaken: a start may have been one too many."""
        if self._book.overtaken_at:
            self._must_not_overtake = self._book.must_not_overtake()

    def claim(self, worker_id: str, request: Request) -> None:
        self._book.claims[worker_id] = request
        self._claimed = frozenset(self._book.claims)

    def _is_out_of_reach(self, request: Request) -> bool:
        """Returns whether no unclaimed worker could hold the request, even if all were idle.

        It only compares a few numbers, since the queue may have a thousand such requests.
        """
        left, num_tokens = self.left_to(request), len(request.spec.token_ids)
        if num_tokens + request.max_tokens > left.longest_sequence:
            return True
        # Every worker that could prefill it is claimed.
        return left.longest_prompt <= num_tokens < self._book.workers.cluster.everyone.longest_prompt

    def must_go_on_elsewhere(self, request: Request) -> bool:
        """Returns whether the request has begun, and no unclaimed worker may go on with it."""
        return request.has_begun and not self.left_to(request).fit(request.next_job()).can_begin
