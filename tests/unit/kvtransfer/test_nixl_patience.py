"""Tests how long reads by NIXL may take that share the way to their source, and those that were given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.errors import TransferFailed
from services.kv.regions import Region
from services.kvtransfer.transports import nixl_agent
from services.kvtransfer.transports.nixl import _STOPPED_S, NixlCopier, NixlDestination, Peer
from services.kvtransfer.transports.nixl_agent import NixlAgent

SILENCE_S = 0.4


class Time:
    """Stands for the module `time`: it passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Bindings:
    """Stands for NIXL's own. A read ends as many ms after it was posted as the address says that is read."""

    NIXL_IN_PROG, NIXL_SUCCESS, NIXL_READ, DRAM_SEG, NIXL_THREAD_SYNC_NONE = "busy", SimpleNamespace(name="OK"), 0, 0, 0

    def nixlAgentConfig(self) -> SimpleNamespace:
        return SimpleNamespace()

    def nixlAgent(self, name: str, config: object) -> Bindings:
        return self

    def nixlXferDList(self, kind: int, regions: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        return regions

    def createBackend(self, *_: object) -> None: ...

    def createXferReq(self, operation: int, targets: object, sources: list[tuple[int, int, int]], *_: object) -> float:
        return nixl_agent.time.monotonic() + sources[0][0] / 1000

    def postXferReq(self, ends_s: float, _: str) -> object:
        return self.NIXL_IN_PROG

    def getXferStatus(self, ends_s: float) -> object:
        return self.NIXL_SUCCESS if nixl_agent.time.monotonic() > ends_s else self.NIXL_IN_PROG

    def releaseXferReq(self, ends_s: float) -> None: ...


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> NixlAgent:
    monkeypatch.setattr(nixl_agent, "bindings", Bindings)
    monkeypatch.setattr(nixl_agent, "time", Time())
    return NixlAgent("reads", serves=False, ucx={})


class End:
    """Stands for the destination's end."""

    silence_s = SILENCE_S
    threads = None

    def unpin(self, peer: Peer) -> None:
        peer.num_pins -= 1


def copier_of(peer: Peer, num_copies: int = 2) -> NixlCopier:
    """Returns a copier with its fetch's pin, and one for each copy under way."""
    copier = NixlCopier(cast(NixlDestination, End()), peer)
    for _ in range(1 + num_copies):
        copier.pin()
    return copier


def peer_of(agent: Any) -> Peer:
    return Peer(cast(Any, SimpleNamespace(num_blocks=9)), agent, "source", cast(Any, None))


def read(agent: NixlAgent, ms: int) -> None:
    copier = copier_of(peer_of(agent))
    agent.read("source", [Region(0, 1, "cpu")], [Region(ms, 1, "cpu")], copier._patience_s)


def test_a_read_that_shares_the_way_may_take_longer(agent: NixlAgent) -> None:
    agent.num_reads = 1  # another's
    read(agent, 600)
    assert not agent.closed


def test_a_read_alone_may_not(agent: NixlAgent) -> None:
    with pytest.raises(TransferFailed, match="does not give"):
        read(agent, 600)
    assert agent.closed


def test_fetches_that_are_all_given_up_do_not_wait_for_one_another() -> None:
    peer = peer_of(SimpleNamespace(num_reads=4, closed=False))
    first, second = copier_of(peer), copier_of(peer)
    first.stop()
    first.unpin()
    assert first._patience_s() == SILENCE_S, "the other has use for the agent"
    second.stop()
    second.unpin()
    assert first._patience_s() == second._patience_s() == _STOPPED_S
    for _ in range(2):
        first.unpin()
        second.unpin()
    assert (peer.num_pins, peer.num_given_up) == (0, 0)
