"""Runs a router as a process of its own, measures its resident memory, and makes raw messages to send to it."""

from __future__ import annotations

import contextlib
import re
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

    def _mib(self, name: str) -> float:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) / 1024

    def resident_mib(self) -> float:
        return self._mib("VmRSS")

    def peak_mib(self) -> float:
        return self._mib("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


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


def tagged(number: int, data: bytes) -> bytes:
    """Returns the bytes of a message's field that holds bytes."""
    size, length = len(data), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    tag = number << 3 | 2
    return (bytes([tag]) if tag < 0x80 else bytes([tag & 0x7F | 0x80, tag >> 7])) + bytes(length) + data
