"""Runs a router as a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from services.cli.child import Child, Lifeline
from tests.support.processes import BATON, environment
from tests.support.text_model import write_model


class RunningRouter:
    def __init__(self, pid: int, port: int, http_port: int) -> None:
        self.pid = pid
        self.port = port
        self.http_port = http_port


@contextlib.asynccontextmanager
async def running_router(folder: Path, *flags: str) -> AsyncIterator[RunningRouter]:
    temp = folder / "temp"
    temp.mkdir()
    model = write_model(folder / "model")
    settings = [f"{name}={value}" for name, value in environment(temp).items()]
    command = ["env", "-i", *settings, *BATON, "router", "--model", str(model), "--log-level", "warning"]
    lifeline = Lifeline()
    child = Child("router", [*command, "--port", "0", "--control-port", "0", "--http-port", "0", *flags], lifeline)
    try:
        ready = await child.ready()
        assert ready is not None
        yield RunningRouter(child.pid, ready.port, ready.http_port)
    finally:
        await child.kill()
        lifeline.close()
