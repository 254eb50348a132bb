"""Bounds how many connections an HTTP server has, in all and for each peer, and chooses which one makes room.

A server that is full closes the connection that has been idle longest: one that never sent a request (a handshake of
TLS is one of these), else one that is kept alive, else one whose request is still arriving. A connection that is being
answered is never closed for another. Health is answered from a reserve, so that a probe learns the router's state even
when clients use up the rest. Owns: the counts and the limits. Never: sockets or bytes (connection.py).
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass
from typing import Protocol

from services.core.descriptors import share_of_descriptors

SWEEP_S = 0.5
# Share of the process's file descriptors. The rest is for gRPC (services/rpc/options.py), workers and files.
_SHARE_OF_DESCRIPTORS = 0.3
_MOST_CONNECTIONS = 8192
_RESERVE = 32
# One address may be a load balancer for all clients; it may also be one client that would keep the others out.
_SHARE_OF_A_PEER = 0.75


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int
    max_per_peer: int
    """The most connections of one address, or of one /64 network."""
    reserve: int = _RESERVE
    """Connections beyond these bounds, for health."""
    head_s: float = 10.0
    """Seconds from a request's first byte, or from connecting, to the end of its headers."""
    keep_s: float = 75.0
    """Seconds from an answer to the next request. It is longer than common clients and load balancers keep a connection
    in their pools, so that they are the ones to close it."""
    body_grace_s: float = 10.0
    body_bytes_per_s: float = 1024.0
    """The lowest rate of a body after `body_grace_s`; a request whose body arrives more slowly is refused."""
    linger_s: float = 5.0
    """Seconds for the rest of a request that was answered before all of it arrived."""
    write_s: float = 60.0
    """Seconds in which a client must read enough to make room for more; otherwise its connection is closed."""


class ConnectionStage(enum.Enum):
    """What a connection does. They stand in the order in which connections are closed to make room."""

    SILENT = enum.auto()
    """No request has arrived yet."""
    KEPT = enum.auto()
    """One was answered and another may follow."""
    UPLOADING = enum.auto()
    """A request is arriving."""
    BUSY = enum.auto()
    """A request is being answered. It is never closed to make room."""


class Member(Protocol):
    """Is a connection, as those that bound them all see it."""

    peer: str
    stage: ConnectionStage

    def evict(self) -> None: ...

    def check(self, now: float) -> None: ...


class _Pool:
    """Keeps connections by stage; within each, those that have been in it longest come first."""

    def __init__(self) -> None:
        self.stages: dict[ConnectionStage, dict[Member, None]] = {stage: {} for stage in ConnectionStage}

    def __len__(self) -> int:
        return sum(map(len, self.stages.values()))

    def members(self) -> list[Member]:
        return [connection for members in self.stages.values() for connection in members]

    def oldest_idle(self) -> Member | None:
        oldest = next((connection for members in self.stages.values() for connection in members), None)
        return None if oldest is None or oldest.stage is ConnectionStage.BUSY else oldest


class Connections:
    """Keeps all connections of one server. Use it on the server's event loop only."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._all = _Pool()
        self._of_peers: dict[str, _Pool] = {}

    def __len__(self) -> int:
        return len(self._all)

    def open(self, connection: Member) -> bool:
        """Takes a connection in.

        Returns False if there is no room and no connection that can be closed to make room.
        """
        for pool, most in self._pools(connection):
            if len(pool) >= most + self.limits.reserve:
                victim = pool.oldest_idle()
                if victim is None:
                    return False
                victim.evict()
        for pool, _ in self._pools(connection):
            pool.stages[connection.stage][connection] = None
        return True

    def move(self, connection: Member, stage: ConnectionStage) -> None:
        """Notes a connection's stage, also that of one which was closed meanwhile."""
        for pool, _ in self._pools(connection):
            if connection in pool.stages[connection.stage]:
                del pool.stages[connection.stage][connection]
                pool.stages[stage][connection] = None
        connection.stage = stage

    def close(self, connection: Member) -> None:
        """Forgets a connection, if it is still kept."""
        for pool, _ in self._pools(connection):
            pool.stages[connection.stage].pop(connection, None)
        if not self._of_peers[connection.peer]:
            del self._of_peers[connection.peer]

    def has_room(self, connection: Member) -> bool:
        """Returns whether one more request may be answered, if it does not ask for health."""
        return all(len(pool.stages[ConnectionStage.BUSY]) <= most for pool, most in self._pools(connection))

    async def sweep_forever(self) -> None:
        """Ends connections that have kept the server waiting for too long."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for connection in self.each():
                connection.check(asyncio.get_running_loop().time())

    def each(self) -> list[Member]:
        return self._all.members()

    def _pools(self, connection: Member) -> list[tuple[_Pool, int]]:
        """Returns those that count the connection, with the most that each may have."""
        if connection.peer not in self._of_peers:
            self._of_peers[connection.peer] = _Pool()
        of_peer = self._of_peers[connection.peer]
        return [(of_peer, self.limits.max_per_peer), (self._all, self.limits.max_connections)]


def default_limits() -> ConnectionLimits:
    """Returns the limits that the process's file descriptors allow."""
    most = share_of_descriptors(_SHARE_OF_DESCRIPTORS, _MOST_CONNECTIONS)
    reserve = min(_RESERVE, max(1, most // 8))
    most = max(1, most - reserve)
    return ConnectionLimits(max_connections=most, max_per_peer=max(1, int(most * _SHARE_OF_A_PEER)), reserve=reserve)
