"""Decides which requests count for a latency objective, and with what grade. Pure.

Owns: the rule. Never: counts, clocks, or what an alert makes of them.

A request that fails because of the router or its workers is a miss, however soon it failed. One that its client ended
is a miss if its time was up by then; otherwise it does not count, as it is unknown how long it would have taken. A
request that could never be served does not count either, nor does one that its tenant may not have.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.core.errors import (
    BatonError,
    Cancelled,
    ConstraintUnsatisfied,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidKey,
    InvalidRequest,
    MalformedMessage,
    MessageTooLarge,
    ModelNotAllowed,
    QuotaExceeded,
    UnknownModel,
)
from services.router.coordinator.events import FinishReason

UNFIT = (
    *(InvalidRequest, ContextLengthExceeded, ConstraintUnsatisfied, MalformedMessage, MessageTooLarge),
    *(UnknownModel, InvalidKey, ModelNotAllowed, QuotaExceeded),
)
ENDED_BY_CLIENT = (Cancelled, DeadlineExceeded)
SUCCEEDED = frozenset(reason.value for reason in FinishReason)
"""The outcomes, as metrics and timelines name them, that are no failures."""
NEAR = 0.8
"""Share of the objective's time from which on a request is NEAR, the level at which alerts warn."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Says what latencies are to be at most, in milliseconds."""

    ttft_ms: float
    """From a request's arrival to its first token."""
    tpot_ms: float
    """The mean time of a token after the first."""
    itl_ms: float
    """The longest time between two tokens of a request."""
    e2e_ms: float
    """From its arrival to its last token."""
    queue_ms: float
    """The time it waits for a worker, all its waits together."""


class Grade(enum.Enum):
    MET = "met"
    NEAR = "near"
    """It was met with less than a fifth of the time to spare."""
    MISSED = "missed"


def grade(elapsed_s: float, target_s: float) -> Grade:
    """Returns the grade of an event that happened after `elapsed_s`."""
    if elapsed_s > target_s:
        return Grade.MISSED
    return Grade.NEAR if elapsed_s > NEAR * target_s else Grade.MET


def grade_failed(error: BaseException, elapsed_s: float, target_s: float) -> Grade | None:
    """Returns the grade of an event that will never happen, since the request failed; None if it does not count."""
    return _grade_failed(isinstance(error, UNFIT), isinstance(error, ENDED_BY_CLIENT), elapsed_s, target_s)


def grade_outcome(outcome: str, elapsed_s: float, target_s: float) -> Grade | None:
    """Returns what `grade_failed` does, of a failure of which only the outcome is known, as metrics and timelines name
    it: the error's reason in lower case."""
    return _grade_failed(outcome in _outcomes(UNFIT), outcome in _outcomes(ENDED_BY_CLIENT), elapsed_s, target_s)


def _grade_failed(is_unfit: bool, is_ended_by_client: bool, elapsed_s: float, target_s: float) -> Grade | None:
    if is_unfit or (is_ended_by_client and elapsed_s <= target_s):
        return None
    return Grade.MISSED


@functools.cache
def _outcomes(kinds: tuple[type[BatonError], ...]) -> frozenset[str]:
    return frozenset(kind.reason.lower() for kind in _with_subclasses(kinds))


def _with_subclasses(kinds: Sequence[type[BatonError]]) -> Iterator[type[BatonError]]:
    for kind in kinds:
        yield kind
        yield from _with_subclasses(kind.__subclasses__())
