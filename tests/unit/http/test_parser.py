"""A request's lines and chunks are bounded, beside its bytes: each costs the same, however short it is."""

from __future__ import annotations

import time

import h11
import pytest

from services.router.front.http.parser import MAX_LINES, MAX_SMALL_CHUNKS, MIN_MEAN_BYTES, BoundedParser

pytestmark = pytest.mark.clock

HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
PIECE_BYTES = 1024
LONGEST_PIECE_S = 0.02
"""15,000 header lines at once take twice as long."""


def events(parser: BoundedParser, data: bytes, piece_bytes: int = PIECE_BYTES) -> list[type]:
    """Feeds the parser and returns the kinds of its events. The time of each piece is bounded."""
    seen = []
    for start in range(0, len(data), piece_bytes):
        begin_s = time.thread_time()
        parser.receive_data(data[start : start + piece_bytes])
        while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            seen.append(type(event))
        assert time.thread_time() - begin_s < LONGEST_PIECE_S
    return seen


def refused(data: bytes, piece_bytes: int = PIECE_BYTES) -> int:
    parser = BoundedParser()
    with pytest.raises(h11.RemoteProtocolError):
        events(parser, data, piece_bytes)
    return parser.refusal.status


@pytest.mark.parametrize("piece_bytes", [1, 100, PIECE_BYTES, 1 << 20])
@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_head_lines_are_bounded(end: bytes, piece_bytes: int) -> None:
    most = HEAD + b"a:" + end + (b"a: b" + end) * (MAX_LINES - 4)
    assert events(BoundedParser(), most + end, piece_bytes) == [h11.Request, h11.EndOfMessage]
    assert refused(most + (b"a:" + end) * 15_000, piece_bytes) == 431
    exact = most + (b"a: b" + end) * (MAX_LINES - most.count(b"\n"))
    assert events(BoundedParser(), exact + end, piece_bytes) == [h11.Request, h11.EndOfMessage]
    assert refused(exact + b"a: b" + end + end, piece_bytes) == 431


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 1 << 20])
def test_head_bytes_are_bounded(piece_bytes: int) -> None:
    """The bound holds whether the head comes in pieces or is there at once."""
    assert refused(HEAD + b"x: " + b"y" * 70_000, piece_bytes) == 431
    assert refused(HEAD + b"x: " + b"y" * 70_000 + b"\r\n\r\n", piece_bytes) == 431
    assert events(BoundedParser(), HEAD + b"x: " + b"y" * 60_000 + b"\r\n\r\n", piece_bytes)[0] is h11.Request


@pytest.mark.parametrize("piece_bytes", [1, PIECE_BYTES, 1 << 20])
def test_trailer_lines_are_bounded(piece_bytes: int) -> None:
    body = CHUNKED + b"2\r\nhi\r\n0\r\n"
    few = events(BoundedParser(), body + b"a: b\r\n" * (MAX_LINES - 1) + b"\r\n", piece_bytes)
    assert few[-1] is h11.EndOfMessage
    for too_many in (b"a:\r\n" * (MAX_LINES + 1), b"a:\r\n" * 1000, (b"a: " + b"b" * 5000 + b"\r\n") * 20):
        assert refused(body + too_many + b"\r\n", piece_bytes) == 431


def test_what_looks_like_lines_in_a_body_is_not_counted() -> None:
    lines = b"\n" * 100_000
    whole = HEAD + b"content-length: %d\r\n\r\n" % len(lines) + lines
    assert events(BoundedParser(), whole)[-1] is h11.EndOfMessage
    chunk = b"%x\r\n%s\r\n" % (len(lines), lines)
    assert events(BoundedParser(), CHUNKED + chunk + END)[-1] is h11.EndOfMessage


def test_lines_of_the_next_request_do_not_count_for_this_one() -> None:
    parser = BoundedParser()
    request = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    assert events(parser, request * 1000, 1 << 20) == [h11.Request, h11.EndOfMessage]
    for _ in range(999):
        parser.send(h11.Response(status_code=204, headers=[]))
        parser.send(h11.EndOfMessage())
        parser.start_next_cycle()
        assert isinstance(parser.next_event(), h11.Request)
        assert isinstance(parser.next_event(), h11.EndOfMessage)


def test_tiny_chunks_are_bounded() -> None:
    tiny = b"1\r\nx\r\n"
    few = tiny * MAX_SMALL_CHUNKS
    assert events(BoundedParser(), CHUNKED + few + END)[-1] is h11.EndOfMessage
    assert refused(CHUNKED + few + tiny) == 400
    fair = b"%x\r\n%s\r\n" % (MIN_MEAN_BYTES, b"x" * MIN_MEAN_BYTES)
    assert events(BoundedParser(), CHUNKED + fair * 3 * MAX_SMALL_CHUNKS + END)[-1] is h11.EndOfMessage


def test_each_request_of_a_connection_has_its_own_count() -> None:
    parser = BoundedParser()
    for _ in range(3):
        assert events(parser, CHUNKED + b"1\r\nx\r\n" * (MAX_SMALL_CHUNKS - 1) + END)[-1] is h11.EndOfMessage
        parser.send(h11.Response(status_code=204, headers=[]))
        parser.send(h11.EndOfMessage())
        parser.start_next_cycle()
