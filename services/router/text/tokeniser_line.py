"""Runs tokenisation on threads: who is next, how much waits, and how long that will take.

Owns: the threads, the texts that wait for them, and the measured rate. Never: what is done there. Short texts have a
thread of their own, so that none of them waits behind a long one. A text whose request has ended leaves the line at
once; one that is being tokenised cannot be interrupted.

Tokenising releases the interpreter lock. (Threads of a lower priority would not help: one that loses the processor
while it has the lock, at its end, makes the event loop wait; measured with nice 10 on a busy machine, nothing was
gained.)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import Any, TypeVar

from services.core.daemon_threads import DaemonThreads
from services.router.malloc import trim

T = TypeVar("T")

SHORT_BYTES = 16 << 10
_WEIGHT = 0.2
"""The weight of the newest text in the running average of the rate."""
_TRIM_BYTES = 256 << 10
"""Texts of at least this many bytes are followed by a trim: tokenising takes some hundred bytes for each byte of text,
which the allocator would keep.
"""


class TokeniserLine:
    """Tokenises in two lanes of threads, for short and for long texts. Call `run` on the event loop.

    `close` does not wait for texts that are being tokenised, since a chat template may take any time; a `run` that
    still awaits one of them may never return.
    """

    def __init__(self, num_threads: int, *, most_bytes: int) -> None:
        """`most_bytes` bounds the long texts that are tokenised at once; a single one may be longer."""
        self._short = _Lane(1, "tokenise-short", most_bytes)
        self._long = _Lane(num_threads, "tokenise", most_bytes)

    async def run(self, num_bytes: int, work: Callable[..., T], *arguments: Any) -> T:
        """Returns or raises what `work(*arguments)` does, on a thread.

        If it is cancelled, its place in the line is given up.
        """
        return await self._lane(num_bytes).run(num_bytes, work, *arguments)

    def wait_s(self, num_bytes: int) -> float:
        """Returns the seconds a text would wait for its turn, by the rate measured so far; 0 before the first text."""
        return self._lane(num_bytes).wait_s()

    @property
    def num_texts(self) -> int:
        """Returns the number of texts that wait or are being tokenised."""
        return self._short.num_texts + self._long.num_texts

    def close(self) -> None:
        self._short.close()
        self._long.close()

    def _lane(self, num_bytes: int) -> _Lane:
        return self._short if num_bytes <= SHORT_BYTES else self._long


class _Lane:
    def __init__(self, num_threads: int, name: str, most_bytes: int) -> None:
        self._num_threads = num_threads
        self._most_bytes = most_bytes
        self._threads = DaemonThreads(num_threads, name)
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._num_running = 0
        self._running_bytes = 0
        self._bytes_per_s = 0.0
        """Bytes per second of one thread; 0 before the first text."""

    @property
    def num_texts(self) -> int:
        return len(self._waiting) + self._num_running

    def wait_s(self) -> float:
        num_bytes = self._running_bytes + sum(each for _, each in self._waiting)
        return num_bytes / (self._bytes_per_s * self._num_threads) if self._bytes_per_s else 0.0

    async def run(self, num_bytes: int, work: Callable[..., T], *arguments: Any) -> T:
        await self._turn(num_bytes)
        loop = asyncio.get_running_loop()
        running: Future[tuple[T, float]] = self._threads.submit(_timed, num_bytes, work, arguments)
        running.add_done_callback(lambda done: self._ended(loop, num_bytes, done))
        result, _ = await asyncio.wrap_future(running)
        return result

    def close(self) -> None:
        self._waiting.clear()  # nobody's turn comes any more
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, num_bytes: int) -> None:
        """Returns when a thread is free, which is then taken."""
        turn = asyncio.get_running_loop().create_future()
        place = (turn, num_bytes)
        self._waiting.append(place)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came just before it was cancelled
                self._free(num_bytes)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(place)
                self._next()
            raise

    def _next(self) -> None:
        while self._waiting and self._num_running < self._num_threads:
            turn, num_bytes = self._waiting[0]
            if self._num_running and self._running_bytes + num_bytes > self._most_bytes:
                return
            self._waiting.popleft()
            if not turn.done():
                self._num_running += 1
                self._running_bytes += num_bytes
                turn.set_result(None)

    def _free(self, num_bytes: int) -> None:
        self._num_running -= 1
        self._running_bytes -= num_bytes
        self._next()

    def _ended(self, loop: asyncio.AbstractEventLoop, num_bytes: int, done: Future[tuple[Any, float]]) -> None:
        """Reports a text's end to the event loop. Runs on the thread, or wherever the work was cancelled."""
        seconds = done.result()[1] if not done.cancelled() and done.exception() is None else 0.0
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(self._noted, num_bytes, seconds)

    def _noted(self, num_bytes: int, seconds: float) -> None:
        if seconds > 0:
            rate = num_bytes / seconds
            self._bytes_per_s += (rate - self._bytes_per_s) * (_WEIGHT if self._bytes_per_s else 1.0)
        self._free(num_bytes)


def _timed(num_bytes: int, work: Callable[..., T], arguments: tuple[Any, ...]) -> tuple[T, float]:
    started_s = perf_counter()
    result = work(*arguments)
    if num_bytes >= _TRIM_BYTES:
        trim()
    return result, perf_counter() - started_s
