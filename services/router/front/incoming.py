"""Holds a request on its way in, and then what is left of it once its prompt is tokens.

Code that serves the request passes this object on instead of the message: a stack frame that refers to the message
would keep all of it for as long as the request lives. Memory of a protobuf message is only freed as a whole.
"""

from __future__ import annotations

from baton.v1 import inference_pb2
from services.router.front.byte_budget import Charge

_SMALL = ("request_id", "model", "sampling", "stopping", "response", "priority", "session", "cache_salt")
TOKEN_BYTES = 40
"""Bytes that a token of a live request takes: an integer, and its place in a tuple."""


class Incoming:
    def __init__(self, request: inference_pb2.GenerateRequest, charge: Charge | None = None) -> None:
        """`charge` is the memory that the request is charged for; the caller ends it."""
        self.request = request
        self.charge = charge

    def tokenised(self, num_tokens: int) -> None:
        """Replaces the message by its parameters alone: no prompt, and no fields that this version does not know.

        Raises Overloaded if the tokens exceed the byte budget.
        """
        if self.charge is not None:
            self.charge.become(num_tokens * TOKEN_BYTES)
        self.request.DiscardUnknownFields()
        kept = inference_pb2.GenerateRequest()
        for name in _SMALL:
            if self.request.HasField(name):
                value = getattr(self.request, name)
                if isinstance(value, str | int):
                    setattr(kept, name, value)
                else:
                    getattr(kept, name).CopyFrom(value)
        self.request = kept
