"""Runs a program on a pseudo-terminal, and keeps what a person would see of it, now and before.

Owns: the terminal and the process. `pyte` emulates the terminal, so that control sequences have their effect.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pyte

from tests.support.patience import Patience

_ROWS = 45
_HISTORY = 5000


class Terminal:
    """Represents the terminal; as a context it kills the program at the end, and the program's children end with it."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], *, columns: int = 100
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, _ROWS, history=_HISTORY)
        self._stream = pyte.ByteStream(self.screen)
        self._fd, program_end = pty.openpty()
        fcntl.ioctl(program_end, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],  # so that the terminal sends a signal for Ctrl-C
            stdin=program_end,
            stdout=program_end,
            stderr=program_end,
            cwd=folder,
            env=dict(environment),
        )
        os.close(program_end)
        self.seen: list[str] = []
        """Every text that stood on the screen, one after the other."""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            psutil.wait_procs(children, timeout=30)
        os.close(self._fd)

    def text(self) -> str:
        """Returns what stands on the screen, below what has been scrolled away, without blanks at the ends of lines."""
        above = ["".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self.screen.display]).rstrip()

    def rows(self) -> list[str]:
        return self.text().splitlines()

    def unwrapped(self) -> str:
        """Returns the text with lines joined that go on in the next, since they fill the terminal's width."""
        lines = [
            line.ljust(self.screen.columns) if len(line) == self.screen.columns else f"{line}\n" for line in self.rows()
        ]
        return "".join(lines)

    def read_until(self, pattern: str, within_s: float = 120.0) -> str:
        """Returns the text as soon as the pattern is in it."""
        patience = Patience(within_s)
        while not re.search(pattern, self.unwrapped()):
            assert not patience.is_over(), f"no {pattern!r} within {patience.waited_s:.0f} s:\n{self.text()}"
            assert self._read(), f"it ended without {pattern!r}:\n{self.text()}"
        return self.text()

    def wait(self, within_s: float = 60.0) -> int:
        """Reads to the end, and returns the exit status."""
        patience = Patience(within_s)
        while self._read():
            assert not patience.is_over(), f"it still runs after {patience.waited_s:.0f} s:\n{self.text()}"
        return self.process.wait(within_s)

    def press_ctrl_c(self) -> None:
        os.write(self._fd, b"\x03")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def child(self, word: str) -> psutil.Process:
        """Returns the program's child with the word in its command line."""
        (found,) = [each for each in psutil.Process(self.process.pid).children() if word in each.cmdline()]
        return found

    def _read(self) -> bool:
        """Reads what has come within a moment; returns whether more may come."""
        if select.select([self._fd], [], [], 0.05)[0]:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # what a terminal answers whose other end nobody has
                return False
            if not data:
                return False
            self._stream.feed(data)
            if not self.seen or self.seen[-1] != self.text():
                self.seen.append(self.text())
        return True
