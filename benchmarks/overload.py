"""Asks more of a cluster than it can do: measures goodput at one, two and three times its capacity, over one real
`baton up`.

Capacity is what a closed loop of clients without deadlines gets. Then requests arrive at random (Poisson) at multiples
of it, each with a deadline. Goodput counts the output tokens of requests that were complete by their deadlines.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
import psutil

from baton.v1 import inference_pb2, inference_pb2_grpc
from benchmarks.cluster import cluster, make_request
from benchmarks.figure import Figure
from benchmarks.precision import Precision

_PROMPT_TOKENS, _OUTPUT_TOKENS = 96, 24
_CLIENTS = 24
_PHASE_S = 20.0
_DEADLINE_S = 8.0
_MULTIPLES = (1, 2, 3)


@dataclass
class Phase:
    """Counts what came of the requests of one phase."""

    good_tokens: int = 0
    late: int = 0
    refused_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def goodput(self) -> float:
        """Returns the output tokens a second of the requests that ended in time."""
        return self.good_tokens / self.seconds


def measure(model: str, precision: Precision, repeats: int) -> list[Figure]:
    with cluster(model, precision) as up:
        status = up.status()
        processes = {"router": psutil.Process(status.router_pid)}
        processes |= {entry.worker.worker_id: psutil.Process(entry.worker.pid) for entry in status.workers}
        return asyncio.run(_measure(up.address, processes, repeats))


async def _measure(address: str, processes: Mapping[str, psutil.Process], repeats: int) -> list[Figure]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        chance = random.Random(0)
        await _closed_loop(stub, chance, 5.0)  # costs are learnt from work
        peaks: list[float] = []
        phases: dict[int, list[Phase]] = {multiple: [] for multiple in _MULTIPLES}
        before = {name: _private_bytes(process) for name, process in processes.items()}
        for _ in range(repeats):
            peaks.append((await _closed_loop(stub, chance, _PHASE_S)).goodput)
            for multiple in _MULTIPLES:
                rate = multiple * statistics.median(peaks) / _OUTPUT_TOKENS
                phases[multiple].append(await _open_loop(stub, chance, rate))
        grown = {name: _private_bytes(process) - before[name] for name, process in processes.items()}
    return [
        Figure("overload: capacity (closed loop)", "tok/s", tuple(peaks)),
        *_figures(phases, peaks),
        *(Figure(f"  memory of {name} grew by", "MB", (num_bytes / 1e6,)) for name, num_bytes in grown.items()),
    ]


def _private_bytes(process: psutil.Process) -> int:
    """Returns the resident bytes without the pools, which are shared memory."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def _figures(phases: dict[int, list[Phase]], peaks: list[float]) -> list[Figure]:
    figures = []
    for multiple, some in phases.items():
        share = tuple(100 * phase.goodput / peak for phase, peak in zip(some, peaks, strict=True))
        figures.append(Figure(f"  goodput at {multiple} x, of capacity", "%", share, ">= 90" if multiple == 3 else ""))
        figures.append(Figure(f"  late at {multiple} x", "requests", tuple(float(phase.late) for phase in some), "0"))
        refused = [milliseconds for phase in some for milliseconds in phase.refused_ms]
        if refused:
            refused.sort()
            what = f"  {len(refused)} refused at {multiple} x, p99 of the time it took"
            figures.append(Figure(what, "ms", (refused[int(0.99 * (len(refused) - 1))],)))
    return figures


async def _closed_loop(stub: inference_pb2_grpc.InferenceServiceStub, chance: random.Random, seconds: float) -> Phase:
    phase = Phase()
    started = time.monotonic()

    async def client() -> None:
        while time.monotonic() - started < seconds:
            await stub.Generate(_request(chance))
            if time.monotonic() - started < seconds:
                phase.good_tokens += _OUTPUT_TOKENS

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    phase.seconds = seconds
    return phase


async def _open_loop(stub: inference_pb2_grpc.InferenceServiceStub, chance: random.Random, rate: float) -> Phase:
    """Sends arrivals for a phase. Seconds count from the first arrival to the last end: what is begun is part of the
    bill."""
    phase = Phase()
    started = time.monotonic()

    async def ask() -> None:
        asked = time.monotonic()
        try:
            await stub.Generate(_request(chance), timeout=_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                phase.refused_ms.append((time.monotonic() - asked) * 1000)
            elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                phase.late += 1
            else:
                raise
        else:
            phase.good_tokens += _OUTPUT_TOKENS

    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() - started < _PHASE_S:
            tasks.create_task(ask())
            await asyncio.sleep(chance.expovariate(rate))
    phase.seconds = time.monotonic() - started
    return phase


def _request(chance: random.Random) -> inference_pb2.GenerateRequest:
    return make_request(chance.random(), _PROMPT_TOKENS, _OUTPUT_TOKENS)
