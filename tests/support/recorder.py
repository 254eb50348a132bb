"""Records what passes between processes on this machine, and finds secrets in it.

Owns: relays, one before each port, and the bytes that went through them. Never: what is a secret.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from tests.support.pumps import until_either_ends

_CHUNK_BYTES = 64 << 10


class Recorder:
    """Relays connections to a port of this machine, on the event loop: `open` it, `aim` it, `close` it."""

    def __init__(self) -> None:
        self.streams: list[bytearray] = []
        """What went through, each direction of each connection for itself."""
        self._target_port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._relays: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.streams))

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, host, port, limit=_CHUNK_BYTES)

    def aim(self, port: int) -> None:
        """Aims at a port of 127.0.0.1; until then whoever dials waits."""
        self._target_port.set_result(port)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.current_task()
        assert relay is not None
        self._relays.add(relay)
        onward = None
        try:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", await self._target_port)
            await until_either_ends(self._pump(reader, onward), self._pump(onward_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # either end has left, or the test is over
        finally:
            self._relays.discard(relay)
            for end in (writer, onward):
                if end is not None:
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = bytearray()
        self.streams.append(kept)
        while data := await reader.read(_CHUNK_BYTES):
            kept += data
            writer.write(data)
            await writer.drain()


def varints(numbers: Iterable[int]) -> bytes:
    """Returns the numbers as a packed field of a protobuf message has them."""
    packed = bytearray()
    for number in numbers:
        while number > 127:
            packed.append(number & 127 | 128)
            number >>= 7
        packed.append(number)
    return bytes(packed)


def num_found(forms: Iterable[bytes], recorders: Iterable[Recorder]) -> int:
    """Returns how many of the forms passed."""
    streams = [stream for recorder in recorders for stream in recorder.streams]
    return sum(any(form in stream for stream in streams) for form in forms)


def found(secrets: Mapping[str, Iterable[bytes]], recorders: Iterable[Recorder]) -> set[str]:
    """Returns the names of the secrets of which some form passed."""
    everywhere = list(recorders)
    return {name for name, forms in secrets.items() if num_found(forms, everywhere)}
