"""Tests shared memory: who gets the memfd, what can be done with it, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.v1 import types_pb2
from services.core.errors import ConfigError, LayoutMismatch, ProtocolViolation, StaleIncarnation
from services.kvtransfer.transports import TransportUnavailable, shm
from services.kvtransfer.transports.shm import GREETING, MAGIC, ShmServer, socket_address
from services.kvtransfer.transports.shm_mapping import Mapping, MappingCache, ShmUnavailable, receive_greeting
from tests.support.kv_harness import Destination, Source, running, until
from tests.support.kv_memory import Gate, MemfdMemory

BLOCK_BYTES = 4096


@pytest.fixture
def memory() -> Iterator[MemfdMemory]:
    memory = MemfdMemory(4, BLOCK_BYTES)
    yield memory
    memory.close()


@pytest.fixture
async def server(memory: MemfdMemory):  # type: ignore[no-untyped-def]
    server = ShmServer(memory, 7)
    yield server
    await until(lambda: server.num_connections == 0)
    server.close()


@pytest.fixture
def cache() -> MappingCache:
    return MappingCache(BLOCK_BYTES, timeout_s=0.2)


def at(name: str, incarnation: int = 7) -> tuple[types_pb2.KVSource, str]:
    return types_pb2.KVSource(incarnation=incarnation), name


def num_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:baton-test")


def open_files() -> set[str]:
    """Returns what this process's descriptors stand for. (gRPC's threads still close some of earlier tests.)"""
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            files.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return files


async def test_a_mapping_shows_the_pool_as_it_changes(
    server: ShmServer, cache: MappingCache, memory: MemfdMemory
) -> None:
    mapping = await cache.get(*at(server.name))
    memory.fill(2, 5)
    with mapping.block(2) as block:
        assert block == memory.block(2)
    assert await cache.get(*at(server.name)) is mapping
    assert server.num_connections == 1
    cache.close()
    assert mapping.closed


async def test_a_mapping_cannot_be_written(server: ShmServer, cache: MappingCache) -> None:
    mapping = await cache.get(*at(server.name))
    with mapping.block(0) as block:
        assert block.readonly
        with pytest.raises(TypeError):
            block[0] = 1
    cache.close()


async def test_the_descriptor_cannot_be_mapped_writable(server: ShmServer) -> None:
    """The peer cannot write, whatever it does with the descriptor, short of opening the file anew as the same user."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        connection.connect(socket_address(server.name))
        await until(lambda: server.num_connections == 1)
        _, (fd,), _, _ = socket.recv_fds(connection, GREETING.size, 1)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, BLOCK_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
    finally:
        os.close(fd)


async def test_two_fetches_at_once_share_one_mapping(server: ShmServer, cache: MappingCache) -> None:
    first, second = await asyncio.gather(cache.get(*at(server.name)), cache.get(*at(server.name)))
    assert first is second
    await until(lambda: server.num_connections == 1)
    assert num_maps() == 2  # the pool's own, and this
    cache.close()


async def test_a_mapping_goes_with_its_owner(memory: MemfdMemory, cache: MappingCache) -> None:
    server = ShmServer(memory, 7)
    mapping = await cache.get(*at(server.name))
    server.close()
    await until(lambda: len(cache) == 0)
    assert mapping.closed
    assert num_maps() == 1
    with pytest.raises(ShmUnavailable):
        await cache.get(*at(server.name))


async def test_a_copy_under_way_keeps_the_mapping_until_it_ends(memory: MemfdMemory, cache: MappingCache) -> None:
    server = ShmServer(memory, 7)
    mapping = await cache.get(*at(server.name))
    mapping.pin()
    server.close()
    await until(lambda: len(cache) == 0)
    assert not mapping.closed
    mapping.unpin()
    assert mapping.closed


async def test_a_restarted_owner_is_not_the_old_one(memory: MemfdMemory, cache: MappingCache, tmp_path: Path) -> None:
    """A new incarnation at the same socket is not taken for the old one."""
    name = str(tmp_path / "kv.sock")
    ShmServer(memory, 7, name).close()
    server = ShmServer(memory, 8, name)
    with pytest.raises(StaleIncarnation):
        await cache.get(*at(name, 7))
    assert (await cache.get(*at(name, 8))).num_blocks == 4
    cache.close()
    await until(lambda: server.num_connections == 0)
    server.close()


@pytest.mark.parametrize("name", ["", "@baton-nobody", "/nonexistent/kv.sock", "a\0b", "x" * 200])
async def test_no_socket_is_unavailable(cache: MappingCache, name: str) -> None:
    with pytest.raises(ShmUnavailable):
        await cache.get(*at(name))


@pytest.mark.parametrize(
    ("greeting", "error"),
    [
        (b"", ShmUnavailable),
        (b"short", ShmUnavailable),
        (GREETING.pack(b"somebody", 7, BLOCK_BYTES, 4), ProtocolViolation),
        (GREETING.pack(MAGIC, 7, BLOCK_BYTES * 2, 4), LayoutMismatch),
        (GREETING.pack(MAGIC, 7, BLOCK_BYTES, 0), ProtocolViolation),
        (GREETING.pack(MAGIC, 7, BLOCK_BYTES, 5), ShmUnavailable),
        (None, ShmUnavailable),  # says nothing
    ],
)
async def test_a_peer_that_is_no_pool(
    cache: MappingCache, memory: MemfdMemory, tmp_path: Path, greeting: bytes | None, error: type[Exception]
) -> None:
    name = str(tmp_path / "kv.sock")
    before = open_files()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        getting = asyncio.create_task(cache.get(*at(name)))
        connection, _ = await asyncio.to_thread(listener.accept)
        assert memory.fd is not None
        if greeting:
            socket.send_fds(connection, [greeting], [memory.fd])
        if greeting is not None:
            connection.close()
        with pytest.raises(error):
            await getting
        connection.close()
    await until(lambda: open_files() <= before)
    assert len(cache) == 0


async def test_other_users_are_refused(server: ShmServer, cache: MappingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "peer_uid", lambda _: os.geteuid() + 1)
    with pytest.raises(ShmUnavailable, match="refused"):
        await cache.get(*at(server.name))
    assert server.num_connections == 0


async def test_a_descriptor_is_inherited_by_no_child(server: ShmServer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        connection.connect(socket_address(server.name))
        await until(lambda: server.num_connections == 1)
        _, (fd,), truncated = receive_greeting(connection)
    assert not truncated
    assert not os.get_inheritable(fd)
    os.close(fd)


async def test_connections_are_bounded_and_those_that_stay_harm_nobody(
    server: ShmServer, cache: MappingCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has one says nothing, by design; so they cannot be told from those that only sit there."""
    monkeypatch.setattr(shm, "MAX_CONNECTIONS", 8)
    before = open_files()
    with contextlib.ExitStack() as stack:
        idlers = []
        for _ in range(30):
            idler = stack.enter_context(socket.socket(socket.AF_UNIX))
            idler.setblocking(False)
            idler.connect(socket_address(server.name))
            idlers.append(idler)
        ends = [idler.dup() for idler in idlers[8:]]
        for end in ends:
            stack.enter_context(end)
            await until(lambda end=end: _at_end(end))  # type: ignore[misc]
        assert server.num_connections == 8
        with pytest.raises(ShmUnavailable, match="refused"):
            await cache.get(*at(server.name))
        refusals = [record for record in caplog.records if "refused one more than 8" in record.getMessage()]
        assert len(refusals) == 1, "said at once, and not again and again"
        idlers[0].close()
        await until(lambda: server.num_connections == 7)
        await cache.get(*at(server.name))
        cache.close()
    await until(lambda: server.num_connections == 0)
    await until(lambda: open_files() <= before)


def _at_end(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


async def test_a_peer_that_talks_is_hung_up_on(server: ShmServer) -> None:
    with socket.socket(socket.AF_UNIX) as talker:
        talker.setblocking(False)
        talker.connect(socket_address(server.name))
        await until(lambda: server.num_connections == 1)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while True:
                talker.send(b"x" * 65536)
        await until(lambda: server.num_connections == 0)


async def test_a_mapping_stays_while_a_probe_that_was_given_up_reads_it(
    server: ShmServer, cache: MappingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, probe = Gate(), Mapping.probe

    def wait(self: Mapping) -> float:
        gate.enter()
        return probe(self)

    monkeypatch.setattr(Mapping, "probe", wait)
    source, name = at(server.name)
    mapping = await cache.get(source, name)
    probing = asyncio.create_task(cache.probe(source, types_pb2.KVOffer(shm_socket=name)))
    await gate.entered()
    probing.cancel()
    await asyncio.wait([probing])
    cache.close()
    assert not mapping.closed
    gate.open()
    await until(lambda: mapping.closed)


async def test_close_leaves_nothing(memory: MemfdMemory, cache: MappingCache, tmp_path: Path) -> None:
    for name in (None, str(tmp_path / "kv.sock")):
        before = open_files()
        server = ShmServer(memory, 7, name)
        await cache.get(*at(server.name))
        cache.close()
        server.close()
        await until(lambda before=before: open_files() <= before)  # type: ignore[misc]
        assert os.listdir(tmp_path) == []
        with socket.socket(socket.AF_UNIX) as connection, pytest.raises(OSError, match=r"refused|No such file"):
            connection.connect(socket_address(server.name))


async def test_a_taken_socket_is_a_configuration_error(memory: MemfdMemory, tmp_path: Path) -> None:
    name = str(tmp_path / "kv.sock")
    server = ShmServer(memory, 7, name)
    before = open_files()
    with pytest.raises(ConfigError, match=r"kv\.sock"):
        ShmServer(memory, 8, name)
    with pytest.raises(ConfigError):
        ShmServer(memory, 8, str(tmp_path / "none" / "kv.sock"))
    await until(lambda: open_files() <= before)
    await until(lambda: server.num_connections == 0)  # the second one's probe
    server.close()


_OWNER = """
import asyncio, sys
from tests.support.kv_memory import MemfdMemory
from services.kvtransfer.transports.shm import ShmServer
async def main():
    server = ShmServer(MemfdMemory(4, 4096), 7, sys.argv[1])
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_a_killed_owner_takes_its_mappings_along_and_can_be_replaced(
    memory: MemfdMemory, cache: MappingCache, tmp_path: Path, kind: str
) -> None:
    name = str(tmp_path / "kv.sock") if kind == "path" else f"@baton-test-{os.getpid()}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipe = asyncio.subprocess.PIPE
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", _OWNER, name, stdout=pipe, env=environment)
    try:
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"ready\n"
        mapping: Mapping = await cache.get(*at(name))
        owner.kill()
        await until(lambda: len(cache) == 0)
        assert mapping.closed
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.communicate()
    server = ShmServer(memory, 8, name)
    await cache.get(*at(name, 8))
    cache.close()
    await until(lambda: server.num_connections == 0)
    server.close()
    assert os.listdir(tmp_path) == []


async def test_what_cannot_be_mapped_goes_by_grpc_if_that_is_offered() -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        order = destination.order(source, lease, transport="shm")
        order.source.offers[0].shm_socket = "@baton-elsewhere"  # another host, or another network namespace
        with pytest.raises(ShmUnavailable, match="baton-elsewhere"):
            await destination.fetcher.fetch(order)
        assert destination.freed == [order.import_]
        order = destination.order(source, lease, leg=2)
        order.source.offers[0].shm_socket = "@baton-elsewhere"
        outcome = await destination.fetcher.fetch(order)
        assert outcome.transport == types_pb2.TRANSPORT_GRPC
        assert destination.holds(order.targets) == source.expected(lease)


async def test_an_offer_of_no_transport_that_is_known_here_is_passed_over() -> None:
    source, destination = Source(shared=False), Destination()
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        order = destination.order(source, lease, transport="shm")
        order.source.offers.add(transport=99)  # type: ignore[arg-type]  # of a newer source
        with pytest.raises(TransportUnavailable, match="no transport that this worker pulls by"):
            await destination.fetcher.fetch(order)
        assert destination.freed == [order.import_]
        order = destination.order(source, lease, leg=2)
        order.source.offers.insert(0, types_pb2.KVOffer(transport=99))  # type: ignore[arg-type]
        outcome = await destination.fetcher.fetch(order)
        assert outcome.transport == types_pb2.TRANSPORT_GRPC
        assert destination.holds(order.targets) == source.expected(lease)


async def test_the_best_of_what_is_offered_is_taken_whatever_its_place_and_mapped_once() -> None:
    """Of transports that are compared by their speed (test_tcp.py) only this one is offered: a busy machine may find
    another faster."""
    source, destination = Source(), Destination()
    async with running(source, destination):
        for _ in range(3):
            order = destination.order(source, source.lease(40, sealed=True))
            offered = {offer.transport: offer for offer in order.source.offers}
            del order.source.offers[:]
            order.source.offers.extend([offered[types_pb2.TRANSPORT_GRPC], offered[types_pb2.TRANSPORT_SHM]])
            outcome = await destination.fetcher.fetch(order)
            assert outcome.transport == types_pb2.TRANSPORT_SHM
        assert len(destination.mappings) == 1


async def test_a_source_whose_socket_closes_under_a_copy() -> None:
    """The copy ends in the mapping it has; the Release decides."""
    source, destination = Source(), Destination()
    destination.memory.gate = gate = Gate()
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        order = destination.order(source, lease)
        fetch = destination.start(order)
        await gate.entered()
        source.transports.pop(0).close()
        source.shm = None
        await until(lambda: len(destination.mappings) == 0)
        gate.open()
        assert (await fetch).ready
        assert destination.holds(order.targets) == source.expected(lease)
        assert num_maps() == 2
