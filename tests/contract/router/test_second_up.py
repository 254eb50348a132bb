"""Tests what a second `baton up` says where one runs already."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from services.cli.main import EXIT_USAGE, main
from tests.support.cluster import Cluster
from tests.support.trusted import CLUSTER_TOKEN


async def test_it_says_that_one_runs_as_which_pid_and_what_to_type(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    ports = (cluster.router.port, cluster.router.control_port)
    flags = [f"--port={ports[0]}", f"--control-port={ports[1]}", "--http-port=-1", "--metrics-port=-1"]
    assert await asyncio.to_thread(main, ["up", *flags]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert f"a cluster runs here already, as pid {os.getpid()}. " in told
    assert f"baton chat --target 127.0.0.1:{ports[0]}; " in told
    assert f"baton status --target 127.0.0.1:{ports[1]}; " in told
    assert "baton up --port 0" in told


async def test_where_clients_talk_to_it_is_not_guessed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control port alone is taken: the running cluster serves clients on another port than the one asked for."""
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    flags = ["--port=0", f"--control-port={cluster.router.control_port}", "--http-port=-1", "--metrics-port=-1"]
    assert await asyncio.to_thread(main, ["up", *flags]) == EXIT_USAGE
    assert f"baton chat --target 127.0.0.1:{cluster.router.port}; " in capsys.readouterr().err


@pytest.mark.parametrize("beside_a_cluster", [False, True])
async def test_a_port_that_somebody_else_has_is_told_as_such(
    beside_a_cluster: bool, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    control_port = cluster.router.control_port if beside_a_cluster else 0
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = [f"--port={port}", f"--control-port={control_port}", "--http-port=-1", "--metrics-port=-1"]
        assert await asyncio.to_thread(main, ["up", *flags]) == EXIT_USAGE
    assert "--port: cannot listen on " in capsys.readouterr().err
