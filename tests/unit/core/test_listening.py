"""Tests what is said of a port that cannot be listened on: the flag, the reason and what to do, in the same words by
every server and before slow work."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from services.core.errors import ConfigError
from services.core.listening import require_free
from services.rpc.prometheus import MetricsServer
from services.rpc.serving import GrpcServer

TRIALS: dict[str, Callable[[str, int], object]] = {
    "--any-port": lambda host, port: require_free("--any-port", host, port),
    "--port": lambda host, port: GrpcServer(host, port).bind(),
    "--control-port": lambda host, port: GrpcServer(host, port, flag="--control-port").bind(),
    "--metrics-port": lambda host, port: MetricsServer(CollectorRegistry(), host, port),
}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.parametrize("flag", TRIALS)
async def test_a_port_that_is_taken(flag: str, taken: int) -> None:
    words = f"^{flag}: cannot listen on 127.0.0.1:{taken}: Address already in use; 0 picks a free one$"
    with pytest.raises(ConfigError, match=words):
        TRIALS[flag]("127.0.0.1", taken)


@pytest.mark.parametrize("flag", TRIALS)
async def test_an_address_of_another_machine(flag: str) -> None:
    host_flag = "--control-host" if flag == "--control-port" else "--host"
    words = rf"^{flag}: cannot listen on 192\.0\.2\.1:0: .*; {host_flag} must be an address of this machine$"
    with pytest.raises(ConfigError, match=words):
        TRIALS[flag]("192.0.2.1", 0)


@pytest.mark.parametrize("flag", TRIALS)
async def test_a_name_that_means_nothing(flag: str) -> None:
    host_flag = "--control-host" if flag == "--control-port" else "--host"
    with pytest.raises(ConfigError, match=f"^{host_flag}: host.invalid does not resolve here: "):
        TRIALS[flag]("host.invalid", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::", "[::1]"])
def test_a_free_port_is_free(host: str) -> None:
    require_free("--port", host, 0)


def test_a_name_of_several_addresses_must_be_free_on_all_and_be_here_on_one(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    def resolve(*hosts: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, taken)) for host in hosts]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    resolve("192.0.2.1", "127.0.0.2")
    require_free("--port", "several", taken)
    resolve("127.0.0.2", "127.0.0.1")
    with pytest.raises(ConfigError, match="Address already in use"):
        require_free("--port", "several", taken)
    resolve("192.0.2.1", "198.51.100.1")
    with pytest.raises(ConfigError, match="--host must be an address of this machine"):
        require_free("--port", "several", taken)
