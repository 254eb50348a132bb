"""Keeps blocks in a Redis-compatible server (Redis, Valkey), which several workers share. Needs the extra `redis`.

The client is redis-py: of Redis' own makers, typed, and without threads of its own. Owns: keys, values and time limits.
Never: eviction, which is the server's (`maxmemory` with `maxmemory-policy allkeys-lru` or `allkeys-lfu`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import redis
from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.core.errors import ConfigError
from services.core.hashing import BlockHash
from services.kv.regions import Buffer
from services.kvtransfer.tiers.entry import LABEL_BYTES, Label, fingerprint_bytes, unpack_block
from services.kvtransfer.tiers.tier import BlockTarget, TierFailed, TierFull

_TIMEOUT_S = 1.0
"""How long a connection and each answer may take."""
WHOLE_S = 2.0
"""How long all answers to commands that were sent together may take, about."""
_BYTES_AT_ONCE = 8 << 20
"""The size of one answer, about."""
_ASKED_AT_ONCE = 1024
_ANSWER_BYTES = 64
"""The most that an answer takes beside a block: a number, or the form around the block."""
_GREETING_BYTES = 64 << 10
"""The most that a new connection's first answers and errors take."""
_MOST_ERROR_CHARS = 200
_OTHER_TYPE = "WRONGTYPE"


class RedisTier:
    """Has a key for each block of a layout; its value is the block's label and the block. What comes back is believed
    no more than what a disk gives."""

    name = "redis"

    def __init__(self, url: str, fingerprint: str, block_bytes: int) -> None:
        """Connects when it is first used. Raises ConfigError if the URL is none."""
        self._fingerprint = fingerprint_bytes(fingerprint)
        self._prefix = b"baton:kv:" + fingerprint.encode() + b":"
        self._block_bytes = block_bytes
        self._limits = _Limits()
        self._at_once = max(1, _BYTES_AT_ONCE // block_bytes)
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                parser_class=partial(_LimitedParser, self._limits),
            )
        except (ValueError, redis.RedisError) as error:
            raise ConfigError(f"--kv-backend: {error}") from error

    @property
    def num_bytes(self) -> int:
        """Returns 0: what the server holds is not this worker's alone."""
        return 0

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        for start, part in _parts(hashes, _ASKED_AT_ONCE):
            for number, there in enumerate(self._ask([("EXISTS", self._key(hash)) for hash in part])):
                if there != 1:
                    return start + number
        return len(hashes)

    def read(self, hashes: Sequence[BlockHash], memory: BlockTarget, targets: Sequence[int]) -> int:
        last = LABEL_BYTES + self._block_bytes  # one byte more than a value has, so that a longer one is seen
        for start, part in _parts(hashes, self._at_once):
            commands = [("GETRANGE", self._key(hash), 0, last) for hash in part]
            values = self._ask(commands, value_bytes=last + 1)
            for number, (hash, value) in enumerate(zip(part, values, strict=True), start):
                if (block := self._block_in(value, hash)) is None:
                    self._make_room(hash)
                    return number
                memory.write_blocks([targets[number]], [block])
        return len(hashes)

    def write(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> None:
        for start, part in _parts(hashes, self._at_once):
            self._ask(
                [
                    ("SET", self._key(hash), Label.of(self._fingerprint, hash, block).pack() + bytes(block), "NX")
                    for hash, block in zip(part, blocks[start:], strict=False)
                ]
            )

    def close(self) -> None:
        self._client.close()

    def _block_in(self, value: object, hash: BlockHash) -> memoryview | None:
        """Returns the block if the value is that of the hash; else None."""
        if not isinstance(value, bytes):
            return None
        return unpack_block(value, self._fingerprint, hash, self._block_bytes)

    def _make_room(self, hash: BlockHash) -> None:
        """Removes a value that is not what it should be. No write would replace it: each leaves what is there."""
        with contextlib.suppress(TierFailed):  # the server may only be read
            self._ask([("UNLINK", self._key(hash))])

    def _key(self, hash: BlockHash) -> bytes:
        return self._prefix + hash.hex().encode()

    def _ask(self, commands: Sequence[tuple[object, ...]], value_bytes: int = 0) -> list[object]:
        """Returns the answers to commands that are sent together, of about `value_bytes` each at most; an error where a
        key has a value of another type. Raises TierFailed."""
        self._limits.begin(_GREETING_BYTES + len(commands) * (value_bytes + _ANSWER_BYTES))
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers = pipeline.execute(raise_on_error=False)
                for answer in answers:
                    if isinstance(answer, Exception) and not str(answer).startswith(_OTHER_TYPE):
                        raise answer
                return list(answers)
        except redis.OutOfMemoryError as error:
            raise TierFull(f"the server has no more memory: {str(error)[:_MOST_ERROR_CHARS]}") from error
        except Exception as error:  # over bytes that are no answer the client raises all kinds of errors
            why = str(error)[:_MOST_ERROR_CHARS] or type(error).__name__
            raise TierFailed(f"the server does not answer as it should: {why}") from error


class _Limits(threading.local):
    """Keeps how long, and how much, the thread's server may still answer."""

    num_bytes = 0
    until_s = 0.0

    def begin(self, num_bytes: int) -> None:
        self.num_bytes, self.until_s = num_bytes, time.monotonic() + WHOLE_S

    def took(self, num_bytes: int) -> None:
        """Raises ConnectionAbortedError if that was too much, or took too long."""
        self.num_bytes -= num_bytes
        if self.num_bytes < 0:
            raise ConnectionAbortedError("the server says more than it was asked for")
        if time.monotonic() > self.until_s:
            raise ConnectionAbortedError("the server takes too long")


class _LimitedParser(_RESP2Parser):
    """Parses what a server says within limits: the client's own are for each part that arrives, however small."""

    def __init__(self, limits: _Limits, socket_read_size: int) -> None:
        super().__init__(socket_read_size)  # type: ignore[no-untyped-call]
        self._limits = limits

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        limited: Any = _LimitedSocket(connection._sock, self._limits)
        self._buffer = SocketBuffer(limited, self.socket_read_size, connection.socket_timeout)


class _LimitedSocket:
    """Is as much of a socket as the parser uses."""

    def __init__(self, connected: socket.socket, limits: _Limits) -> None:
        self._connected = connected
        self._limits = limits

    def recv(self, num_bytes: int) -> bytes:
        data = self._connected.recv(num_bytes)
        self._limits.took(len(data))
        return data

    def settimeout(self, timeout: float | None) -> None:
        self._connected.settimeout(timeout)


def _parts(hashes: Sequence[BlockHash], size: int) -> Iterator[tuple[int, Sequence[BlockHash]]]:
    for start in range(0, len(hashes), size):
        yield start, hashes[start : start + size]
