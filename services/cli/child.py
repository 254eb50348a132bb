"""Runs one child process: starts it with its two pipes, learns when it is ready, ends it.

Owns: the process and the pipes. Never: whether it is started again (supervisor.py), nor what it runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from services.core.start_progress import TellProgress, from_report, tell_nobody

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Ready:
    """Reports, from a child, the ports that it serves."""

    port: int
    metrics_port: int
    pid: int
    http_port: int = 0
    """Port of a router's HTTP; 0 if there is none."""
    control_port: int = 0
    """A router's control port; 0 for a worker."""


class Lifeline:
    """Keeps a pipe that no one writes. Children hold its read end and read end of file when this process has ended."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # exec closes both; only `pass_fds` hands one on

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self._write_fd)


class Child:
    """Represents a started process. Make it on the event loop's thread, and await `wait` before dropping it.

    A pidfd reports its end: asyncio's own subprocesses may lose an exit status when a signal is sent at the same
    moment.
    """

    def __init__(self, name: str, command: Sequence[str], lifeline: Lifeline, output_fd: int | None = None) -> None:
        """Runs `command --ready-fd N --lifeline-fd M` in a session of its own, so that the supervisor handles a Ctrl-C.

        Its output goes to `output_fd`, by default this process's stderr, which leaves stdout to the supervisor.
        """
        self.name = name
        self._ready_fd, write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, "--ready-fd", str(write_fd), "--lifeline-fd", str(lifeline.read_fd)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if output_fd is None else output_fd,
                stderr=output_fd,
                pass_fds=(write_fd, lifeline.read_fd),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._ready_fd)
            raise
        finally:
            os.close(write_fd)  # the child's copy is now the only one, so its death is end of file
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_end)

    async def ready(self, tell: TellProgress = tell_nobody) -> Ready | None:
        """Waits for the child's ports; None if it ends, or closes the pipe, without them. Call it once.

        `tell` hears of the progress that it reports until then.
        """
        reader = asyncio.StreamReader()
        pipe = os.fdopen(self._ready_fd, "rb")
        transport, _ = await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while line := await reader.readline():
                try:
                    report = json.loads(line)
                    progress = from_report(report)
                    if progress is None:
                        return _ready(report)
                except (ValueError, KeyError, TypeError):
                    logger.error("%s sent a malformed report: %r", self.name, line)
                    return None
                tell(progress)
        finally:
            transport.close()
        return None

    async def wait(self) -> int:
        """Waits for the child's end. Returns its exit status; -N if signal N ended it."""
        return await asyncio.shield(self._ended)

    async def end(self, grace_s: float) -> None:
        """Sends SIGTERM, and after `grace_s` SIGKILL. Returns when the child has ended."""
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            logger.warning("%s did not end within %g s of SIGTERM: killed", self.name, grace_s)
            await self.kill()

    async def kill(self) -> None:
        """Sends SIGKILL. Returns when the child has ended."""
        self._process.kill()
        await self.wait()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(self._process.wait())


def _ready(report: dict[str, int]) -> Ready:
    port, metrics_port, pid = (int(report[name]) for name in ("port", "metrics_port", "pid"))
    http_port, control_port = (int(report.get(name, 0)) for name in ("http_port", "control_port"))
    return Ready(port, metrics_port, pid, http_port, control_port)


def describe_exit(status: int) -> str:
    """Describes an exit status for people: `killed by SIGKILL`, `exit status 1`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name of its own
        return f"killed by signal {-status}"
