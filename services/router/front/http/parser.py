"""Bounds what one HTTP request may cost to parse, beside its size: header lines, trailer lines and tiny chunks.

A line costs microseconds however short it is, so 64 KiB of them take longer than a decode step, in one piece; and a
chunk of one byte costs as much as one of a megabyte. Owns: those bounds. Never: sockets, turns or stages (server.py).
"""

from __future__ import annotations

from typing import Any

import h11

from services.router.front.http.reply import HttpError, plain_error

MAX_HEAD_BYTES = 64 << 10
MAX_LINES = 128
"""The most lines of a request's head, and of the trailers after a chunked body. Proxies commonly allow 100."""
MAX_SMALL_CHUNKS = 4096
"""A body may have this many chunks of any size. One with more must have `MIN_MEAN_BYTES` in each on average, so that
parsing a byte of it costs no more than parsing a byte of a small request."""
MIN_MEAN_BYTES = 64


class BoundedParser(h11.Connection):
    """Parses one connection's requests as h11 does, and raises `h11.RemoteProtocolError` past the bounds as well."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.refusal = plain_error(400, "this is no HTTP request", "malformed_message")
        """The answer to what could not be parsed. Valid once `next_event` has raised."""
        self._num_chunks = 0
        self._num_bytes = 0

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            self._check_lines("headers")
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:  # a head that is too long was refused above
                self.refusal = _too_long("chunk sizes or trailers")
            raise
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_end
            self._num_bytes += len(event.data)
            if self._num_chunks > MAX_SMALL_CHUNKS and self._num_bytes < self._num_chunks * MIN_MEAN_BYTES:
                self._refuse(plain_error(400, "the body has too many small chunks", "malformed_message"))
        elif event is h11.NEED_DATA and self.their_state is h11.SEND_BODY:
            # All of the body that has arrived was parsed. So if there are lines left, they are the first trailers.
            self._check_lines("trailers")
        elif isinstance(event, h11.EndOfMessage):  # trailers that came at once
            num_bytes = sum(len(name) + len(value) for name, value in event.headers)
            if len(event.headers) > MAX_LINES or num_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_long("trailers"))
        return event

    def _check_lines(self, what: str) -> None:
        """Raises if the lines that have arrived, up to the blank line that ends them, are too many or too long."""
        data, _ = self.trailing_data
        if len(data) <= MAX_HEAD_BYTES and data.count(b"\n") <= MAX_LINES:
            return
        ends = [end for end in (data.find(b"\n\r\n"), data.find(b"\n\n")) if end >= 0]
        end = min(ends, default=len(data) - 1) + 1  # with the end of the last line, however the data were cut
        if end > MAX_HEAD_BYTES or data.count(b"\n", 0, end) > MAX_LINES:
            self._refuse(_too_long(what))

    def _refuse(self, error: HttpError) -> None:
        self.refusal = error
        raise h11.RemoteProtocolError(error.body["error"]["message"], error.status)


def _too_long(what: str) -> HttpError:
    return plain_error(
        431, f"the request's {what} have more than {MAX_HEAD_BYTES} bytes or {MAX_LINES} lines", "headers_too_large"
    )
