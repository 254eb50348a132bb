"""Defines a `Call`, which is what a front hands in: who asks, for which model, what (`Incoming`), and until when.

Both fronts, gRPC and HTTP, make a `Call` of each request, and `Intake` knows no other way in. They have one
`ByteBudget`, since they fill the same memory: the bytes of requests that are being read, at the tokenizer, queued or
running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from baton.v1 import inference_pb2
from services.core.errors import Overloaded
from services.router.catalogue import ServedModel
from services.router.tenants.gate import Party
from services.router.tenants.tenant import OPEN, Tenant

RETRY_AFTER_S = 1.0
_LARGE_BYTES = 1 << 20


class ByteBudget:
    def __init__(self, limit_bytes: int, freed: Callable[[], None] = lambda: None) -> None:
        """`freed` is called when a request has given back at least a mebibyte."""
        self._limit_bytes = limit_bytes
        self._freed = freed
        self.used_bytes = 0

    def charge(self) -> Charge:
        """Returns the charge of one request, which is 0 at first."""
        return Charge(self)

    def add(self, num_bytes: int) -> None:
        """Adds to the sum, or raises Overloaded and adds nothing. A negative number is always accepted."""
        if num_bytes > 0 and self.used_bytes + num_bytes > self._limit_bytes:
            raise Overloaded("too many bytes of requests are waiting", retry_after_s=RETRY_AFTER_S)
        self.used_bytes += num_bytes
        if num_bytes <= -_LARGE_BYTES:
            self._freed()


class Charge:
    """Holds the bytes that one request takes of the budget: a context manager that gives all of them back at its
    end."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Adds to the charge, or raises Overloaded and leaves it as it was."""
        self.become(self.num_bytes + num_bytes)

    def become(self, num_bytes: int) -> None:
        """Sets the charge, or raises Overloaded and leaves it as it was."""
        self._budget.add(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.become(0)


_KEPT = (
    *("request_id", "model", "sampling", "stopping", "response", "priority", "session", "cache_salt"),
    *("constraint", "n", "tool_choice", "parallel_tool_calls"),
)
TOKEN_BYTES = 40
"""Bytes that a token of a live request takes: an integer, and its place in a tuple."""
PROMPT_ENTRY_BYTES = 400
"""Bytes that one log-probability of the prompt takes until the answer is sent, as a message and then in an object for
JSON."""


class Incoming:
    """Holds a request on its way in, and then what is left of it once its prompt is tokens.

    Code that serves the request passes this object on instead of the message: a stack frame that refers to the message
    would keep all of it for as long as the request lives. Memory of a protobuf message is only freed as a whole.
    """

    def __init__(
        self, request: inference_pb2.GenerateRequest, charge: Charge | None = None, *, has_default_output: bool = False
    ) -> None:
        """`charge` is the memory that the request is charged for; the caller ends it. `has_default_output` says that
        its max_tokens is the front's, since the client named none: then a tenant's smaller cap takes its place."""
        self.request = request
        self.charge = charge
        self.has_default_output = has_default_output

    def tokenised(self, num_tokens: int, num_prompt_entries: int = 0) -> None:
        """Replaces the message by its parameters alone: no prompt, and no fields that this version does not know.

        `num_prompt_entries` log-probabilities of the prompt are still to come. Raises Overloaded if all of it exceeds
        the byte budget.
        """
        if self.charge is not None:
            num_bytes = num_tokens * TOKEN_BYTES + num_prompt_entries * PROMPT_ENTRY_BYTES
            self.charge.become(num_bytes + self.request.constraint.ByteSize())
        self.request.DiscardUnknownFields()
        kept = inference_pb2.GenerateRequest()
        for name in _KEPT:
            if self.request.HasField(name):
                value = getattr(self.request, name)
                if isinstance(value, str | int):
                    setattr(kept, name, value)
                else:
                    getattr(kept, name).CopyFrom(value)
        self.request = kept


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
