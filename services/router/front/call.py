"""Defines a `Call`, which is what a front hands in: who asks, for which model, what, and until when.

Both fronts, gRPC and HTTP, make a `Call` of each request, and `Intake` knows no other way in.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.router.catalogue import ServedModel
from services.router.front.incoming import Incoming


@dataclass(frozen=True, slots=True)
class Caller:
    """Names who asks, as far as the front has found out."""

    tenant: str = ""
    """Empty if the front knows no tenant. It never comes from a request's body."""
    traceparent: str = ""
    """The caller's span, or empty."""


@dataclass(frozen=True, slots=True)
class Call:
    caller: Caller
    model: ServedModel
    incoming: Incoming
    """The request. It loses its prompt when that is tokenised."""
    timeout_s: float | None
    """Seconds from now; more than a day counts as a day, since some clients write "no deadline" as a very long one."""
    stream: bool
    in_one_message: bool = False
    """The client gets the whole answer as one message, whose size its runtime limits."""
