"""Runs the life of one service process: it reports when it is ready, stops when told, never outlives its supervisor.

Owns: the signals SIGTERM and SIGINT, the pipe on which a child reports its start and its ports, and the lifeline, a
pipe whose other end only the supervisor holds: end of file means that the supervisor is gone, however it died. Never:
what a service does between ready and stopped, and which event loop it runs on.

    lifecycle = Lifecycle(ready_fd=..., lifeline_fd=...)   # both None when started by hand
    lifecycle.watch_lifeline()                             # before slow imports
    run(lambda: serve(config, lifecycle), lifecycle, loop_factory=uvloop.new_event_loop)

    async def serve(config, lifecycle):
        ...                                      # bind, load (lifecycle.report_progress(...) now and then), start
        lifecycle.report_ready(port=server.port, metrics_port=metrics.port)
        await lifecycle.stopping.wait()
        ...                                      # refuse new work, lifecycle.drain_s for what runs, close
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from services.core.start_progress import StartProgress, to_line

logger = logging.getLogger(__name__)


class Lifecycle:
    """Keeps the state of a process from its start to its end; each process has one. Signals and `stop` are handled on
    the event loop's thread; the lifeline has a thread of its own."""

    def __init__(
        self,
        *,
        ready_fd: int | None = None,
        lifeline_fd: int | None = None,
        drain_s: float = 30.0,
        orphan_grace_s: float = 5.0,
    ) -> None:
        """Takes `ready_fd`, the write end of one pipe, and `lifeline_fd`, the read end of another; both are inherited.

        `drain_s`: seconds that running requests may take after `stopping`. `orphan_grace_s`: the same when the
        supervisor is gone; after that the process ends, whatever it is doing.
        """
        self.stopping = asyncio.Event()
        self.drain_s = drain_s
        self._ready_fd = ready_fd
        self._lifeline_fd = lifeline_fd
        self._orphan_grace_s = orphan_grace_s
        self._loop: asyncio.AbstractEventLoop | None = None
        for fd in (ready_fd, lifeline_fd):
            if fd is not None:
                os.set_inheritable(fd, False)

    @property
    def is_supervised(self) -> bool:
        """Returns whether another process has started this one and waits for its report."""
        return self._ready_fd is not None

    def watch_lifeline(self) -> None:
        """Starts the thread that watches the supervisor. Does nothing without a lifeline."""
        if self._lifeline_fd is not None:
            threading.Thread(target=self._watch_supervisor, name="lifeline", daemon=True).start()

    def report_progress(self, progress: StartProgress) -> None:
        """Tells the supervisor how far the start has come. It may be called on any thread, until `report_ready`.
        Without a supervisor, it does nothing."""
        if self._ready_fd is not None:
            try:
                os.write(self._ready_fd, to_line(progress))
            except BrokenPipeError:
                logger.debug("the supervisor does not listen any more")  # the lifeline decides what follows

    def report_ready(self, *, port: int, metrics_port: int, http_port: int = 0, control_port: int = 0) -> None:
        """Tells the supervisor, once, that the process serves, and on which ports (0: it has no such port). Without a
        supervisor the ports are only logged."""
        ports = {"port": port, "metrics_port": metrics_port, "http_port": http_port, "control_port": control_port}
        logger.info("ready: %s", ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in ports.items()))
        if self._ready_fd is None:
            return
        report = {**ports, "pid": os.getpid()}
        fd, self._ready_fd = self._ready_fd, None
        try:
            os.write(fd, json.dumps(report).encode() + b"\n")  # one write below PIPE_BUF is never split
        except BrokenPipeError:
            logger.warning("the supervisor does not listen any more")  # the lifeline decides what follows
        finally:
            os.close(fd)

    def stop(self, reason: str) -> None:
        """Asks the service to stop. Call on the event loop's thread. Further calls change nothing."""
        if not self.stopping.is_set():
            logger.info("stopping: %s", reason)
            self.stopping.set()

    def attach(self) -> None:
        """Handles SIGTERM and SIGINT from now on. `run` calls it on its event loop."""
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.stopping.is_set():
            os._exit(128 + number)  # a second signal ends the process at once
        self.stop(number.name)

    def _watch_supervisor(self) -> None:
        assert self._lifeline_fd is not None
        while os.read(self._lifeline_fd, 1):
            pass  # nothing is ever written: the loop ends at the end of file
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._on_supervisor_gone)
            except RuntimeError:
                logger.debug("orphaned while closing")  # the loop is closed: the process is ending by itself
            time.sleep(self._orphan_grace_s)
        os._exit(1)  # the process is still loading, stuck in a step, or draining for too long

    def _on_supervisor_gone(self) -> None:
        self.drain_s = min(self.drain_s, self._orphan_grace_s)
        self.stop("the supervisor is gone")


def run(
    main: Callable[[], Coroutine[Any, Any, None]],
    lifecycle: Lifecycle,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Runs `main()` to its end on a new event loop that handles the signals. Raises what `main` raises."""

    async def attached() -> None:
        lifecycle.attach()
        await main()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(attached())
