"""Runs a router that says what kept its event loop waiting.

`python -m tests.support.watched_router NOTES MUTANT router FLAGS…`

A loop that comes too late has worked itself, or waited for the interpreter lock, or had no processor. The first two are
the router's own doing and the third is the machine's, and on Linux the kernel keeps them apart for each thread: what it
ran, and what it waited for a processor. So the router's own part can be told on a busy machine too.

NOTES is appended to: a `Look` per line. MUTANT is `none`, or how long texts are tokenised worse than they should be.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TextIO

import services.router.main as router_main
from services.cli.main import main
from services.router.conductor import Conductor
from services.router.text.tokenisation import ModelText, too_long
from services.router.text.tokeniser_line import TokeniserLine
from services.router.workers.sessions import WorkerLink

PERIOD_S = 0.002
_WORTH_NOTING_S = 0.002
_LOST = "lost"


@dataclass(frozen=True)
class Look:
    """Describes the time from one look of the event loop at the clock to the next, in seconds."""

    ended_s: float
    """By the system's monotonic clock, which all processes share."""
    wall_s: float
    ran_s: float
    """The loop's thread, on a processor."""
    no_processor_s: float
    """It could have run."""
    others_ran_s: float
    """All other threads of the process together."""

    @property
    def own_s(self) -> float:
        """Returns how long the router itself kept the loop waiting, in seconds. Waiting for the lock counts as far as
        another thread of the process ran meanwhile: a thread that has the lock but no processor is the machine's doing.
        """
        waited_s = max(0.0, self.wall_s - PERIOD_S - self.ran_s - self.no_processor_s)
        return self.ran_s + min(waited_s, self.others_ran_s)


class Notes:
    """Keeps what the router has noted so far."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def longest_own_s(self, begin_s: float, end_s: float) -> float:
        return max((look.own_s for look in self._looks() if begin_s <= look.ended_s <= end_s), default=0.0)

    def lost(self) -> list[str]:
        """Returns the workers whose sessions were lost, and why."""
        return [line for line in self._lines() if line.startswith(_LOST)]

    def _looks(self) -> Iterator[Look]:
        for line in self._lines():
            if not line.startswith(_LOST):
                yield Look(*map(float, line.split()))

    def _lines(self) -> list[str]:
        text = self.path.read_text() if self.path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()


async def _watch(notes: TextIO) -> None:
    descriptor = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    try:
        before = _clocks(descriptor)
        while True:
            await asyncio.sleep(PERIOD_S)
            after = _clocks(descriptor)
            wall_s, ran_s, no_processor_s, process_s = (new - old for new, old in zip(after, before, strict=True))
            if wall_s > PERIOD_S + _WORTH_NOTING_S:
                look = Look(after[0], wall_s, ran_s, no_processor_s, process_s - ran_s)
                notes.write(" ".join(map(str, astuple(look))) + "\n")
            before = after
    finally:
        os.close(descriptor)


def _clocks(descriptor: int) -> tuple[float, float, float, float]:
    ran_ns, no_processor_ns, _ = map(int, os.pread(descriptor, 128, 0).split())
    return time.monotonic(), ran_ns * 1e-9, no_processor_ns * 1e-9, time.process_time()


def _install(notes: TextIO) -> None:
    class WatchedRouter(router_main.Router):
        async def start(self) -> None:
            await super().start()
            self._tasks.append(asyncio.create_task(_watch(notes), name="watch"))

    link_lost = Conductor.link_lost

    def noted(self: Conductor, link: WorkerLink, reason: str, *, crashed: bool) -> None:
        notes.write(f"{_LOST} {link.info.worker_id}: {reason}\n")
        link_lost(self, link, reason, crashed=crashed)

    router_main.Router = WatchedRouter  # type: ignore[misc]
    Conductor.link_lost = noted  # type: ignore[method-assign]


def _holds_the_lock() -> None:
    """Encodes on its thread, but so that nobody else runs meanwhile."""

    def encode(self: ModelText, text: str, most_tokens: int | None, *, special: bool) -> list[int]:
        encoding = self.tokenizer.encode(text, add_special_tokens=special)
        if most_tokens is not None and len(encoding) > most_tokens:
            raise too_long(len(encoding), most_tokens)
        return list(encoding.ids)

    ModelText._encode = encode  # type: ignore[method-assign]


def _on_the_loop() -> None:
    async def run(self: TokeniserLine, num_bytes: int, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    TokeniserLine.run = run  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "holds-the-lock": _holds_the_lock,
    "on-the-loop": _on_the_loop,
}


if __name__ == "__main__":
    path, mutant = sys.argv[1:3]
    MUTANTS[mutant]()
    with open(path, "a", buffering=1) as notes:
        _install(notes)
        status = main(sys.argv[3:])
    sys.exit(status)
