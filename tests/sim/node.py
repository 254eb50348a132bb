"""Simulates one process: an event loop, threads, a clock, an address. It can be frozen, thawed and killed.

A restart is a new `Node` at the same address. Never: what runs on it (`worker`, `router`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from tests.sim.loop import NodeLoop
from tests.sim.world import Actor, World


class Session(Protocol):
    """Is one end of a session between a router and a worker."""

    heard_s: float
    """When the other end last said something, in world time."""


class Node:
    def __init__(self, world: World, name: str, address: str) -> None:
        self.world = world
        self.name = name
        self.address = address
        self.alive = True
        self.frozen = False
        self.thawed_s = 0.0
        """When it last began to run again, in world time."""
        self.slowness_s = 0.0
        """Added to every packet that leaves or reaches it."""
        self.loop = NodeLoop(world, self, origin_s=world.random.uniform(10.0, 10_000.0))
        self.num_commands_to_lose = 0
        self.sessions: dict[Session, None] = {}
        """Those that are open here, at either end."""
        self.inhabitant: object = None
        """What runs here: a `SimWorker` or a `SimRouter`."""
        self.on_death: list[Callable[[], None]] = []
        self._actors = [self.loop.actor]

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen

    def now(self) -> float:
        """It is the node's `Clock`."""
        return self.loop.time()

    def new_thread(self) -> Actor:
        actor = Actor(self.world, self)
        self._actors.append(actor)
        return actor

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self.thawed_s = self.world.now_s
        for actor in self._actors:
            actor.enlist()

    def kill(self) -> None:
        """Kills the process as `kill -9` does. The kernel closes its connections; nothing of it runs any more."""
        if not self.alive:
            return
        self.alive = False
        for act in self.on_death:
            act()
        for actor in self._actors[1:]:
            actor.ready.clear()
        self.loop.bury()


class Thread(Executor):
    """Carries out what is submitted, one piece after the other; each takes simulated time and takes effect at its end,
    which is the worst moment."""

    def __init__(self, node: Node, duration_s: Callable[[], float]) -> None:
        self._node = node
        self._duration_s = duration_s
        self._actor = node.new_thread()
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._busy = False
        self._current: tuple[Future[Any], Callable[[], Any]] | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.append((future, lambda: fn(*args, **kwargs)))
        if not self._busy:
            self._busy = True
            self._actor.post(self._take)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Whoever waits for a thread cannot see time pass: the rest is done at once."""
        if self._current is not None:
            self._finish(*self._current)
        while self._queue:
            future, work = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._finish(future, work)

    def _take(self) -> None:
        while self._queue:
            future, work = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._current = future, work
                self._node.world.after(self._duration_s(), lambda: self._actor.post(self._end))
                return
        self._busy = False

    def _end(self) -> None:
        if self._current is not None:
            self._finish(*self._current)
        self._take()

    def _finish(self, future: Future[Any], work: Callable[[], Any]) -> None:
        self._current = None
        try:
            result = work()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
