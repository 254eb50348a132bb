"""Measures decode steps beside handoffs that arrive in the same process, by each transport: what running answers pay
for the transfer of another's KV."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import uvloop

from benchmarks import engine
from benchmarks.figure import Figure, Findings, ratio
from benchmarks.precision import Precision
from benchmarks.transfer import CHECKED, SMOLLM2, Destination
from benchmarks.transfer_source import RemoteSource, new_pool
from services.engine.config import StepReport

_SEQUENCES, _CONTEXT, _OUTPUT = 8, 256, 96
_TOKENS = 2048
_EVERY_S = 0.5
"""Seconds from the end of one handoff to the next: about as a prefill worker on such a machine sends them."""
_ALONE = ""
_TARGET = "≤ 1.03"

_Times = list[tuple[float, float]]
"""When each of some things began and ended, in seconds."""


def measure(model: Path, precision: Precision, threads: int, repeats: int) -> Findings:
    """The steps are computed on half of the threads, since both ends of the transfers need the machine too."""
    with (
        engine.running(model, precision, max(1, threads // 2)) as load,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(load, repeats))


async def _measure(load: engine.Load, repeats: int) -> Findings:
    num_blocks = SMOLLM2.num_blocks(_TOKENS)
    pool = new_pool(SMOLLM2, num_blocks)
    async with RemoteSource(SMOLLM2, num_blocks) as source:
        destination = Destination(SMOLLM2, pool, source)
        names = [_ALONE, *(name for name in destination.transports if name.endswith(CHECKED))]
        every: dict[str, list[float]] = {name: [] for name in names}
        meeting: dict[str, list[float]] = {name: [] for name in names}
        for number in range(repeats + 1):
            for name in names:
                steps, handoffs = await _run(load, destination, name)
                if number:
                    every[name].append(_mean_ms(steps))
                    meeting[name].append(_mean_ms([step for step in steps if _meets(step, handoffs)] or steps))
        await destination.close()
    pool.close()
    found: Findings = [Figure(f"transfer: a decode step, {_SEQUENCES} sequences", "ms", tuple(every[_ALONE]))]
    for name in names[1:]:
        short = name.removesuffix(CHECKED)
        found.append(ratio(f"  that meets a handoff by {short}, of it", meeting[name], every[_ALONE], _TARGET))
        found.append(ratio(f"  while one comes by {short} every {_EVERY_S:g} s, of it", every[name], every[_ALONE]))
    return found


async def _run(load: engine.Load, destination: Destination, transport: str) -> tuple[_Times, _Times]:
    """Decodes, beside handoffs by a transport if one is named. Returns the steps that only decode, and the handoffs."""
    steps: _Times = []
    handoffs: _Times = []

    def note(report: StepReport) -> None:
        if report.num_tokens == report.num_decodes == _SEQUENCES:
            steps.append((report.started_s, report.ended_s))

    load.also = note
    running = asyncio.create_task(asyncio.to_thread(load.run, _SEQUENCES, _CONTEXT, _OUTPUT))
    while transport and not running.done():
        await destination.prepare()
        began_s = time.monotonic()
        await destination.hand_over(transport)
        handoffs.append((began_s, time.monotonic()))
        await asyncio.wait([running], timeout=_EVERY_S)
    await running
    return steps, handoffs


def _mean_ms(times: _Times) -> float:
    return statistics.mean(ended_s - began_s for began_s, ended_s in times) * 1e3


def _meets(step: tuple[float, float], handoffs: _Times) -> bool:
    return any(began_s < step[1] and step[0] < ended_s for began_s, ended_s in handoffs)
