"""Defines a `Call`, which is what a front hands in: who asks, for which model, what, and until when.

Both fronts, gRPC and HTTP, make a `Call` of each request, and `Intake` knows no other way in.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.router.catalogue import ServedModel
from services.router.front.incoming import Incoming
from services.router.tenants.gate import Party
from services.router.tenants.tenant import OPEN, Tenant


@dataclass(frozen=True, slots=True)
class Caller:
    """Names who asks, as far as the front has found out."""

    tenant: Tenant = OPEN
    """The one whose key the call has; it never comes from a request's body."""
    traceparent: str = ""
    """The caller's span, or empty."""
    front: str = "grpc"
    """Where it came in: `grpc` or `http`."""


class Together:
    """Joins the prompts of one call: all are let in, or none is."""

    def __init__(self, num_prompts: int, party: Party) -> None:
        self.party = party
        self._all = asyncio.Barrier(num_prompts)
        self.num_tokens = 0
        """What they ask for together, once all of them have said it."""

    async def wait(self) -> None:
        """Returns when all of them wait, and may then be used again."""
        await self._all.wait()


@dataclass(frozen=True, slots=True)
class Call:
    caller: Caller
    model: ServedModel
    incoming: Incoming
    """The request. It loses its prompt when that is tokenised."""
    timeout_s: float | None
    """Seconds from now; more than a day counts as a day, since some clients write "no deadline" as a very long one."""
    stream: bool
    together: Together | None = None
    """Joins it with the further prompts of the call that it came in."""
    in_one_message: bool = False
    """The client gets the whole answer as one message, whose size its runtime limits."""
