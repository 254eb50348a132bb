"""Runs work on threads that do not keep the process from ending, as those of a ThreadPoolExecutor would.

They are for work that may never return, such as a read of a disk that hangs. Never: what the work is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Is an executor with at most `num_threads` threads, each of which is started when all others have work.

    None stands for no bound: nothing waits for other work, and whoever submits it bounds how much there is at once.
    """

    def __init__(self, num_threads: int | None, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_unfinished = 0
        """Pieces of work that wait or are under way."""
        self._lock = threading.Lock()
        """Guards the threads, the number, and that nothing is submitted behind the shutdown."""
        self._is_shut_down = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Returns the future of `fn(*args, **kwargs)`. Raises RuntimeError after a shutdown, and if the system has no
        thread for it."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError(f"the threads {self._name} are shut down")
            num_threads = len(self._threads)
            if num_threads <= self._num_unfinished and (self._num_threads is None or num_threads < self._num_threads):
                thread = threading.Thread(target=self._run, name=f"{self._name}_{num_threads}", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._work.put((future, lambda: fn(*args, **kwargs)))
            self._num_unfinished += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends each thread when all that was submitted has ended. With `wait`, it returns when they have ended, which
        may be never. With `cancel_futures`, what has not begun is cancelled."""
        with self._lock:
            if cancel_futures:
                self._cancel_waiting()
            if not self._is_shut_down:
                self._is_shut_down = True
                for _ in self._threads:
                    self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _cancel_waiting(self) -> None:
        ends = 0
        with contextlib.suppress(Empty):
            while True:
                if (item := self._work.get_nowait()) is None:
                    ends += 1
                else:
                    item[0].cancel()
        for _ in range(ends):
            self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            settle: Callable[[], None] | None = None
            if future.set_running_or_notify_cancel():
                try:
                    settle = partial(future.set_result, work())
                except BaseException as error:  # whatever it is, it is the caller's
                    settle = partial(future.set_exception, error)
            with self._lock:  # before anybody learns of the end, and submits more: this thread takes that
                self._num_unfinished -= 1
            if settle is not None:
                settle()
            del item, future, work, settle  # nothing of the work stays while this waits for the next
