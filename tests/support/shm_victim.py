"""Fetches from a source whose socket is in hostile hands, in a process of its own, since what is tried may kill it.
`python shm_victim.py WHAT` prints one line of JSON: how the fetch ended, and what it left behind.

The blocks' true content is also served over gRPC. The memory that the hostile socket hands out is full of 0xEE.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import mmap
import multiprocessing
import os
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from services.core.errors import BatonError
from services.core.sealed_memory import SEALS
from services.kvtransfer.transports.shm import GREETING, MAGIC, socket_address
from tests.support.kv_harness import Destination, Source, running

NUM_BLOCKS = 64
_SECOND_USER = 65534

Give = Callable[[socket.socket, bytes, int], None]
"""Serves one connection: (connection, right greeting, bytes that the pool should have)."""


def memory(num_bytes: int, seals: int = SEALS, flags: int = 0) -> int:
    """Returns a memfd of so many bytes: 0xEE, or zeros if it has `flags`; it is sealed unless `seals` is 0."""
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, num_bytes)
    if not flags:
        os.pwrite(fd, b"\xee" * num_bytes, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def give(connection: socket.socket, greeting: bytes, *fds: int) -> None:
    try:
        socket.send_fds(connection, [greeting], list(fds))
    except BrokenPipeError:
        pass  # the victim has seen enough
    finally:
        for fd in fds:
            os.close(fd)


def unsealed(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    give(connection, greeting, memory(num_bytes, seals=0))


def truncated_later(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    """Hands out memory that is long enough when it is looked at, and gone when it is read."""
    fd = memory(num_bytes, seals=0)
    socket.send_fds(connection, [greeting], [fd])
    while "memfd:hostile" not in Path("/proc/self/maps").read_text():
        if select.select([connection], [], [], 0.001)[0]:  # it was refused
            break
    os.ftruncate(fd, 0)
    os.close(fd)


def shrinkable(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    give(connection, greeting, memory(num_bytes, seals=fcntl.F_SEAL_GROW | 0x10 | fcntl.F_SEAL_SEAL))


def writable(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    give(connection, greeting, memory(num_bytes, seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL))


def too_short(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    give(connection, greeting, memory(num_bytes // 2))


def empty(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    give(connection, greeting, memory(0))


def hugetlb(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    """Hands out memory that is sealed and of the right size; where no huge page is free, the first read kills the
    reader."""
    size = -(-num_bytes // (2 << 20)) * (2 << 20)
    give(connection, greeting, memory(size, flags=os.MFD_HUGETLB))


def file(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    with tempfile.TemporaryFile() as plain:
        plain.write(b"\xee" * num_bytes)
        plain.flush()
        give(connection, greeting, os.dup(plain.fileno()))


def shm_file(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as plain:
        plain.write(b"\xee" * num_bytes)
        plain.flush()
        give(connection, greeting, os.dup(plain.fileno()))


def pipe(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    give(connection, greeting, *os.pipe()[:1])


def no_fd(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    connection.send(greeting)


def many_fds(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    give(connection, greeting, *(memory(num_bytes) for _ in range(200)))


def two_fds(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    give(connection, greeting, memory(num_bytes), memory(num_bytes))


def in_pieces(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    give(connection, greeting[:7], memory(num_bytes))
    give(connection, greeting[7:], memory(num_bytes))


def no_blocks(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    """Mmap takes a length of 0 for all of it."""
    magic, incarnation, block_bytes, _ = GREETING.unpack(greeting)
    give(connection, GREETING.pack(magic, incarnation, block_bytes, 0), memory(num_bytes))


def endless(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    magic, incarnation, block_bytes, _ = GREETING.unpack(greeting)
    give(connection, GREETING.pack(magic, incarnation, block_bytes, (1 << 64) - 1), memory(num_bytes))


def says_nothing(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    pass


def right(connection: socket.socket, greeting: bytes, num_bytes: int) -> None:
    """Nothing is wrong but the content: it shows that the others were refused for what is wrong with them."""
    give(connection, greeting, memory(num_bytes))


HOSTILE: dict[str, Give] = {
    handler.__name__: handler
    for handler in (
        unsealed,
        truncated_later,
        shrinkable,
        writable,
        too_short,
        empty,
        hugetlb,
        file,
        shm_file,
        pipe,
        no_fd,
        many_fds,
        two_fds,
        in_pieces,
        no_blocks,
        endless,
        says_nothing,
        right,
    )
}


def listen(what: str, name: str, greeting: bytes, num_bytes: int, ready: Callable[[], None]) -> None:
    """Serves connections in hostile ways until the process ends."""
    kept = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_address(name))
        listener.listen()
        ready()
        while True:
            connection, _ = listener.accept()
            kept.append(connection)
            HOSTILE[what](connection, greeting, num_bytes)


def of_another_user(name: str, greeting: bytes, num_bytes: int, ready: object) -> None:
    """Runs the peer in a process of its own, which is another user's before it listens."""
    os.setuid(_SECOND_USER)
    listen("right", name, greeting, num_bytes, ready.set)  # type: ignore[attr-defined]


def start(what: str, greeting: bytes, num_bytes: int) -> str:
    """Returns the socket's name when it listens."""
    name = f"@baton-hostile-{os.getpid()}"
    if what == "of_another_user":
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        context.Process(target=of_another_user, args=(name, greeting, num_bytes, ready), daemon=True).start()
        assert ready.wait(30.0)
        return name
    listening = threading.Event()
    threading.Thread(target=listen, args=(what, name, greeting, num_bytes, listening.set), daemon=True).start()
    assert listening.wait(30.0)
    return name


async def left_behind() -> list[str]:
    """Descriptors and mappings of the hostile memory that stay. The hostile side, a thread of this process, closes what
    it has given away, but perhaps not yet."""
    for _ in range(100):
        if not hostile_memory():
            break
        await asyncio.sleep(0.05)
    return hostile_memory()


def hostile_memory() -> list[str]:
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    fds = [os.readlink(link) for link in links if link.is_symlink()]
    return [name for name in [*fds, *Path("/proc/self/maps").read_text().splitlines()] if "hostile" in name]


async def main(what: str) -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        num_bytes = NUM_BLOCKS * source.layout.block_bytes
        greeting = GREETING.pack(MAGIC, source.incarnation, source.layout.block_bytes, NUM_BLOCKS)
        name = start(what, greeting, num_bytes)
        lease = source.lease(40, sealed=True)
        order = destination.order(source, lease)
        order.source.offers[0].shm_socket = name
        result: dict[str, object] = {}
        try:
            outcome = await destination.fetcher.fetch(order)
            held = destination.holds(order.targets)
            result = {"transport": int(outcome.transport), "right": held == source.expected(lease)}
        except BatonError as error:
            result = {"error": type(error).__name__, "message": str(error)}
            source.table.abort(lease.lease_id, source.clock.now())
        result["mappings"] = len(destination.mappings)
        # Another handoff of the same source goes well.
        lease = source.lease(40, sealed=True)
        again = destination.order(source, lease, leg=2, transport="grpc")
        await destination.fetcher.fetch(again)
        result["served_again"] = destination.holds(again.targets) == source.expected(lease)
        result["left_behind"] = await left_behind() if what != "right" else []
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    assert mmap.PAGESIZE <= 2 << 20
    asyncio.run(main(sys.argv[1]))
