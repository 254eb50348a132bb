"""Opens many streams at a router and reads their bytes, in a process of its own: it counts and notes times, and parses
no more than it must, so that hardly any of the machine's time is its own.

Over HTTP each stream has a connection, as most clients' do. Over gRPC some connections carry all streams; their frames
are read as HTTP/2 has them (RFC 9113), since a gRPC library would cost more than the router.

`python -m benchmarks.router_streams.client` reads commands from its input, a line each: `open N` opens N further
streams, `counts` prints how many have had a token and how many tokens came from each address, `end` closes all and
writes the times.
"""

from __future__ import annotations

import argparse
import array
import gc
import itertools
import json
import os
import random
import selectors
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.cluster import request_of
from services.core.descriptors import raise_descriptor_limit

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
_MOST = (1 << 31) - 1
_CHUNK_TAG, _COMPLETION_TAG = 0x12, 0x1A
"""The first byte of a GenerateStreamResponse that has a chunk, field 2, or the completion, field 3."""


class Stream:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.opened_s = time.monotonic()
        self.times_s = array.array("d")
        """When each token came."""
        self.ended = ""
        """What ended it, if anything did."""


class Connection(ABC):
    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> bool:
        """Reads what has arrived. Returns False once the connection is over."""
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionError:
            data = b""
        if data:
            self.take(data, time.monotonic())
        return bool(data)

    @abstractmethod
    def take(self, data: bytes, now: float) -> None: ...


class HttpConnection(Connection):
    """Carries one stream of server-sent events."""

    def __init__(self, address: tuple[str, int], stream: Stream, prompt: Sequence[int], max_tokens: int) -> None:
        super().__init__(address)
        self._stream = stream
        self._tail = b""
        asked = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {address[0]}\r\ncontent-type: application/json\r\n"
            f"x-request-id: {stream.request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)

    def take(self, data: bytes, now: float) -> None:
        stream = self._stream
        if not stream.times_s and not data.startswith(b"HTTP/1.1 200") and b"data: {" not in data:
            stream.ended = data[:300].decode(errors="replace")
        num_tokens = (self._tail + data).count(b"data: {")  # an event's beginning may be cut anywhere
        self._tail = data[-6:] if not data.endswith(b"\n\n") else b""
        stream.times_s.extend([now] * num_tokens)
        if b"data: [DONE]" in data:
            stream.ended = "done"


_Any = TypeVar("_Any", bound=Connection)


class GrpcConnection(Connection):
    """Carries many GenerateStream calls."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address)
        self._authority = f"{address[0]}:{address[1]}"
        self._streams: dict[int, Stream] = {}
        self._parts: dict[int, bytes] = {}
        self._rest = b""
        self._numbers = itertools.count(1, 2)
        window = _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + _MOST.to_bytes(4, "big")
        more = (_MOST - 65535).to_bytes(4, "big")
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, window) + _frame(_WINDOW_UPDATE, 0, 0, more))

    def open(self, stream: Stream, prompt: Sequence[int], max_tokens: int) -> None:
        number = next(self._numbers)
        self._streams[number] = stream
        request = request_of(list(prompt), max_tokens)
        request.request_id = stream.request_id
        body = request.SerializeToString()
        headers = _headers(
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/baton.v1.InferenceService/GenerateStream"),
            (":authority", self._authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        )
        message = b"\0" + len(body).to_bytes(4, "big") + body
        self.socket.sendall(
            _frame(_HEADERS, _END_HEADERS, number, headers) + _frame(_DATA, _END_STREAM, number, message)
        )

    def take(self, data: bytes, now: float) -> None:
        data, start = self._rest + data, 0
        while len(data) - start >= 9:
            size = int.from_bytes(data[start : start + 3], "big")
            end = start + 9 + size
            if len(data) < end:
                break
            number = int.from_bytes(data[start + 5 : start + 9], "big")
            self._frame(data[start + 3], data[start + 4], number, data[start + 9 : end], now)
            start = end
        self._rest = data[start:]

    def _frame(self, kind: int, flags: int, number: int, payload: bytes, now: float) -> None:
        if kind == _DATA:
            self._messages(number, payload, now)
        elif kind == _PING and not flags & _ACK:
            self.socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _SETTINGS and not flags & _ACK:
            self.socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _GOAWAY and any(payload[4:8]):  # else it only takes no more streams
            raise RuntimeError(f"the router ends the connection: {payload!r}")
        elif kind == _HEADERS and flags & _END_STREAM:
            self._streams[number].ended = self._streams[number].ended or f"trailers: {payload!r}"
        elif kind == _RST_STREAM:
            self._streams[number].ended = self._streams[number].ended or f"reset: {payload!r}"

    def _messages(self, number: int, payload: bytes, now: float) -> None:
        data = self._parts.pop(number, b"") + payload
        times_s, start = self._streams[number].times_s, 0
        while len(data) - start >= 5:
            end = start + 5 + int.from_bytes(data[start + 1 : start + 5], "big")
            if len(data) < end:
                break
            if data[start + 5] == _CHUNK_TAG:
                times_s.append(now)
            elif data[start + 5] == _COMPLETION_TAG:
                self._streams[number].ended = "done"
            start = end
        if start < len(data):
            self._parts[number] = data[start:]


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + payload


def _headers(*fields: tuple[str, str]) -> bytes:
    """Returns the fields as HPACK literals that are not indexed (RFC 7541, 6.2.2). Each is shorter than 127 bytes."""
    coded = bytearray()
    for field in fields:
        coded.append(0)
        for text in field:
            coded += bytes([len(text)]) + text.encode()
    return bytes(coded)


class Client:
    def __init__(
        self, front: str, addresses: Sequence[tuple[str, int]], prompt: tuple[int, int], max_tokens: int
    ) -> None:
        """Opens streams at the addresses, in turns. `prompt` has the fewest and the most tokens of one."""
        self.streams: list[Stream] = []
        self._front, self._addresses = front, addresses
        self._prompt, self._max_tokens = prompt, max_tokens
        self._random = random.Random(0)
        self._selector = selectors.DefaultSelector()
        self._connections: list[Connection] = []
        self._shared = [self._add(GrpcConnection(each)) for each in [*addresses] * 4] if front == "grpc" else []

    def open(self) -> None:
        number = len(self.streams)
        stream = Stream(f"stream-{number}")
        self.streams.append(stream)
        prompt = self._random.choices(range(16, 256), k=self._random.randint(*self._prompt))
        if self._front == "grpc":
            connection = self._shared[number % len(self._shared)]
            connection.open(stream, prompt, self._max_tokens)
        else:
            address = self._addresses[number % len(self._addresses)]
            self._add(HttpConnection(address, stream, prompt, self._max_tokens))

    def watch(self, reader: int) -> None:
        self._selector.register(reader, selectors.EVENT_READ)

    def poll(self, within_s: float) -> bool:
        """Reads what arrives within that time. Returns whether there is a command to be read."""
        commanded = False
        for key, _ in self._selector.select(within_s):
            if isinstance(key.data, Connection):
                if not key.data.read():
                    self._selector.unregister(key.fileobj)
            else:
                commanded = True
        return commanded

    def counts(self) -> dict[str, int | str | list[int]]:
        number = len(self._addresses)
        return {
            "open": sum(bool(stream.times_s) and not stream.ended for stream in self.streams),
            "done": sum(stream.ended == "done" for stream in self.streams),
            "tokens": [sum(len(stream.times_s) for stream in self.streams[at::number]) for at in range(number)],
            "failure": next(
                (
                    f"{stream.request_id} after {len(stream.times_s)} tokens: {stream.ended}"
                    for stream in self.streams
                    if stream.ended not in ("", "done")
                ),
                "",
            ),
        }

    def close(self) -> None:
        for connection in self._connections:
            connection.socket.close()

    def _add(self, connection: _Any) -> _Any:
        self._connections.append(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        return connection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("front", choices=("grpc", "http"))
    parser.add_argument("addresses", nargs="+", help="of the fronts, host:port")
    parser.add_argument("--prompt", type=int, nargs=2, required=True, help="the fewest and the most tokens of a prompt")
    parser.add_argument("--output", type=int, required=True, help="tokens of each output")
    parser.add_argument("--per-s", type=float, default=100.0, help="streams opened in a second, at random times")
    parser.add_argument("--times", type=Path, required=True, help="the file for when each token came")
    arguments = parser.parse_args()
    gc.disable()
    raise_descriptor_limit()  # over HTTP each stream has a connection
    addresses = [(host, int(port)) for host, _, port in (each.rpartition(":") for each in arguments.addresses)]
    client, arrivals = Client(arguments.front, addresses, arguments.prompt, arguments.output), random.Random(1)
    client.watch(sys.stdin.fileno())
    wanted, due_s, buffer = 0, time.monotonic(), b""
    while True:
        if len(client.streams) < wanted and time.monotonic() >= due_s:
            client.open()
            due_s += arrivals.expovariate(arguments.per_s)
        waits = len(client.streams) >= wanted
        if client.poll(1.0 if waits else max(0.0, due_s - time.monotonic())):
            buffer += (data := os.read(sys.stdin.fileno(), 4096))
            *lines, buffer = buffer.split(b"\n")
            for words in [line.decode().split() for line in lines]:
                if words[0] == "open":
                    wanted, due_s = wanted + int(words[1]), time.monotonic()
                elif words[0] == "counts":
                    print(json.dumps(client.counts()), flush=True)
            if not data or lines[-1:] == [b"end"]:
                break
    client.close()
    found = {stream.request_id: (stream.ended, stream.opened_s, list(stream.times_s)) for stream in client.streams}
    arguments.times.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
