"""One response on its way out: JSON at once, or events as they come. Errors fit in wherever it has got to.

Owns: the form on the wire. Never: what is in it. Sending waits while a slow client has not taken what was sent before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Send

from services.router.http.errors import HttpError

REQUEST_ID = "x-request-id"
_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"
_EVENT_HEADERS = {
    "cache-control": "no-cache",
    # nginx would gather events before it passes them on.
    "x-accel-buffering": "no",
}
# JSON leaves these in strings as they are, and many clients take them for the end of a line.
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
_DONE = b"data: [DONE]\n\n"


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
        """The end of a stream in which everything was said."""
        await self._body(_DONE, more=False)

    async def failed(self, error: HttpError) -> None:
        """Before anything was sent, its status; in a stream, an event, and the stream ends without its [DONE]."""
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
    """JSON in UTF-8, on one line whatever a client calls a line."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return (text if text.isascii() else text.translate(_LINE_ENDS)).encode()
