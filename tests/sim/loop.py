"""Implements an asyncio event loop in virtual time, one per node.

Owns: the node's callbacks, in asyncio's order (first come, first served), and its tasks. The world decides when they
run; while the node is frozen none does, and timers that were due fire late. Never: real I/O or real time.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from tests.sim.world import Actor, Machine, World


class NodeLoop(asyncio.AbstractEventLoop):
    def __init__(self, world: World, machine: Machine, origin_s: float) -> None:
        """`origin_s`: what this node's clock shows when the world's shows 0. Only durations cross the wire."""
        self._world = world
        self._origin_s = origin_s
        self.actor = Actor(world, machine)
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.stutter = 0.0
        """Share of callbacks that take long, for whatever reason."""

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._origin_s + self._world.now_s

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.actor.post(lambda: self._run(handle))
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.at(when - self._origin_s, lambda: None if handle.cancelled() else self._due(handle))
        return handle

    def _due(self, handle: asyncio.Handle) -> None:
        self.actor.post(lambda: self._run(handle))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def run_in_executor(self, executor: None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Stands for `asyncio.to_thread`, for what takes no simulated time."""
        assert executor is None
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(run)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        """Calls `callback` when there is something to read from `fd`, a `shared_memory.Connection`."""
        fd.watch(self, lambda: callback(*args))

    def remove_reader(self, fd: Any) -> bool:
        return bool(fd.unwatch())

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.actor.machine.alive:
            self._world.fail(context.get("exception") or RuntimeError(context["message"]))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    # What the simulation does with it.

    def _run(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(None)
        if self.stutter and self._world.chance(self.stutter):
            self.actor.keep_busy(self._world.random.choice((0.02, 0.1, 0.4)))

    def enter(self, act: Callable[[], Any]) -> Any:
        """Does something as if a callback of this loop did it."""
        asyncio._set_running_loop(self)
        try:
            return act()
        finally:
            asyncio._set_running_loop(None)

    def bury(self) -> None:
        """The process is gone: its coroutines are closed where nobody sees it, so that nothing is left for the
        garbage collector to run later."""
        for _ in range(10):
            for task in list(self.tasks):
                task.cancel()
            while self.actor.ready:
                self.actor.ready.popleft()()
            if not self.tasks:
                return
        for task in self.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
