"""Tests a server that does not speak S3 as it should, or never ends: nothing that it does takes long or much, or raises
what a tier may not raise."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("obstore", reason="needs the extra s3")

from services.core.clock import ManualClock
from services.kvtransfer.tiers import s3_tier
from services.kvtransfer.tiers.s3_tier import S3Tier
from services.kvtransfer.tiers.stack import TierStack
from services.kvtransfer.tiers.tier import TierFailed, TierFull
from tests.support.patience import HANG_S
from tests.support.tiers import BLOCK_BYTES, FINGERPRINT, hashes_of, memory_of

Talk = Callable[[socket.socket, threading.Event], None]
HEAD = b'HTTP/1.1 200 OK\r\nLast-Modified: Thu, 26 Nov 2026 10:00:00 GMT\r\nETag: "x"\r\n'
OBJECT_BYTES = s3_tier.LABEL_BYTES + BLOCK_BYTES


@contextlib.contextmanager
def hostile(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Tier]:
    """Yields a tier whose server answers each request by `talk`."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []
    talks: list[threading.Thread] = []

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while connection.recv(1 << 16):
                talk(connection, over)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(listener.accept()[0])
                talks.append(threading.Thread(target=answer, args=(connections[-1],)))
                talks[-1].start()

    thread = threading.Thread(target=serve)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setattr(s3_tier, "WHOLE_S", 0.4)
    tier = S3Tier("s3://bucket/p", FINGERPRINT, BLOCK_BYTES)
    try:
        yield tier
    finally:
        over.set()
        tier.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for talking in talks:
            talking.join()


def silent(connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def trickle(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % OBJECT_BYTES)
    while not over.wait(0.02):
        connection.sendall(b"x")


def trickling_head(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(HEAD)
    while not over.wait(0.02):
        connection.sendall(b"x")


def flood(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % OBJECT_BYTES)
    while not over.is_set():
        connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")


def huge(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(HEAD + b"Content-Length: 9000000000\r\n\r\n")
    while not over.is_set():
        connection.sendall(bytes(1 << 20))


def refuse(connection: socket.socket, over: threading.Event) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>Access Denied\x1b[2J</Message></Error>"
    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def full(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\n\r\n")


def say(what: bytes) -> Talk:
    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(what)
        connection.shutdown(socket.SHUT_WR)

    return talk


WORDS = {
    "nothing": b"",
    "no HTTP": b"-ERR what\r\n",
    "an endless line": b"HTTP/1.1 200 " + b"x" * (1 << 20),
    "no length": HEAD + b"\r\n" + b"x" * OBJECT_BYTES,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "elsewhere": b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "a long error": b"HTTP/1.1 400 Bad\r\nContent-Length: 100000\r\n\r\n" + b"\x1b[2J" * 25000,
    "not modified": b"HTTP/1.1 304 Not Modified\r\n\r\n",
}


@pytest.mark.clock
@pytest.mark.parametrize("talk", [silent, trickle, trickling_head, flood, huge])
def test_what_never_ends_is_given_up_and_takes_no_memory(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(1)
    with hostile(talk, monkeypatch) as tier:
        tracemalloc.start()
        try:
            try:
                num_read = tier.read(hashes_of([1]), memory, [0])
            except TierFailed:
                num_read = 0
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    memory.close()
    assert num_read == 0
    assert peak_bytes < 4 << 20


@pytest.mark.parametrize("word", WORDS)
def test_what_is_no_answer_fails_the_tier_and_nothing_else(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(1)
    with hostile(say(WORDS[word]), monkeypatch) as tier:
        for act in (
            lambda: tier.read(hashes_of([1]), memory, [0]),
            lambda: tier.num_held(hashes_of([1])),
            lambda: tier.write(hashes_of([1]), [bytes(BLOCK_BYTES)]),
        ):
            try:
                assert not act()
            except TierFailed as error:
                if len(str(error)) >= 1000 or not str(error).isprintable() or "hunter2" in str(error):
                    pytest.fail(f"a server says what it likes in our log: {str(error)[:2000]!r}")
    memory.close()


def test_while_a_server_is_silent_other_threads_go_on_and_the_tier_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def silent_until_another_thread_goes_on(connection: socket.socket, over: threading.Event) -> None:
        asked.set()
        if goes_on.wait(HANG_S):
            connection.shutdown(socket.SHUT_RDWR)

    with hostile(silent_until_another_thread_goes_on, monkeypatch) as tier:
        stack = TierStack([tier], ManualClock())
        reading = threading.Thread(target=stack.num_held, args=(hashes_of([1]),))
        reading.start()
        assert asked.wait(HANG_S)
        goes_on.set()
        reading.join()
        assert stack.num_held(hashes_of([1])) == 0
        assert stack.uses[0].reading.num_failures == 1, "it is not asked again for a while"


def test_whoever_is_denied_access_is_told_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hostile(refuse, monkeypatch) as tier:
        with pytest.raises(TierFailed, match="403"):
            tier.num_held(hashes_of([1]))
        with pytest.raises(TierFull, match="AccessDenied"):
            tier.write(hashes_of([1]), [bytes(BLOCK_BYTES)])
    [warning] = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "access to the bucket bucket is denied" in warning
    assert "ListBucket" in warning
    assert warning.isprintable()


def test_a_server_without_room_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile(full, monkeypatch) as tier:
        with pytest.raises(TierFull):
            tier.write(hashes_of([1]), [bytes(BLOCK_BYTES)])
