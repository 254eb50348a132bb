"""Decides which requests count for a latency objective, and with what grade. Pure.

Owns: the rule. Never: counts, clocks, or what an alert makes of them.

A request that fails because of the router or its workers is a miss, however soon it failed. One that its client ended
is a miss if its time was up by then; otherwise it does not count, as it is unknown how long it would have taken. A
request that could never be served does not count either.
"""

from __future__ import annotations

import enum

from services.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    MalformedMessage,
    MessageTooLarge,
    UnknownModel,
)

UNFIT = (InvalidRequest, ContextLengthExceeded, MalformedMessage, MessageTooLarge, UnknownModel, DuplicateRequest)
ENDED_BY_CLIENT = (Cancelled, DeadlineExceeded)
NEAR = 0.8
"""Share of the objective's time from which on a request is NEAR, the level at which alerts warn."""


class Grade(enum.Enum):
    MET = "met"
    NEAR = "near"
    """In time, with less than a fifth of it to spare."""
    MISSED = "missed"


def grade(elapsed_s: float, target_s: float) -> Grade:
    """Returns the grade of an event that happened after `elapsed_s`."""
    if elapsed_s > target_s:
        return Grade.MISSED
    return Grade.NEAR if elapsed_s > NEAR * target_s else Grade.MET


def grade_failed(error: BaseException, elapsed_s: float, target_s: float) -> Grade | None:
    """Returns the grade of an event that will never happen, since the request failed; None if it does not count."""
    if isinstance(error, UNFIT):
        return None
    if isinstance(error, ENDED_BY_CLIENT) and elapsed_s <= target_s:
        return None
    return Grade.MISSED
