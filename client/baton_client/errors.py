"""Turns failed calls into exceptions: the class says which gRPC status it was, the fields what the server says of it.

Owns: reading a status with its google.rpc details. Never: whether a call is made again (retries.py).
"""

from __future__ import annotations

from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from baton.v1.failure_pb2 import Failure, FailureReason, FieldViolation, FieldViolations, RetryDelay
from baton_client.wire import Metadata

_DETAILS_KEY = "grpc-status-details-bin"

_M = TypeVar("_M", bound=Message)


class CallFailed(Exception):
    """A call ended with a status other than OK. The gRPC error it came from is its `__cause__`."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        retry_after_s: float | None = None,
        violations: tuple[FieldViolation, ...] = (),
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        """Baton's own name of the failure, such as "NO_WORKER"; empty where no server of Baton's has answered."""
        self.retry_after_s = retry_after_s
        """How long the server asks to wait before the call is made again; None: it does not ask for another call."""
        self.violations = violations
        """The fields of the request that are wrong, and what is wrong with them."""


class InvalidArgument(CallFailed):
    """The request is wrong; `violations` names its fields."""


class NotFound(CallFailed):
    """The model is not served."""


class ResourceExhausted(CallFailed):
    """The cluster is full, which passes (`retry_after_s`), or the request is too large, which does not."""


class Unavailable(CallFailed):
    """No router could be reached, or it has no worker that could take the request."""


class CallTimedOut(CallFailed):
    """The deadline passed."""


class CallCancelled(CallFailed):
    """The call was cancelled, by this client or by the server."""


_KINDS: dict[grpc.StatusCode, type[CallFailed]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: CallTimedOut,
    grpc.StatusCode.CANCELLED: CallCancelled,
}


def from_rpc_error(error: grpc.RpcError) -> CallFailed:
    """Returns the exception that a failed call's status stands for; `CallFailed` itself for a code without a class."""
    code = error.code()
    details = _details(error)
    delay = _detail(details, "google.rpc.RetryInfo", RetryDelay)
    fields = _detail(details, "google.rpc.BadRequest", FieldViolations)
    return _KINDS.get(code, CallFailed)(
        code,
        error.details() or "",
        reason=_detail(details, "google.rpc.ErrorInfo", FailureReason).reason,
        retry_after_s=_seconds(delay) if delay.HasField("retry_delay") else None,
        violations=tuple(fields.field_violations),
    )


def _details(error: grpc.RpcError) -> Failure:
    """Reads the trailing metadata. What cannot be read counts as nothing: the code still says what is known."""
    # Pairs, of a type of its own in each of gRPC's two clients.
    for key, value in cast(Metadata, error.trailing_metadata() or ()):
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return _parsed(Failure, value)
    return Failure()


def _detail(failure: Failure, type_name: str, kind: type[_M]) -> _M:
    """Returns the first detail of that type, read as `kind`; an empty one if there is none."""
    for detail in failure.details:
        if detail.TypeName() == type_name:
            return _parsed(kind, detail.value)
    return kind()


def _parsed(kind: type[_M], data: bytes) -> _M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return kind()
    return message


def _seconds(delay: RetryDelay) -> float:
    return max(0.0, delay.retry_delay.seconds + delay.retry_delay.nanos * 1e-9)
