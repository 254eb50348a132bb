"""Tests what a worker is called and where it is reached when nobody has said so."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from services.core.errors import ConfigError
from services.worker import address
from services.worker.address import completed
from services.worker.config import WorkerConfig


@pytest.fixture
def host_name(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(socket, "gethostname", lambda: "3f2a9c1b7d10")
    return "3f2a9c1b7d10"


def names(monkeypatch: pytest.MonkeyPatch, table: dict[str, str]) -> None:
    """Provides the only names that resolve, each to one IPv4 address."""

    async def resolve(host: str, port: int) -> list[Any]:
        return [(socket.AF_INET, (table[host], port))] if host in table else []

    monkeypatch.setattr(address, "_resolve", resolve)


async def test_what_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, {})
    config = WorkerConfig(host="0.0.0.0", advertise="gpu-1:7000", worker_id="decode-7")
    assert await completed(config, "decode", 50051) == config


async def test_on_loopback_the_port_tells_workers_apart() -> None:
    config = await completed(WorkerConfig(), "prefill", 4711)
    assert (config.advertise, config.worker_id) == ("127.0.0.1:4711", "prefill-4711")


async def test_an_address_of_this_host_is_advertised_as_bound(host_name: str) -> None:
    config = await completed(WorkerConfig(host="192.0.2.7"), "decode", 50051)
    assert (config.advertise, config.worker_id) == ("192.0.2.7:50051", f"decode-{host_name}-50051")


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", "[::]"])
async def test_a_wildcard_gives_the_address_on_the_way_to_a_router(wildcard: str, host_name: str) -> None:
    """A router on loopback is on this machine, and so dials us there."""
    config = await completed(WorkerConfig(host=wildcard, router=("127.0.0.1:50051",)), "decode", 50052)
    assert (config.advertise, config.worker_id) == ("127.0.0.1:50052", f"decode-{host_name}-50052")


async def test_without_a_router_that_resolves_the_host_name_does(
    monkeypatch: pytest.MonkeyPatch, host_name: str
) -> None:
    names(monkeypatch, {host_name: "192.0.2.9"})
    config = await completed(WorkerConfig(host="0.0.0.0", router=("router:50051",)), "decode", 50051)
    assert config.advertise == "192.0.2.9:50051"


async def test_a_host_name_that_means_loopback_tells_nothing(monkeypatch: pytest.MonkeyPatch, host_name: str) -> None:
    names(monkeypatch, {host_name: "127.0.1.1"})
    with pytest.raises(ConfigError, match="--advertise"):
        await completed(WorkerConfig(host="0.0.0.0"), "decode", 50051)


def test_ipv6_addresses_are_bracketed() -> None:
    assert address.join("2001:db8::7", 50051) == "[2001:db8::7]:50051"
    assert address.join("[::1]", 50051) == "[::1]:50051"
