"""Keeps virtual time and the order in which everything happens.

Owns: the clock, the one random stream of a seed, the timed events, and the choice which actor runs next. An actor runs
its own work in order; between actors (event loops and threads of different processes, or of one) any order is possible
and the seed picks one. Same seed, same run: `digest` shows it. Never: what a node does.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Work = Callable[[], object]

_MOST_TURNS = 100_000
"""Of one run: more is a livelock."""


class Violation(AssertionError):
    """An invariant does not hold. The first one ends the run."""


class Machine(Protocol):
    """The process an actor belongs to."""

    name: str
    frozen: bool
    """Stopped as by SIGSTOP: nothing of it runs."""
    alive: bool


class Actor:
    """Runs work one piece at a time: it is a node's event loop, or one of its threads."""

    __slots__ = ("_world", "busy", "enlisted", "held_up_s", "machine", "ready")

    def __init__(self, world: World, machine: Machine) -> None:
        self._world = world
        self.machine = machine
        self.ready: deque[Work] = deque()
        self.enlisted = False
        self.busy = False
        """What it does takes its time, and nothing else gets its turn."""
        self.held_up_s = 0.0
        """By such work, in all."""

    def keep_busy(self, duration_s: float) -> None:
        self.busy = True
        self.held_up_s += duration_s
        self._world.after(duration_s, self._free)

    def _free(self) -> None:
        self.busy = False
        self.enlist()

    @property
    def can_run(self) -> bool:
        return bool(self.ready) and not self.busy and not self.machine.frozen and self.machine.alive

    def post(self, work: Work) -> None:
        self.ready.append(work)
        self.enlist()

    def enlist(self) -> None:
        if not self.enlisted and self.can_run:
            self.enlisted = True
            self._world.runnable.append(self)


class World:
    def __init__(self, seed: int, *, on_note: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.runnable: list[Actor] = []
        self.failure: BaseException | None = None
        self.num_turns = 0
        self.after_turn: Callable[[Machine], None] = lambda machine: None
        self.tell = on_note or (lambda line: None)
        """Prints, if anyone reads."""
        self._events: list[tuple[float, int, Work]] = []
        self._num_events = 0
        self._digest = 0

    @property
    def digest(self) -> int:
        """Returns a digest of everything noted, and of every random choice made."""
        return zlib.crc32(repr((self.now_s, self.num_turns, self.random.random())).encode(), self._digest)

    def note(self, what: str, *details: Any) -> None:
        """Writes one line of the trace."""
        line = f"{self.now_s:.6f} {what} {details}"
        self._digest = zlib.crc32(line.encode(), self._digest)
        self.tell(line)

    def require(self, condition: object, what: str) -> None:
        if not condition:
            self.fail(Violation(f"at {self.now_s:.6f} s: {what}"))
            assert self.failure is not None
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """Ends the run with this error, also if whoever raised it swallows it."""
        if self.failure is None:
            self.failure = error

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def at(self, when_s: float, work: Work) -> None:
        """Does something to the world at that time: a packet arrives, a fault begins, a timer rings."""
        self._num_events += 1
        heapq.heappush(self._events, (max(when_s, self.now_s), self._num_events, work))

    def after(self, delay_s: float, work: Work) -> None:
        self.at(self.now_s + delay_s, work)

    def run(self, done: Callable[[], bool], until_s: float) -> bool:
        """Runs until `done`, False if it never is: nothing is left to happen, or the time is over."""
        while not done():
            if self.failure is not None:
                raise self.failure
            if self.runnable:
                self._turn()
            elif self._events and self._events[0][0] <= until_s:
                self.now_s, _, work = heapq.heappop(self._events)
                work()
            else:
                self.now_s = max(self.now_s, until_s)
                return False
        return True

    def _turn(self) -> None:
        """Runs one piece of work of one actor."""
        runnable = self.runnable
        at = int(self.random.random() * len(runnable)) if len(runnable) > 1 else 0
        actor = runnable[at]
        machine = actor.machine
        if actor.can_run:
            self.num_turns += 1
            self.require(self.num_turns < _MOST_TURNS, "it goes on and on")
            actor.ready.popleft()()
            self.after_turn(machine)
            if actor.can_run:
                return
        actor.enlisted = False
        runnable[at] = runnable[-1]
        runnable.pop()
