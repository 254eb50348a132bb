"""Tests that a link to a worker that cannot be spoken to ends whole: no task of it is left, however its connection
ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.v1 import control_pb2
from services.core.clock import MonotonicClock
from services.router.coordinator.events import WorkerInfo
from services.router.policy import Role
from services.router.workers.sessions import SessionTimes, WorkerLink
from services.rpc.channels import dial
from tests.support.link_owner import Owner
from tests.support.patience import HANG_S

LINKS = 200
Peer = Callable[[socket.socket], None]


def _resets(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _speaks_http_1(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    connection.close()


def _goes_away(connection: socket.socket) -> None:
    settings, goaway = b"\0\0\0\4\0\0\0\0\0", b"\0\0\x08\7\0\0\0\0\0" + bytes(8)
    connection.sendall(settings + goaway)
    connection.close()


def _is_mute(connection: socket.socket) -> None:
    """Does nothing: the connection stays."""


@contextlib.contextmanager
def _listening(peer: Peer | None) -> Iterator[str]:
    """Yields the address of a `peer`, which lives in a thread, or an address where nobody listens."""
    if peer is None:
        yield "127.0.0.1:1"
        return
    accepted: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                accepted.append(connection)
                with contextlib.suppress(ConnectionError):
                    peer(connection)

    with socket.create_server(("127.0.0.1", 0), backlog=LINKS) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in accepted:
                connection.close()


@pytest.mark.parametrize("closed", [False, True], ids=["lost", "closed"])
@pytest.mark.parametrize("peer", [None, _resets, _speaks_http_1, _goes_away, _is_mute])
async def test_no_task_of_a_link_is_left(peer: Peer | None, closed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A task that nobody owns waits for ever, or is reported as destroyed whenever memory is collected."""
    pauses = random.Random(1)
    with _listening(peer) as address:
        before = asyncio.all_tasks()
        owners: list[Any] = [Owner() for _ in range(LINKS)]
        links: list[WorkerLink] = []
        for number, owner in enumerate(owners):
            description = control_pb2.WorkerDescription(worker_id="p", address=address)
            info = WorkerInfo("p", Role.PREFILL, 1, "", 16, 8, 128, 4, description=description)
            links.append(WorkerLink(info, owner, 1, number, SessionTimes(0.5, 1.0), MonotonicClock(), dial))
            links[-1].start()
        if closed:
            for link in links:
                await asyncio.sleep(pauses.random() * 0.002)
                await link.close()
        else:
            assert all([await owner.lost for owner in owners])
        assert not any(owner.opened.is_set() for owner in owners), "nobody is there"
        if left := asyncio.all_tasks() - before:  # they end when gRPC has told the status of what was cancelled
            _, left = await asyncio.wait(left, timeout=HANG_S)
        assert not left
        gc.collect()
    # gRPC also says what it still had to tell to the loops of tests that are over.
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [error for error in errors if error.startswith("Task ")]
