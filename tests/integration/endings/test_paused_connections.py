"""Tests connections of a host that is paused as a whole while pings are under way on them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.router.config import RouterConfig
from services.worker.config import WorkerConfig
from tests.support.examples import combinations
from tests.support.processes import environment
from tests.support.stoppable_end import CHANNELS, PING_EVERY_MS

pytestmark = pytest.mark.process

PAUSE_S = 2 * max(RouterConfig.silence_s, WorkerConfig.silence_s) - 0.5
"""Just under twice the longer of the two limits on silence."""
LOOKED_S = 0.3
PINGED_S = 2 * PING_EVERY_MS / 1000


@contextlib.asynccontextmanager
async def end(temp: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", "tests.support.stoppable_end", *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment(temp))
    try:
        yield process
    finally:
        process.kill()
        await process.communicate()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode().strip()


async def pause(first: asyncio.subprocess.Process, second: asyncio.subprocess.Process) -> None:
    """Stops both. What the second has sent since the first was stopped, a ping at least, is answered after the pause;
    and the second looks at its clock before it can see the answer."""
    first.send_signal(signal.SIGSTOP)
    await asyncio.sleep(PINGED_S)  # what is tested: that a ping has been sent
    second.send_signal(signal.SIGSTOP)
    await asyncio.sleep(PAUSE_S)  # and how long both were stopped
    second.send_signal(signal.SIGCONT)
    await asyncio.sleep(LOOKED_S)
    first.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(("options", "pinging"), combinations(tuple(CHANNELS), ["client", "server"]))
async def test_a_ping_under_way_does_not_end_a_paused_connection(tmp_path: Path, options: str, pinging: str) -> None:
    async with end(tmp_path, "server") as server, end(tmp_path, options, await line(server)) as client:
        assert await line(client) == "True"
        await (pause(server, client) if pinging == "client" else pause(client, server))
        assert client.stdin is not None
        client.stdin.write(b"\n")
        assert await line(client) == "True", "the call that was open before the pause goes on"
