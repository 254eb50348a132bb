"""Faults and cancellations at random for as long as one likes, over a cluster of real processes.

    python -m tests.soak --minutes 10        (make soak MINUTES=10)

In rounds: clients ask two routers; workers are killed, stopped, cut off and replaced, routers killed and started again;
then everyone stops, and nothing may be held.
Owns: the rounds, the counts and their table. Zero wrong tokens and zero leaked blocks, or it fails.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil

from services.core.errors import WorkerFailed
from services.rpc.status import from_call
from tests.support.equality import GreedyReference
from tests.support.models import tiny_model
from tests.support.proxy import Fault
from tests.support.real_cluster import RealCluster, real_cluster
from tests.support.streams import mixed_jobs

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ROUTERS = ("router-0", "router-1")
FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-blocks", "96", "--max-num-batched-tokens", "32")
NUM_CLIENTS = 6
ROUND_S = 20.0
CANCELLED = 0.25
"""Share of the requests."""
GROWTH_MB = 48.0
"""Of a process between two rounds' ends; caches fill and the allocator keeps what it has had."""
_MIB = 1 << 20


@dataclass(slots=True)
class Tally:
    num_rounds: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    num_retries: int = 0
    wrong: list[str] = field(default_factory=list)
    """Answers that are not what they should be."""
    leaked: list[str] = field(default_factory=list)
    """Rounds after which something was still held."""
    memory_mb: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """By service and pid, at the end of each round."""

    def grown(self) -> list[str]:
        """Processes whose memory is not flat."""
        spans = {who: samples[-1] - min(samples[:2]) for who, samples in self.memory_mb.items()}
        return [f"{name} (pid {pid}) by {mb:.0f} MB" for (name, pid), mb in spans.items() if mb > GROWTH_MB]

    def table(self, reference: GreedyReference) -> str:
        rows = [("rounds", self.num_rounds), *sorted(self.outcomes.items()), ("placed again", self.num_retries)]
        rows += [(f"fault: {name}", count) for name, count in sorted(self.faults.items())]
        rows += [("tokens equal", reference.num_compared), ("tokens nearly tied", reference.num_near_ties)]
        rows += [("answers with wrong tokens", len(self.wrong)), ("rounds with leaked blocks", len(self.leaked))]
        lines = [f"{name:<32}{value:>12}" for name, value in rows]
        for (name, pid), samples in sorted(self.memory_mb.items()):
            lines.append(f"{f'memory of {name} ({pid}), MB':<32}{samples[0]:>12.0f} -> {samples[-1]:.0f}")
        return "\n".join(lines)


class Soak:
    def __init__(self, cluster: RealCluster, reference: GreedyReference, rng: random.Random) -> None:
        self.tally = Tally()
        self._cluster = cluster
        self._reference = reference
        self._rng = rng
        self._num_deaths = dict.fromkeys(ROUTERS, 0)
        """Of each router; odd while it is not back."""

    async def round(self, duration_s: float) -> None:
        """Runs load and faults, then counts what is still held 5 s after their end."""
        until_s = time.monotonic() + duration_s
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._client(until_s))
            group.create_task(self._misfortune(until_s))
        await self._cluster.whole()
        try:
            await self._cluster.idle()
        except AssertionError as error:
            self.tally.leaked.append(str(error))
        self.tally.num_rounds += 1
        for name, service in self._cluster.services.items():
            memory_mb = psutil.Process(service.pid).memory_info().rss / _MIB
            self.tally.memory_mb.setdefault((name, service.pid), []).append(memory_mb)

    async def _client(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            self.tally.outcomes[await self._ask()] += 1

    async def _ask(self) -> str:
        [job] = mixed_jobs(self._rng, 1, range(1, 500), range(1, 80))
        number = self._rng.randrange(len(ROUTERS))
        deaths = self._num_deaths[ROUTERS[number]]
        task = asyncio.create_task(self._cluster.routers[number].stream(job.request()))
        if self._rng.random() < CANCELLED:
            await asyncio.wait([task], timeout=self._rng.random())
            task.cancel()
        try:
            answer = await task
        except asyncio.CancelledError:
            return "requests cancelled"
        except grpc.aio.AioRpcError as error:
            # Three faults may well meet in one request, and a router's requests end with it; all else is a failure.
            if isinstance(from_call(error), WorkerFailed):
                return "requests given up after 3 crashes"
            lived = deaths % 2 == 0 and deaths == self._num_deaths[ROUTERS[number]]
            if error.code() is grpc.StatusCode.UNAVAILABLE and not lived:
                return "requests lost with their router"
            raise
        assert answer.completion is not None
        self.tally.num_retries += answer.completion.workers.retries
        try:
            job.check(self._reference, answer)
        except AssertionError as error:
            self.tally.wrong.append(f"{job}: {error}")
        return "requests finished"

    async def _misfortune(self, until_s: float) -> None:
        """Makes one fault after another, with a pause that lets most requests make some progress."""
        kinds: list[Callable[[str], Awaitable[str]]] = [
            self._kill,
            self._stop,
            self._cut,
            self._cut_pair,
            self._replace,
            self._kill_router,
        ]
        while time.monotonic() < until_s - 3:
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))
            self.tally.faults[await self._rng.choice(kinds)(self._rng.choice(WORKERS))] += 1

    async def _kill(self, worker: str) -> str:
        await self._cluster.restart(worker)
        return "kill -9"

    async def _kill_router(self, _: str) -> str:
        router = self._rng.choice(ROUTERS)
        self._num_deaths[router] += 1
        await self._cluster.restart(router)
        await self._cluster.routers[ROUTERS.index(router)].is_reached()
        self._num_deaths[router] += 1
        return "kill -9 of a router"

    async def _replace(self, worker: str) -> str:
        self._cluster.watch()
        await self._cluster[worker].terminate()
        await self._cluster[worker].start()
        return "SIGTERM"

    async def _stop(self, worker: str) -> str:
        with self._cluster[worker].stopped():
            await asyncio.sleep(self._rng.uniform(0.2, 4.0))
        return "SIGSTOP"

    async def _cut(self, worker: str) -> str:
        fault = self._rng.choice(list(Fault))
        with self._cluster.cut(fault, worker, self._rng.choice((ROUTERS, ROUTERS[:1]))):
            await asyncio.sleep(self._rng.uniform(0.2, 4.0))
        return f"{fault.value} router to worker"

    async def _cut_pair(self, worker: str) -> str:
        fault, source = self._rng.choice(list(Fault)), worker.replace("decode", "prefill")
        with self._cluster.cut(fault, source, ["decode-0", "decode-1"]):
            await asyncio.sleep(self._rng.uniform(0.2, 6.0))
        return f"{fault.value} decode to prefill"


async def soak(
    folder: Path, duration_s: float, *, seed: int, round_s: float = ROUND_S
) -> tuple[Tally, GreedyReference]:
    """Runs rounds of load under faults, at least one. `folder` is an empty one. Raises what a request fails with that
    no fault excuses."""
    model, temp = await asyncio.to_thread(_prepare, folder)
    reference = GreedyReference(model)
    async with real_cluster(model, temp, WORKERS, *FLAGS, routers=[()] * len(ROUTERS)) as cluster:
        run = Soak(cluster, reference, random.Random(seed))
        until_s = time.monotonic() + duration_s
        while not run.tally.num_rounds or time.monotonic() < until_s:
            await run.round(round_s)
            print(f"round {run.tally.num_rounds}: {dict(run.tally.outcomes)}", file=sys.stderr, flush=True)
    return run.tally, reference


def _prepare(folder: Path) -> tuple[Path, Path]:
    temp = folder / "temp"
    temp.mkdir()
    return tiny_model("llama", folder, num_hidden_layers=12), temp


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed} (of the requests and faults; their timing is the machine's)")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-soak-")))
        tally, reference = asyncio.run(soak(folder, arguments.minutes * 60, seed=arguments.seed))
    print(tally.table(reference))
    failures = [*tally.wrong, *tally.leaked, *(f"memory has grown: {words}" for words in tally.grown())]
    for words in failures:
        print(f"FAILED: {words}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
