"""Sends one response: JSON at once, or events as they arrive; and errors, at any point of it.

Owns: the form on the wire, and the one table from `core/errors.py` to statuses and OpenAI's error object. Never: what
an answer contains, or which error it is; that is decided where it is for gRPC. A part of a stream is sent while the
client has room, and waits for nothing; all else waits while a slow client has not read what was sent before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Send

from services.core import errors
from services.router.answer import Room
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
    errors.ConstraintUnsatisfied: Kind(400, _INVALID),
    errors.UnsupportedModel: Kind(400, _INVALID),
    errors.MalformedMessage: Kind(400, _INVALID),
    errors.MessageTooLarge: Kind(413, _INVALID),
    errors.UnknownModel: Kind(404, _INVALID, "model_not_found"),
    errors.UnknownWorker: Kind(404, _INVALID),
    errors.UnknownRequest: Kind(404, _INVALID),
    # As OpenAI answers: its clients look for these types and codes.
    errors.InvalidKey: Kind(401, _INVALID, "invalid_api_key"),
    errors.ModelNotAllowed: Kind(403, _INVALID, "model_not_found"),
    errors.QuotaExceeded: Kind(429, "requests", "rate_limit_exceeded"),
    errors.Overloaded: Kind(429, "rate_limit_error"),
    errors.NoWorker: _UNAVAILABLE,
    errors.Draining: _UNAVAILABLE,
    errors.WorkerFailed: _UNAVAILABLE,
    errors.DeadlineExceeded: Kind(504, "timeout_error"),
    # nginx's number for a client that went away; no one reads the response.
    errors.Cancelled: Kind(499, _INVALID),
    errors.WrongOutput: Kind(500, "server_error"),
    # Errors between workers: none of them reaches a client except by a defect.
    errors.Unauthenticated: _INTERNAL,
    errors.WorkerIdInUse: _INTERNAL,
    errors.RoleGone: _INTERNAL,
    errors.TransferFailed: _INTERNAL,
    errors.LeaseInvalid: _INTERNAL,
    errors.StaleIncarnation: _INTERNAL,
    errors.LeaseNotSealed: _INTERNAL,
    errors.LayoutMismatch: _INTERNAL,
    errors.ProtocolViolation: _INTERNAL,
    errors.CorruptBlock: _INTERNAL,
    errors.StepFailed: _INTERNAL,
    errors.SequencePreempted: _INTERNAL,
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
    elif isinstance(error, errors.UnknownModel | errors.ModelNotAllowed):
        param = "model"
    elif isinstance(error, errors.QuotaExceeded) and error.limit.startswith("tokens"):
        kind = replace(kind, type="tokens")
    headers = {"www-authenticate": "Bearer"} if kind.status == 401 else {}
    delay_s = retry_after_s(error)
    if delay_s is not None:
        # The standard wants whole seconds; OpenAI's clients prefer the finer header.
        headers |= {"retry-after": str(max(1, math.ceil(delay_s))), "retry-after-ms": str(round(delay_s * 1000))}
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
    for prefix in ("sampling.", "stopping.", "response."):
        field = field.removeprefix(prefix)
    return field


REQUEST_ID = "x-request-id"
ROOM, DIRECT = "room", "send"
"""Where a scope's state has the client's `Room`, and what `send` comes to: the layers between add only headers."""
_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"
_EVENT_HEADERS = {
    "cache-control": "no-cache",
    # Without this, nginx would collect events before it passes them on.
    "x-accel-buffering": "no",
}
# JSON leaves these characters in strings as they are, and many clients take them for the end of a line.
_LINE_ENDS_AS_TEXT = ("\x85", "\u2028", "\u2029")
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in _LINE_ENDS_AS_TEXT}
_DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_PARTS_AT_ONCE = 4096
"""Pieces of JSON that are made in one turn of the event loop, about a millisecond's work."""


_UNPRINTABLE = re.compile(rb"[^\x20-\x7e]")


def printable_header(value: bytes) -> bytes:
    """Returns a header's value with what cannot stand in a header or a log written as in a URL: values that differ
    still do."""
    return _UNPRINTABLE.sub(lambda found: b"%%%02X" % ord(found[0]), value)


async def refuse(send: Send, error: HttpError) -> None:
    """Answers a request that does not reach an endpoint."""
    await Reply(send).failed(error)


class Reply:
    def __init__(self, send: Send, room: Room | None = None, direct: Send | None = None) -> None:
        """`room` is the client's, for streams: None for one that always has room. `direct` sends what needs no
        headers; None: as `send`."""
        self.room = room or Room()
        self._send = send
        self._direct = direct or send
        self._started = False
        self._ended = False
        self._time = asyncio.get_running_loop().time
        self.touched_s = self._time()
        """When a part was last begun, or a comment due, on the event loop's clock."""
        self.write_error: Callable[[HttpError], bytes] = _error_event
        """Makes what ends a stream that has begun and fails."""

    async def json(self, payload: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] = {}) -> None:
        await self.encoded(dump(payload), status, headers)

    async def long_json(self, payload: Mapping[str, Any]) -> None:
        """Sends JSON of some megabytes. Others have their turns of the event loop while it is encoded."""
        await self.encoded(await dump_in_turns(payload))

    async def encoded(self, body: bytes, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        """Sends JSON that is encoded already."""
        await self._start(status, {"content-type": _JSON, "content-length": str(len(body)), **headers})
        await self._send({"type": "http.response.body", "body": body})

    def events(self, payloads: Sequence[bytes]) -> None:
        """Sends events. `payloads` are their data, each of which `dump` has made, so that it is one line."""
        self.part(b"".join([b"data: %b\n\n" % payload for payload in payloads]))

    def comment(self, words: str) -> None:
        """Sends a comment, which clients of event streams ignore, if the client has room for it."""
        self.touched_s = self._time()
        if self.room.is_there and not self._ended:
            self.part(f": {words}\n\n".encode())

    def part(self, data: bytes) -> None:
        """Sends a part of a stream as it is on the wire, after the headers. Call it only while the client has room:
        then no part waits for anything."""
        self.touched_s = self._time()
        if not self._started:
            _at_once(self._start(200, {"content-type": _EVENTS, **_EVENT_HEADERS}))
        _at_once(self._direct({"type": "http.response.body", "body": data, "more_body": True}))

    async def done(self, last: bytes = _DONE) -> None:
        """Ends a stream that is complete, once."""
        if not self._ended:
            self._ended = True
            await self._send({"type": "http.response.body", "body": last})

    async def failed(self, error: HttpError) -> None:
        """Sends the error with its status, or, in a stream, as an event that ends it without [DONE]."""
        if not self._started:
            await self.json(error.body, error.status, error.headers)
        else:
            await self._send({"type": "http.response.body", "body": self.write_error(error)})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
        self._started = True


@contextlib.asynccontextmanager
async def kept_alive(reply: Reply, every_s: float, words: Callable[[], str]) -> AsyncIterator[None]:
    """Sends a comment with these words whenever nothing was sent for `every_s` seconds within the block; 0: never."""
    task = asyncio.create_task(_keep_alive(reply, every_s, words), name="http keepalive") if every_s else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # where the client is gone, that is noticed elsewhere


async def _keep_alive(reply: Reply, every_s: float, words: Callable[[], str]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        left_s = reply.touched_s + every_s - loop.time()
        if left_s > 0:
            await asyncio.sleep(left_s)
        else:
            reply.comment(words())


def _at_once(sending: Any) -> None:
    """Runs a coroutine that waits for nothing."""
    try:
        sending.send(None)
    except StopIteration:
        return
    raise AssertionError("a client that has room is waited for")


def _error_event(error: HttpError) -> bytes:
    return b"data: %b\n\n" % dump(error.body)


def dump(payload: Mapping[str, Any]) -> bytes:
    """Returns JSON in UTF-8, on a single line by every definition of a line that clients use."""
    return _on_one_line(_ENCODER.encode(payload)).encode()


async def dump_in_turns(payload: Mapping[str, Any]) -> bytes:
    """Returns what `dump` does. It takes longer, but others have their turns of the event loop meanwhile."""
    parts = []
    for number, part in enumerate(_ENCODER.iterencode(payload), 1):
        parts.append(_on_one_line(part))
        if number % _PARTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return "".join(parts).encode()


def _on_one_line(text: str) -> str:
    if text.isascii() or not any(end in text for end in _LINE_ENDS_AS_TEXT):
        return text  # translating takes ten times as long as looking
    return text.translate(_LINE_ENDS)
