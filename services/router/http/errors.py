"""Errors over HTTP: the one table from `core/errors.py` to statuses, and OpenAI's error object.

Owns: status, type, code and headers of every error. Never: which error it is; that is decided where it is for gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.core import errors
from services.rpc.status import retry_after_s, to_status


@dataclass(frozen=True)
class Kind:
    status: int
    type: str
    code: str = ""
    """Default: the error's reason in lower case."""


_MAX_MESSAGE_CHARS = 500
_INVALID = "invalid_request_error"
_INTERNAL = Kind(500, "server_error", "internal")
_UNAVAILABLE = Kind(503, "service_unavailable_error")

KINDS: dict[type[errors.BatonError], Kind] = {
    errors.InvalidRequest: Kind(400, _INVALID),
    errors.ContextLengthExceeded: Kind(400, _INVALID),
    errors.MalformedMessage: Kind(400, _INVALID),
    errors.MessageTooLarge: Kind(413, _INVALID),
    errors.UnknownModel: Kind(404, _INVALID, "model_not_found"),
    errors.UnknownWorker: Kind(404, _INVALID),
    errors.DuplicateRequest: Kind(409, _INVALID),
    errors.Overloaded: Kind(429, "rate_limit_error"),
    errors.NoWorker: _UNAVAILABLE,
    errors.Draining: _UNAVAILABLE,
    errors.WorkerFailed: _UNAVAILABLE,
    errors.DeadlineExceeded: Kind(504, "timeout_error"),
    # nginx's number for a client that went away: no one reads it.
    errors.Cancelled: Kind(499, _INVALID),
    # Between workers: none of them reaches a client but by a defect.
    errors.TransferFailed: _INTERNAL,
    errors.LeaseInvalid: _INTERNAL,
    errors.StaleIncarnation: _INTERNAL,
    errors.LeaseNotSealed: _INTERNAL,
    errors.LayoutMismatch: _INTERNAL,
    errors.UnsupportedModel: _INTERNAL,
    errors.ProtocolViolation: _INTERNAL,
    errors.CorruptBlock: _INTERNAL,
    errors.StepFailed: _INTERNAL,
    errors.ConfigError: _INTERNAL,
}


@dataclass(frozen=True)
class HttpError:
    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def http_error(error: BaseException) -> HttpError:
    """Any exception as it is answered. An unforeseen one is logged and becomes opaque, as over gRPC."""
    if not isinstance(error, errors.BatonError) or type(error) is errors.BatonError:
        return _answer(_INTERNAL, to_status(error).message, _INTERNAL.code, None)
    kind = next(KINDS[base] for base in type(error).__mro__ if base in KINDS)
    message, param = str(error), None
    if isinstance(error, errors.InvalidRequest):
        param = _param(error.field)
        message = f"{param}: {error.description}"
    elif isinstance(error, errors.UnknownModel):
        param = "model"
    headers = {}
    delay_s = retry_after_s(error)
    if delay_s is not None:
        # Whole seconds by the standard; what OpenAI's clients prefer to it is finer.
        headers = {"retry-after": str(max(1, math.ceil(delay_s))), "retry-after-ms": str(round(delay_s * 1000))}
    return _answer(kind, message, kind.code or error.reason.lower(), param, headers)


def plain_error(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> HttpError:
    """Of a path or method that does not exist."""
    return _answer(Kind(status, _INVALID), message, code, None, headers)


def _answer(
    kind: Kind, message: str, code: str, param: str | None, headers: Mapping[str, str] | None = None
) -> HttpError:
    if len(message) > _MAX_MESSAGE_CHARS:  # it quotes what the client sent
        message = message[:_MAX_MESSAGE_CHARS] + "…"
    error = {"message": message, "type": kind.type, "param": param, "code": code}
    return HttpError(kind.status, {"error": error}, dict(headers or {}))


def _param(field: str) -> str:
    """A request field's path as clients write it: without the groups that it is in over gRPC."""
    return field.removeprefix("sampling.").removeprefix("stopping.").removeprefix("response.")
