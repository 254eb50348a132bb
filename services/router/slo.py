"""Which requests count for a latency objective, and as what. Pure.

Owns: the rule. Never: counts, clocks, or what an alert makes of them.

A request that the router or its workers let down is a miss, however soon it was. One that its client ended is a miss if
the time was up by then, and else counts for nothing: nobody knows how long it would have taken. Of a request that was
never fit to be served nothing is promised.
"""

from __future__ import annotations

import asyncio
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
ENDED_BY_CLIENT = (Cancelled, DeadlineExceeded, asyncio.CancelledError)
NEAR = 0.8
"""Share of the time at which alerts warn."""


class Grade(enum.Enum):
    MET = "met"
    NEAR = "near"
    """In time, with less than a fifth of it to spare."""
    MISSED = "missed"


def grade(elapsed_s: float, target_s: float) -> Grade:
    """Of what has happened."""
    if elapsed_s > target_s:
        return Grade.MISSED
    return Grade.NEAR if elapsed_s > NEAR * target_s else Grade.MET


def grade_failed(error: BaseException, elapsed_s: float, target_s: float) -> Grade | None:
    """Of what will never happen, since the request has failed after `elapsed_s`."""
    if isinstance(error, UNFIT):
        return None
    if isinstance(error, ENDED_BY_CLIENT) and elapsed_s <= target_s:
        return None
    return Grade.MISSED
