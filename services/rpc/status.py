"""Translates errors to and from the wire: one table from `core/errors.py` to gRPC codes, with google.rpc details.

Owns: both directions (error to `google.rpc.Status`, status or failed call back to the error) and what a client may
learn of an unforeseen exception: only an id that is in the log. Never: retries, or what a service does about an error.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from services.core import errors

logger = logging.getLogger(__name__)

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"
DEFAULT_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 3600.0

_Code = grpc.StatusCode

CODES: dict[type[errors.BatonError], grpc.StatusCode] = {
    errors.InvalidRequest: _Code.INVALID_ARGUMENT,
    errors.ContextLengthExceeded: _Code.INVALID_ARGUMENT,
    errors.ConstraintUnsatisfied: _Code.INVALID_ARGUMENT,
    errors.MalformedMessage: _Code.INVALID_ARGUMENT,
    errors.Unauthenticated: _Code.UNAUTHENTICATED,
    errors.InvalidKey: _Code.UNAUTHENTICATED,
    errors.ModelNotAllowed: _Code.PERMISSION_DENIED,
    errors.MessageTooLarge: _Code.RESOURCE_EXHAUSTED,
    errors.UnknownModel: _Code.NOT_FOUND,
    errors.UnknownWorker: _Code.NOT_FOUND,
    errors.UnknownRequest: _Code.NOT_FOUND,
    errors.WorkerIdInUse: _Code.ALREADY_EXISTS,
    errors.Overloaded: _Code.RESOURCE_EXHAUSTED,
    errors.QuotaExceeded: _Code.RESOURCE_EXHAUSTED,
    errors.NoWorker: _Code.UNAVAILABLE,
    errors.Draining: _Code.UNAVAILABLE,
    errors.RoleGone: _Code.UNAVAILABLE,
    errors.LeaseInvalid: _Code.ABORTED,
    errors.StaleIncarnation: _Code.ABORTED,
    errors.LeaseNotSealed: _Code.FAILED_PRECONDITION,
    errors.LayoutMismatch: _Code.FAILED_PRECONDITION,
    errors.UnsupportedModel: _Code.FAILED_PRECONDITION,
    errors.ProtocolViolation: _Code.FAILED_PRECONDITION,
    errors.TransferFailed: _Code.UNAVAILABLE,
    errors.CorruptBlock: _Code.DATA_LOSS,
    errors.WrongOutput: _Code.DATA_LOSS,
    errors.DeadlineExceeded: _Code.DEADLINE_EXCEEDED,
    errors.Cancelled: _Code.CANCELLED,
    # A client may try again later: the crashes need not be the request's fault. The router bounds each attempt.
    errors.WorkerFailed: _Code.UNAVAILABLE,
    errors.StepFailed: _Code.INTERNAL,
    errors.SequencePreempted: _Code.ABORTED,
    errors.ConfigError: _Code.INTERNAL,
}

# The meaning of a status without Baton's ErrorInfo: the runtime made it (connection refused, message too large, ...).
_BY_CODE: dict[int, type[errors.BatonError]] = {
    _Code.RESOURCE_EXHAUSTED.value[0]: errors.Overloaded,
    _Code.UNAVAILABLE.value[0]: errors.NoWorker,
    _Code.DEADLINE_EXCEEDED.value[0]: errors.DeadlineExceeded,
    _Code.CANCELLED.value[0]: errors.Cancelled,
    _Code.UNAUTHENTICATED.value[0]: errors.Unauthenticated,
    _Code.DATA_LOSS.value[0]: errors.CorruptBlock,
}
_BY_REASON = {leaf.reason: leaf for leaf in CODES}
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
_RETRYABLE = (
    *(errors.Overloaded, errors.QuotaExceeded),
    *(errors.NoWorker, errors.Draining, errors.WorkerFailed),
)

# A status travels in HTTP/2 trailers (8 KiB by default) and has the message twice: percent-encoded and in the details.
_MAX_MESSAGE_BYTES = 768
_MAX_FIELD_BYTES = 256


def code_of(error: errors.BatonError) -> grpc.StatusCode:
    """Returns the code of the class of `error` or of its nearest base in the table; INTERNAL for BatonError itself."""
    return next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), grpc.StatusCode.INTERNAL)


def retry_after_s(error: errors.BatonError) -> float | None:
    """Returns the seconds after which a client should try again, or None if that would not help."""
    if error.retry_after_s is None and isinstance(error, _RETRYABLE):
        return DEFAULT_RETRY_AFTER_S
    return None if error.retry_after_s is None else _bounded_s(error.retry_after_s)


def to_status(error: BaseException) -> status_pb2.Status:
    """Returns the google.rpc.Status of any exception.

    One that is no leaf of the error tree is logged and becomes opaque.
    """
    if not isinstance(error, errors.BatonError) or type(error) is errors.BatonError:
        return _opaque(error)
    status = status_pb2.Status(code=code_of(error).value[0], message=_clip(str(error), _MAX_MESSAGE_BYTES))
    for detail in _details(error, status.message):
        status.details.add().Pack(detail)
    return status


def from_status(status: status_pb2.Status) -> errors.BatonError:
    """Returns the error that a status stands for: by its reason, else by its code, else a plain BatonError.

    Its text is clipped as that of a status that is sent: it is logged, shown, and kept while its peer is known.
    """
    message = _clip(status.message, _MAX_MESSAGE_BYTES)
    info = _unpack(status, error_details_pb2.ErrorInfo)
    bad_request = _unpack(status, error_details_pb2.BadRequest)
    retry = _unpack(status, error_details_pb2.RetryInfo)
    kind = _BY_REASON.get(info.reason) if info is not None and info.domain == DOMAIN else _BY_CODE.get(status.code)
    if kind is not None and issubclass(kind, errors.InvalidRequest):
        violation = (
            bad_request.field_violations[0] if bad_request is not None and bad_request.field_violations else None
        )
        if violation is None:
            return kind("", message)
        return kind(_clip(violation.field, _MAX_FIELD_BYTES), _clip(violation.description, _MAX_MESSAGE_BYTES))
    if kind is None:
        name = _BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN).name
        return errors.BatonError(f"{name}: {message}")
    retry_after_s = None if retry is None else _seconds(retry.retry_delay)
    return kind(message, retry_after_s=retry_after_s)


def status_of_call(error: grpc.RpcError) -> status_pb2.Status:
    """Returns the status that a failed call ended with, with its details if the peer sent them."""
    call: Any = error  # both the sync and the aio error have these methods; the stub's base class declares none
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY:
            with contextlib.suppress(DecodeError):  # the peer's mistake; the code still tells what is known
                return status_pb2.Status.FromString(value)
    return status_pb2.Status(code=call.code().value[0], message=call.details() or "")


def from_call(error: grpc.RpcError) -> errors.BatonError:
    """Returns the error that a failed call stands for."""
    return from_status(status_of_call(error))


def end(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    """Gives the RPC the error's status. The status is sent when the handler returns, which it must do next.

    `context.abort` is not used, since it ends the RPC by one more exception: its traceback and the frames in it, which
    hold the request, would keep each other alive until the next full garbage collection.
    """
    end_as(context, status_parts(error))


StatusParts = tuple[grpc.StatusCode, str, bytes]
"""What is sent of an error: its code, its message and its google.rpc.Status."""


def status_parts(error: BaseException) -> StatusParts:
    """Returns what `end` sends. It takes longer than to send it."""
    status = to_status(error)
    return _BY_NUMBER[status.code], status.message, status.SerializeToString()


def end_as(context: grpc.aio.ServicerContext[Any, Any], parts: StatusParts) -> None:
    """Gives the RPC that status, as `end` does."""
    code, message, status = parts
    context.set_code(code)
    context.set_details(message)
    context.set_trailing_metadata(((DETAILS_KEY, status),))


def _opaque(error: BaseException) -> status_pb2.Status:
    error_id = secrets.token_hex(8)
    logger.error("internal error %s", error_id, exc_info=error)
    status = status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message=f"internal error {error_id}")
    info = error_details_pb2.ErrorInfo(reason=errors.BatonError.reason, domain=DOMAIN, metadata={"error_id": error_id})
    status.details.add().Pack(info)
    return status


def _details(error: errors.BatonError, message: str) -> list[Any]:
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if isinstance(error, errors.InvalidRequest):
        bad_request = error_details_pb2.BadRequest()
        field, description = _clip(error.field, _MAX_FIELD_BYTES), _clip(error.description, _MAX_MESSAGE_BYTES)
        bad_request.field_violations.add(field=field, description=description)
        details.append(bad_request)
    if isinstance(error, errors.Overloaded):
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject="capacity", description=message)
        details.append(quota)
    if isinstance(error, errors.QuotaExceeded):
        quota = error_details_pb2.QuotaFailure()
        subject = f"tenant:{_clip(error.subject, _MAX_FIELD_BYTES)}"
        quota.violations.add(subject=subject, description=message, quota_id=error.limit)
        details.append(quota)
    delay_s = retry_after_s(error)
    if delay_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(delay_s * 1000))
        details.append(retry)
    return details


def _unpack(status: status_pb2.Status, kind: Any) -> Any:
    """Returns the first detail of that kind, or None if there is none or it does not parse."""
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            detail = kind()
            try:
                packed.Unpack(detail)
            except DecodeError:  # the peer's mistake; the code still tells what is known
                return None
            return detail
    return None


def _seconds(delay: Any) -> float:
    """Returns the seconds of a google.protobuf.Duration, bounded, since a peer may have put any number into it."""
    return _bounded_s(delay.seconds + delay.nanos * 1e-9)


def _bounded_s(delay_s: float) -> float:
    return float(min(max(0.0, delay_s), _MAX_RETRY_AFTER_S))


def _clip(text: str, max_bytes: int) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= max_bytes else data[:max_bytes].decode(errors="ignore") + "…"
