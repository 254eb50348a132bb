"""Reads for how long this process has waited for a processor: it could have run, and others did.

Owns: the reading of Linux's scheduler statistics. Never: what follows from a delay (`awake`). Where the kernel keeps no
such statistics there is no delay.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


class RunDelay:
    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        """`tasks` has a folder for each thread, with the file `schedstat`: nanoseconds that it ran, nanoseconds that it
        waited to run, and how often it ran."""
        self._tasks = tasks
        self._waited_ns = self._read()

    def since_last(self) -> float:
        """Returns the seconds for which the most delayed thread has waited since the last call.

        A process makes no headway while one of its threads waits that others wait for. All of them together would
        count the same time several times.
        """
        before, self._waited_ns = self._waited_ns, self._read()
        return max((ns - before.get(thread, 0) for thread, ns in self._waited_ns.items()), default=0) / 1e9

    def _read(self) -> dict[str, int]:
        """Returns nanoseconds by thread."""
        found: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for thread in self._tasks.iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or there are no statistics
                    found[thread.name] = int((thread / "schedstat").read_text().split()[1])
        return found
