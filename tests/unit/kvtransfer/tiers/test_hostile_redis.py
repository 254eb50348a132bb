"""Tests a backend that is no Redis server but speaks to harm: nothing that it says takes long or much, or raises what a
tier may not raise."""

from __future__ import annotations

import contextlib
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("redis")

from services.core.errors import ConfigError
from services.kvtransfer.tiers import redis_tier
from services.kvtransfer.tiers.redis_tier import RedisTier
from services.kvtransfer.tiers.tier import TierFailed
from tests.support.tiers import BLOCK_BYTES, FINGERPRINT, hashes_of, memory_of

Talk = Callable[[socket.socket, threading.Event], None]


@contextlib.contextmanager
def hostile(talk: Talk) -> Iterator[RedisTier]:
    """Yields a tier whose server greets as Redis does, and answers whatever it is asked for by `talk`."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    while request := connection.recv(1 << 16):
                        if b"CLIENT" in request:
                            connection.sendall(b"+OK\r\n" * request.count(b"SETINFO"))
                        else:
                            talk(connection, over)

    thread = threading.Thread(target=serve)
    thread.start()
    tier = RedisTier(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", FINGERPRINT, BLOCK_BYTES)
    try:
        yield tier
    finally:
        over.set()
        tier.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def trickle(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"$1000000\r\n")
    while not over.wait(0.02):
        connection.sendall(b"x")


def flood(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"$9000000000\r\n")
    while not over.is_set():
        connection.sendall(bytes(1 << 20))


def endless_line(connection: socket.socket, over: threading.Event) -> None:
    while not over.is_set():
        connection.sendall(b"+" * (1 << 16))


def say(what: bytes) -> Talk:
    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(what)

    return talk


WORDS = {
    "nested arrays": b"*1\r\n" * 4000,
    "a length that is none": b"$x\r\n",
    "a negative array": b"*-5\r\n:x\r\n",
    "no form": b"?what\r\n",
    "an error that is no text": b"-ERR \xff\xfe\r\n",
    "a long error": b"-ERR " + b"\x1b[2J" * 4000 + b"\r\n",
    "many elements": b"*1000000000\r\n" + b":1\r\n" * 10000,
}


@pytest.mark.parametrize("talk", [trickle, flood, endless_line])
def test_what_never_ends_is_given_up_and_takes_no_memory(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_tier, "WHOLE_S", 0.3)
    memory = memory_of(1)
    with hostile(talk) as tier:
        tracemalloc.start()
        try:
            with pytest.raises(TierFailed):
                tier.read(hashes_of([1]), memory, [0])
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    memory.close()
    assert peak_bytes < 4 << 20


@pytest.mark.parametrize("word", WORDS)
def test_what_is_no_answer_fails_the_tier_and_nothing_else(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_tier, "WHOLE_S", 0.3)
    memory = memory_of(1)
    with hostile(say(WORDS[word])) as tier:
        for act in (
            lambda: tier.read(hashes_of([1]), memory, [0]),
            lambda: tier.num_held(hashes_of([1])),
            lambda: tier.write(hashes_of([1]), [bytes(BLOCK_BYTES)]),
        ):
            try:
                assert not act()
            except TierFailed as error:
                if len(str(error)) >= 1000:
                    pytest.fail("a server says as much as it likes in our log")
    memory.close()


@pytest.mark.parametrize("url", ["hunter2@host:6379", "hunter2:6379", "redis://:hunter2@host:port/0"])
def test_a_wrong_url_is_told_without_its_password(url: str) -> None:
    from services.kv.layout import Layout
    from services.worker.tier_config import TierConfig
    from services.worker.tier_setup import tiers_of

    layout = Layout("m", "weights", "config", "float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16)
    with pytest.raises(ConfigError, match="--kv-backend") as raised:
        tiers_of(TierConfig(kv_backend=url), layout, "decode-1")
    assert "hunter2" not in str(raised.value)
