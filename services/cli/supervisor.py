"""Keeps children running: starts them, starts them again when they die, and ends them in order.

Owns: when a child is restarted and when that is hopeless; that a child which left in order has not failed. Never: what
the children are or how they are configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

from services.cli.child import Child, Lifeline, Ready, describe_exit
from services.core.errors import WorkerFailed
from services.core.start_progress import TellProgress, tell_nobody


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Computes the wait before a restart: it doubles from `first_s` to `most_s`, and starts over once a child served
    `healthy_s`."""

    first_s: float = 0.5
    most_s: float = 30.0
    healthy_s: float = 60.0
    # The number of starts that a child gets which has never been ready.
    num_starts: int = 5

    def delay_s(self, num_failures: int) -> float:
        """Returns the seconds before the restart that follows that many failures in a row (1 is the first)."""
        return min(self.most_s, self.first_s * 2.0 ** min(num_failures - 1, 30))


def _nothing() -> None:
    """Stands for a callback that nobody gave."""


class Supervised:
    """Represents one place in the cluster, and the child that fills it now."""

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        lifeline: Lifeline,
        announce: Callable[[str], None],
        *,
        on_ready: Callable[[Ready], None],
        backoff: Backoff = Backoff(),
        output_fd: int | None = None,
        on_start: Callable[[], None] = _nothing,
        on_progress: TellProgress = tell_nobody,
        on_end: Callable[[], None] = _nothing,
    ) -> None:
        """`command` is called for every start; `announce` takes one line for people.

        The children's output goes to `output_fd`, by default to stderr. Of `on_start`, `on_progress`, `on_ready` and
        `on_end`, the last is called when a child ends that was not told to.
        """
        self.name = name
        self.settled = asyncio.Event()  # set once it has been ready, or has died
        self.ready_once = asyncio.Event()
        self._command = command
        self._lifeline = lifeline
        self._announce = announce
        self._on_ready = on_ready
        self._backoff = backoff
        self._output_fd = output_fd
        self._on_start, self._on_progress, self._on_end = on_start, on_progress, on_end
        self._stopping = asyncio.Event()
        self._child: Child | None = None
        self._num_failures = 0

    async def keep(self) -> None:
        """Keeps the child running until `stop`: restarts it when it dies or leaves.

        Raises WorkerFailed if that is hopeless.

        If it is cancelled, it kills the child.
        """
        while not self._stopping.is_set():
            status, served_s = await self._live_once()
            self.settled.set()
            if self._stopping.is_set():
                return
            if status == 0 and served_s is not None:
                # It was drained, by an operator or a signal: that is no failure, so there is no wait.
                self._announce(f"{self.name} has left (drained after {served_s:.0f} s); starting it again")
                continue
            self._on_end()
            self._judge(status, served_s)
            delay_s = self._backoff.delay_s(self._num_failures)
            self._announce(f"{self.name} died ({describe_exit(status)}); restarting in {delay_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()

    async def stop(self, grace_s: float) -> None:
        """Ends the child without a restart: SIGTERM, and after `grace_s` SIGKILL."""
        self._stopping.set()
        if self._child is not None:
            await self._child.end(grace_s)

    async def _live_once(self) -> tuple[int, float | None]:
        """Runs the child once. Returns its exit status, and how many seconds it served (None: it was never ready)."""
        child = self._child = Child(self.name, self._command(), self._lifeline, self._output_fd)
        self._on_start()
        ready_at: float | None = None
        try:
            ready = await child.ready(self._on_progress)
            if ready is None:
                await child.kill()  # almost always dead already; otherwise it closed the pipe and is of no use
            else:
                ready_at = time.monotonic()
                self._now_ready(ready)
            status = await child.wait()
        except BaseException:
            await asyncio.shield(child.kill())
            raise
        finally:
            self._child = None
        return status, None if ready_at is None else time.monotonic() - ready_at

    def _now_ready(self, ready: Ready) -> None:
        self._on_ready(ready)
        self.ready_once.set()
        self.settled.set()

    def _judge(self, status: int, served_s: float | None) -> None:
        if served_s is not None and served_s >= self._backoff.healthy_s:
            self._num_failures = 0
        self._num_failures += 1
        if self.ready_once.is_set():
            return  # it has worked here before, so restarts have no limit
        if status > 0:
            raise WorkerFailed(f"{self.name} could not start ({describe_exit(status)}); its message is above")
        if self._num_failures >= self._backoff.num_starts:
            raise WorkerFailed(f"{self.name} died {self._num_failures} times while starting ({describe_exit(status)})")
