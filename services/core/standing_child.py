"""Keeps one confined child process at hand: started when it is needed, and again after it has ended.

Owns: that there is at most one, that it can be killed while somebody waits for its answer, and that none is started
after that. Never: what it is asked, or what a failure means.
"""

from __future__ import annotations

import threading

from services.core.confined_process import ConfinedProcess


class Closed(Exception):
    """No child is started any more."""


class StandingChild:
    """Owns at most one child process of a module.

    One thread at a time may use it; `kill` and `pid` may be used by others. All methods but these block.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        """`module` and `arguments` are those of `ConfinedProcess`."""
        self._module = module
        self._arguments = arguments
        self._changes = threading.Lock()
        """Guards the two fields below, and is held for moments only."""
        self._process: ConfinedProcess | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Returns the id of the child process; None if there is none now."""
        process = self._process
        return None if process is None else process.pid

    @property
    def is_closed(self) -> bool:
        return self._closed

    def running(self) -> ConfinedProcess | None:
        """Returns the child, if there is one that has not ended."""
        process = self._process
        return None if process is None or process.has_ended else process

    def start(self) -> ConfinedProcess:
        """Ends the child that there is, if any, and returns a new one. Raises Closed after `kill`."""
        self.drop()
        with self._changes:
            if self._closed:
                raise Closed
            self._process = ConfinedProcess(self._module, *self._arguments)
            return self._process

    def kill(self) -> None:
        """Kills the child, and with it what waits for its answer. No other is started."""
        with self._changes:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def drop(self) -> None:
        """Ends the child, if there is one, and frees what it needed."""
        with self._changes:
            process, self._process = self._process, None
        if process is not None:
            process.end()
