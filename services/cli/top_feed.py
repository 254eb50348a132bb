"""Follows a router for `baton top`: its status, and its requests as they change.

Owns: what was heard last, and since when nothing was. Never: when to ask, or how it looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from baton.v1 import control_pb2
from services.cli.client import ControlCall
from services.cli.top_requests import FollowedRequest
from services.core.errors import BatonError
from services.core.token_pace import TokenPaces
from services.rpc.plain import plain

MOST_REQUESTS = 1000
"""The most requests that are kept. Of those that have ended, the oldest go first."""


class RouterFeed:
    """Keeps what a router said last. While it says nothing, what it has said stays."""

    def __init__(
        self, call: ControlCall, target: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.target = target
        self.status: dict[str, Any] | None = None
        """A GetStatusResponse as plain data; None before the first."""
        self.objectives: dict[str, float] = {}
        """Milliseconds by name, as `ttft_ms`."""
        self.paces: dict[str, float | None] = {}
        """Tokens a second of each worker between the last two looks; None where there was only one."""
        self.error: BatonError | None = None
        """Why the last attempt failed; None if it did not."""
        self.heard_s = clock()
        """When the router answered last."""
        self._clock = clock
        self._call = call
        self._timeout_s = timeout_s
        self._counts = TokenPaces()
        self._requests: dict[int, FollowedRequest] = {}
        self._newest = 0
        self._incarnation = 0

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def requests(self) -> list[FollowedRequest]:
        """Returns the requests, the latest first."""
        return [self._requests[number] for number in sorted(self._requests, reverse=True)]

    def request(self, number: int) -> FollowedRequest | None:
        return self._requests.get(number)

    def refresh(self) -> None:
        """Asks the router for what is new. Raises BatonError if it does not answer, and then keeps what it has."""
        try:
            status = plain(self.ask("GetStatus", control_pb2.GetStatusRequest()))
            self._follow()
        except BatonError as error:
            self.error = error
            raise
        self.status, self.error, self.heard_s = status, None, self._clock()
        counts = {
            each["worker"]["worker_id"]: each["load"]["num_tokens"] for each in status["workers"] if "load" in each
        }
        self.paces = {name: self._counts.look(name, number, self.heard_s) for name, number in counts.items()}
        self._counts.keep(counts.keys())

    def ask(self, method: str, request: Any) -> Any:
        """Returns the router's answer. Raises BatonError."""
        return self._call(method, request, self._timeout_s)

    def _follow(self) -> None:
        answer = self._timelines(self._newest)
        if answer.router_incarnation != self._incarnation:
            if self._newest:  # another process, whose changes are counted anew
                answer = self._timelines(0)
            self._requests = {}
            self._incarnation = answer.router_incarnation
        now = self._clock()
        heard = {message.number: FollowedRequest(message, plain(message), now) for message in answer.timelines}
        self._requests = _newest(self._kept(heard) | heard)  # another thread may be reading the old one
        self._newest = answer.newest
        self.objectives = plain(answer.objectives)

    def _kept(self, heard: dict[int, FollowedRequest]) -> dict[int, FollowedRequest]:
        """Returns what is kept of those that were heard of before.

        A router tells always of those that live. Where it says nothing of one, and was not short of room, it has
        forgotten how that one ended.
        """
        if len(heard) >= MOST_REQUESTS:
            return self._requests
        return {number: each for number, each in self._requests.items() if number in heard or not each.is_live}

    def _timelines(self, after: int) -> control_pb2.ListTimelinesResponse:
        request = control_pb2.ListTimelinesRequest(after=after, most=MOST_REQUESTS)
        answer: control_pb2.ListTimelinesResponse = self.ask("ListTimelines", request)
        return answer


def _newest(requests: dict[int, FollowedRequest]) -> dict[int, FollowedRequest]:
    """Returns those that live, and the latest of the others: at most MOST_REQUESTS."""
    if len(requests) <= MOST_REQUESTS:
        return requests
    ordered = sorted(requests, key=lambda number: (requests[number].is_live, number))
    return {number: requests[number] for number in ordered[-MOST_REQUESTS:]}
