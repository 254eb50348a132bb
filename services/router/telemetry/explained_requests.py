"""Remembers, for `baton explain`, why recent requests of one model were placed as they were. No text, no token. Pure.

Owns: the memory and its bounds. Never: a clock, or what decided (`services.router.policy.explanation`). Requests that
live are found too; of those that have ended, the oldest are forgotten first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from services.router.coordinator.events import RequestSpec
from services.router.policy import PlacementChoice, VainAttempt

MOST_REQUESTS = 4096
"""The most requests of one model that are remembered after their end."""
MOST_BYTES = 16 << 20
"""The memory that the records of one model may take; of a live request the newest is kept whatever it takes."""
MOST_CHOICES = 16
"""The most choices that are kept of one request: the first, and the newest."""
_REQUEST_BYTES = 700
_MOST_FAILURE = 500
_MOST_REFUSED = 512
_CHOICE_BYTES = 100


@dataclass(slots=True)
class ExplainedChoice:
    """Holds one choice of a worker, and what became of the leg."""

    leg: int
    attempt: int
    choice: PlacementChoice
    outcome: str = ""
    """How the leg ended; empty while it runs."""


@dataclass(slots=True, eq=False)
class ExplainedRequest:
    """Holds the choices that were made for one request."""

    request_id: str
    """The router's own id of it."""
    label: str
    """The id that its client knows, by which it is found."""
    arrived_s: float
    choices: list[ExplainedChoice] = field(default_factory=list)
    """The oldest first."""
    num_forgotten: int = 0
    """Choices that were made between the first and the rest, and are no longer kept."""
    is_live: bool = True
    failure: str = ""
    """What its client was told, if it was refused or has failed; shortened."""
    unplaced: VainAttempt | None = None
    """If it has ended while it waited for a worker, the last attempt that found nobody."""
    num_bytes: int = _REQUEST_BYTES


class Explanations:
    def __init__(self, most_requests: int = MOST_REQUESTS, most_bytes: int = MOST_BYTES) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._by_label: dict[str, list[ExplainedRequest]] = {}
        """Each list in the order of arrival."""
        self._ended: deque[ExplainedRequest] = deque()
        self._refused: deque[ExplainedRequest] = deque()
        self.num_bytes = 0

    def begin(self, spec: RequestSpec, now: float) -> ExplainedRequest:
        """Returns the record of a request that has arrived. It is kept at least until its `end`."""
        request = ExplainedRequest(spec.request_id, spec.label, now)
        self._by_label.setdefault(spec.label, []).append(request)
        self.num_bytes += request.num_bytes
        self._forget()
        return request

    def placed(self, request: ExplainedRequest, leg: int, attempt: int, choice: PlacementChoice) -> None:
        request.choices.append(ExplainedChoice(leg, attempt, choice))
        self._count(request, choice.num_bytes + _CHOICE_BYTES)
        self._forget()
        over = self.num_bytes > self._most_bytes
        while len(request.choices) > (1 if over else MOST_CHOICES):
            dropped = request.choices.pop(0 if over else 1)
            request.num_forgotten += 1
            self._count(request, -dropped.choice.num_bytes - _CHOICE_BYTES)

    def leg_ended(self, request: ExplainedRequest, leg: int, outcome: str) -> None:
        for each in reversed(request.choices):
            if each.leg == leg:
                each.outcome = outcome
                return

    def end(self, request: ExplainedRequest, failure: str = "") -> None:
        """Notes that the request has ended, and why if it failed: it may be forgotten from now on."""
        if request.is_live:
            self._end(request, failure, self._ended)

    def refused(self, spec: RequestSpec, now: float, failure: str) -> None:
        """Notes a request that was refused at its arrival. Few of these are kept: a flood of them spares the others."""
        self._end(self.begin(spec, now), failure, self._refused)

    def _end(self, request: ExplainedRequest, failure: str, kept: deque[ExplainedRequest]) -> None:
        request.is_live, request.failure = False, failure[:_MOST_FAILURE]
        self._count(request, len(request.failure))
        kept.append(request)
        self._forget()

    def find(self, label: str) -> list[ExplainedRequest]:
        """Returns the requests of that label which are remembered, the newest first: clients use one as they like."""
        return self._by_label.get(label, [])[::-1]

    def _count(self, request: ExplainedRequest, num_bytes: int) -> None:
        request.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _forget(self) -> None:
        for requests, most in ((self._refused, _MOST_REFUSED), (self._ended, self._most_requests)):
            while requests and (len(requests) > most or self.num_bytes > self._most_bytes):
                request = requests.popleft()
                self.num_bytes -= request.num_bytes
                namesakes = self._by_label[request.label]
                namesakes.remove(request)
                if not namesakes:
                    del self._by_label[request.label]
