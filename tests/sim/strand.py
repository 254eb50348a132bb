"""Runs work that waits in its midst, as a disk or a long copy makes a thread wait: others run while it does.

Each piece of work has a real thread, of which the simulation lets run one at a time, and only in the turn of its actor.
So a run is as repeatable as any. Never: what the work is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from tests.sim.node import Node

_here = threading.local()


class _Killed(BaseException):
    """Unwinds a thread whose process was killed."""


def is_on_strand() -> bool:
    """Returns whether whoever asks may wait."""
    return hasattr(_here, "strand")


def wait(duration_s: float) -> None:
    """Lets so much of the world's time pass, and others run. No lock may be held."""
    strand: _Strand = _here.strand
    strand.wait(duration_s)


class _Strand:
    """Is one piece of work under way."""

    def __init__(self, future: Future[Any], work: Callable[[], Any]) -> None:
        self.future = future
        self.over = False
        self.is_hurried = False
        """Waits take no time."""
        self.is_killed = False
        self.waits_s = 0.0
        self._work = work
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._result: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._begun = False

    def step(self) -> None:
        """Lets it run until it waits or is over."""
        if self._begun:
            self._go.release()
        else:
            self._begun = True
            self._thread.start()
        self._back.acquire()

    def kill(self) -> None:
        self.is_killed = True
        if self._begun and not self.over:
            self.step()

    def tell(self) -> None:
        """Says what came of it."""
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._result)

    # On its thread.

    def wait(self, duration_s: float) -> None:
        if self.is_killed:
            raise _Killed
        if self.is_hurried:
            return
        self.waits_s = duration_s
        self._back.release()
        self._go.acquire()
        if self.is_killed:
            raise _Killed

    def _run(self) -> None:
        _here.strand = self
        try:
            self._result = self._work()
        except _Killed:
            pass
        except Exception as error:
            self._error = error
        finally:
            self.over = True
            self._back.release()


class StrandThread(Executor):
    """Carries out what is submitted, one piece after the other."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._actor = node.new_thread()
        self._queue: deque[_Strand] = deque()
        self._busy = False
        self._current: _Strand | None = None
        node.on_death.append(self._die)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.append(_Strand(future, lambda: fn(*args, **kwargs)))
        if not self._busy:
            self._busy = True
            self._actor.post(self._take)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Whoever waits for a thread cannot see time pass: the rest is done at once."""
        rest = [self._current] if self._current is not None else []
        rest += [strand for strand in self._queue if strand.future.set_running_or_notify_cancel()]
        self._queue.clear()
        self._current = None
        for strand in rest:
            strand.is_hurried = True
            strand.step()
            strand.tell()

    def _take(self) -> None:
        while self._queue:
            strand = self._queue.popleft()
            if strand.future.set_running_or_notify_cancel():
                self._current = strand
                self._step(strand)
                return
        self._busy = False

    def _step(self, strand: _Strand) -> None:
        if self._current is not strand:  # `shutdown` did not wait
            return
        strand.step()
        if not strand.over:
            self._node.world.after(strand.waits_s, lambda: self._actor.post(lambda: self._step(strand)))
            return
        self._current = None
        strand.tell()
        self._take()

    def _die(self) -> None:
        if self._current is not None:
            self._current.kill()


class AtOnce(Executor):
    """Carries out what is submitted before anything else, on the thread of whoever submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            result = fn(*args, **kwargs)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return future
