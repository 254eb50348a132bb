"""Sends one response: JSON at once, or events as they arrive; and errors, at any point of it.

Owns: the form on the wire, and the one table from `core/errors.py` to statuses and OpenAI's error object. Never: what
an answer contains, or which error it is; that is decided where it is for gRPC. Sending waits while a slow client has
not read what was sent before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope, Send

from services.core import errors
from services.core.ids import new_request_id
from services.rpc.status import retry_after_s, to_status


@dataclass(frozen=True)
class Kind:
    status: int
    type: str
    code: str = ""
    """The error's code for clients; if empty, the error's reason in lower case."""


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
    errors.UnknownRequest: Kind(404, _INVALID),
    errors.DuplicateRequest: Kind(409, _INVALID),
    errors.Overloaded: Kind(429, "rate_limit_error"),
    errors.NoWorker: _UNAVAILABLE,
    errors.Draining: _UNAVAILABLE,
    errors.WorkerFailed: _UNAVAILABLE,
    errors.DeadlineExceeded: Kind(504, "timeout_error"),
    # nginx's number for a client that went away; no one reads the response.
    errors.Cancelled: Kind(499, _INVALID),
    # Errors between workers: none of them reaches a client except by a defect.
    errors.Unauthenticated: _INTERNAL,
    errors.WorkerIdInUse: _INTERNAL,
    errors.RoleGone: _INTERNAL,
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
    """Returns how any exception is answered. An unforeseen one is logged and becomes opaque, as with gRPC."""
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
        # The standard wants whole seconds; OpenAI's clients prefer the finer header.
        headers = {"retry-after": str(max(1, math.ceil(delay_s))), "retry-after-ms": str(round(delay_s * 1000))}
    return _answer(kind, message, kind.code or error.reason.lower(), param, headers)


def plain_error(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> HttpError:
    """Returns an error of HTTP's own, without a BatonError: an unknown path, a connection beyond the limit."""
    return _answer(_UNAVAILABLE if status == 503 else Kind(status, _INVALID), message, code, None, headers)


def _answer(
    kind: Kind, message: str, code: str, param: str | None, headers: Mapping[str, str] | None = None
) -> HttpError:
    if len(message) > _MAX_MESSAGE_CHARS:  # the message may quote what the client sent
        message = message[:_MAX_MESSAGE_CHARS] + "…"
    error = {"message": message, "type": kind.type, "param": param, "code": code}
    return HttpError(kind.status, {"error": error}, dict(headers or {}))


def _param(field: str) -> str:
    """Returns a request field's path as clients write it: without the groups that it is in with gRPC."""
    return field.removeprefix("sampling.").removeprefix("stopping.").removeprefix("response.")


REQUEST_ID = "x-request-id"
_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"
_EVENT_HEADERS = {
    "cache-control": "no-cache",
    # Without this, nginx would collect events before it passes them on.
    "x-accel-buffering": "no",
}
# JSON leaves these characters in strings as they are, and many clients take them for the end of a line.
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
_DONE = b"data: [DONE]\n\n"


async def refuse(scope: Scope, send: Send, error: HttpError) -> None:
    """Answers a request that does not reach an endpoint."""
    await Reply(send, Headers(scope=scope).get(REQUEST_ID) or new_request_id()).failed(error)


class Reply:
    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self._started = False

    async def json(self, payload: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] = {}) -> None:
        body = dump(payload)
        await self._start(status, {"content-type": _JSON, "content-length": str(len(body)), **headers})
        await self._body(body, more=False)

    async def events(self, payloads: Sequence[Mapping[str, Any]]) -> None:
        if not self._started:
            await self._start(200, {"content-type": _EVENTS, **_EVENT_HEADERS})
        await self._body(b"".join(b"data: %b\n\n" % dump(payload) for payload in payloads), more=True)

    async def done(self) -> None:
        """Ends a stream that is complete."""
        await self._body(_DONE, more=False)

    async def failed(self, error: HttpError) -> None:
        """Sends the error with its status, or, in a stream, as an event that ends it without [DONE]."""
        if not self._started:
            await self.json(error.body, error.status, error.headers)
        else:
            await self._body(b"data: %b\n\n" % dump(error.body), more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        pairs.append((REQUEST_ID.encode(), self._request_id.encode("latin-1", "replace")))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
        self._started = True

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def dump(payload: Mapping[str, Any]) -> bytes:
    """Returns JSON in UTF-8, on a single line by every definition of a line that clients use."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return (text if text.isascii() else text.translate(_LINE_ENDS)).encode()
