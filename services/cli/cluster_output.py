"""Says what `baton up` tells people of its cluster, and tells it line by line, as for logs and scripts.

Owns: the lines of the plain form. Never: the form for terminals (`start_screen.py`), or what happens in the cluster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Protocol

from services.cli.child import Ready
from services.core.start_progress import StartProgress


class ClusterOutput(Protocol):
    """Takes what happens in a cluster, in order. Call it on the event loop's thread, or before there is a loop."""

    @property
    def child_fd(self) -> int | None:
        """Returns the file descriptor for what the processes write; None stands for this process's stderr."""
        ...

    def fact(self, line: str) -> None:
        """Takes a line about a start as it should be."""
        ...

    def event(self, line: str) -> None:
        """Takes a line about something else: a process died, or left."""
        ...

    def begun(self, name: str) -> None:
        """Hears that a process, or another part of the start, begins; not for the first time, perhaps."""
        ...

    def progressed(self, name: str, progress: StartProgress) -> None:
        """Hears how far the part has come."""
        ...

    def done(self, name: str, summary: str, took_s: float | None = None) -> None:
        """Hears that a part which is no process is done, perhaps without having heard of its beginning."""
        ...

    def serving(self, name: str, ready: Ready) -> None:
        """Hears that a process serves."""
        ...

    def ended(self, name: str) -> None:
        """Hears that a process has ended which was not told to."""
        ...

    async def ready(self) -> None:
        """Hears that a request would succeed; returns when that has been said."""
        ...

    def stopping(self, reason: str) -> None:
        """Hears that the cluster drains now."""
        ...

    def stopped(self, line: str) -> None:
        """Takes the last line."""
        ...

    async def follow(self) -> None:
        """Runs beside the cluster until it is cancelled."""
        ...


class PlainOutput:
    """Prints lines on stdout and leaves stderr to the processes."""

    child_fd: int | None = None

    def fact(self, line: str) -> None:
        announce(line)

    def event(self, line: str) -> None:
        announce(line)

    def begun(self, name: str) -> None:
        pass

    def progressed(self, name: str, progress: StartProgress) -> None:
        pass

    def done(self, name: str, summary: str, took_s: float | None = None) -> None:
        pass

    def serving(self, name: str, ready: Ready) -> None:
        pass

    def ended(self, name: str) -> None:
        pass

    async def ready(self) -> None:
        announce("ready")

    def stopping(self, reason: str) -> None:
        announce(f"stopping ({reason}); once more to stop at once")

    def stopped(self, line: str) -> None:
        announce(line)

    async def follow(self) -> None:
        pass


def is_screen_wanted(log_level: str | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the start is to be drawn: stdout and stderr are a terminal's, and no log was asked for."""
    can_be_drawn_on = environ.get("TERM", "") not in ("", "dumb")
    return log_level is None and can_be_drawn_on and sys.stdout.isatty() and sys.stderr.isatty()


def announce(line: str) -> None:
    """Prints one line on stdout at once. If its reader has gone, or the disk of its file is full, the cluster runs on
    without output."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
