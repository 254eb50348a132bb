"""Counts what peers of the cluster send before it is parsed, with a limit for each kind of message.

Owns: the limits of the requests of sessions and fetches, and of a fetch's answers. A router's requests to a worker and
a worker's blocks may have megabytes, which as empty messages or unknown fields would take gigabytes. Never: what
clients send (`services/router/front`), and what a worker says in its session (`services/router/workers/sessions.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from baton.v1 import kvtransfer_pb2, worker_pb2
from services.core.errors import BatonError, MessageTooLarge
from services.rpc import wire_count
from services.rpc.interceptors import Handler
from services.rpc.wire_count import SMALL_BYTES, MessageLimits


@dataclass(frozen=True)
class Counted:
    """Parses messages of one kind that are within its limits."""

    kind: Any
    limits: MessageLimits = field(default_factory=MessageLimits)
    most_bytes: int = SMALL_BYTES

    def parse(self, data: bytes) -> Any:
        """Returns the message. Raises MessageTooLarge, InvalidRequest or MalformedMessage, or what the parser does."""
        if len(data) > self.most_bytes:
            raise MessageTooLarge(f"a {self.kind.DESCRIPTOR.name} has {len(data)} bytes")
        wire_count.check(data, self.kind.DESCRIPTOR, self.limits)
        return self.kind.FromString(data)

    def parse_or_none(self, data: bytes) -> Any:
        """Returns the message, or None, the runtime's word for bytes that are no such message."""
        try:
            return self.parse(data)
        except (BatonError, DecodeError):
            return None


_UNBOUNDED = 1 << 40
"""For messages that the runtime bounds (`options.py`)."""
_MOST_HASH_BYTES = 1 << 20
"""Of a message with the hashes of a prompt's blocks: a million tokens in blocks of 16."""
REQUESTS = {
    # A prompt's tokens, and the leases that a heartbeat holds.
    "/baton.v1.WorkerService/Session": Counted(
        worker_pb2.SessionRequest, MessageLimits(fields=1 << 16, elements=1 << 22, text_bytes=64 << 10), _UNBOUNDED
    ),
    "/baton.v1.WorkerService/GetModelText": Counted(worker_pb2.GetModelTextRequest),
    "/baton.v1.KVTransferService/Fetch": Counted(kvtransfer_pb2.FetchRequest),
    "/baton.v1.KVTransferService/Release": Counted(kvtransfer_pb2.ReleaseRequest),
    "/baton.v1.KVTransferService/Lend": Counted(kvtransfer_pb2.LendRequest, most_bytes=_MOST_HASH_BYTES),
    "/baton.v1.KVTransferService/Keep": Counted(kvtransfer_pb2.KeepRequest, most_bytes=_MOST_HASH_BYTES),
}
FETCH_RESPONSE = Counted(kvtransfer_pb2.FetchResponse, MessageLimits(fields=1 << 16), _UNBOUNDED)
RELEASE_RESPONSE = Counted(kvtransfer_pb2.ReleaseResponse)
LEND_RESPONSE = Counted(kvtransfer_pb2.LendResponse)
KEEP_RESPONSE = Counted(kvtransfer_pb2.KeepResponse)


class CountInterceptor(grpc.aio.ServerInterceptor):
    """Has the requests of peers counted before they are parsed. One that is not within its limits ends its call as one
    that is malformed."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler: Any = await continuation(handler_call_details)
        counted = REQUESTS.get(handler_call_details.method)
        if handler is None or counted is None:
            found: Handler | None = handler
            return found
        changed: Handler = handler._replace(request_deserializer=counted.parse)
        return changed
