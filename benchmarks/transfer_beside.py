"""Measures decode steps beside handoffs that arrive in the same process, by each transport: what running answers pay
for the transfer of another's KV; and beside the same bytes without Baton, since both ends share this machine's cores
and memory with the step."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import uvloop

from benchmarks import engine
from benchmarks.figure import Figure, Findings, ratio
from benchmarks.precision import Precision
from benchmarks.transfer import CHECKED, SMOLLM2, Destination
from benchmarks.transfer_bare import BARE
from benchmarks.transfer_source import RemoteSource, new_pool
from services.engine.config import StepReport

_SEQUENCES, _CONTEXT, _OUTPUT = 8, 256, 96
_TOKENS = 2048
_EVERY_S = 0.5
"""Seconds from the end of one handoff to the next: about as a prefill worker on such a machine sends them."""
_TARGET = "≤ 1.03"

_Move = Callable[[], Awaitable[object]]
"""Moves all blocks of the source's pool once."""

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
        handoffs = [name for name in destination.transports if name.endswith(CHECKED)]
        bares = {name: bare for name, make in BARE.items() if (bare := await make(source, pool)) is not None}
        moves: dict[str, _Move] = {
            "a handoff by " + name.removesuffix(CHECKED): partial(destination.hand_over, name) for name in handoffs
        }
        moves |= {f"the same bytes by {name}": bare.move for name, bare in bares.items()}
        apart_ms: dict[str, list[float]] = {name: [] for name in moves}
        meeting_ms: dict[str, list[float]] = {name: [] for name in moves}
        for number in range(repeats + 1):
            for name, move in moves.items():
                steps, moved = await _run(load, destination.prepare, move)
                if number:
                    apart_ms[name].append(_mean_ms([step for step in steps if not _meets(step, moved)]))
                    meeting_ms[name].append(_mean_ms([step for step in steps if _meets(step, moved)]))
        for bare in bares.values():
            await bare.close()
        await destination.close()
    pool.close()
    alone = [statistics.median(of_round) for of_round in zip(*apart_ms.values(), strict=True)]
    found: Findings = [Figure(f"transfer: a decode step, {_SEQUENCES} sequences", "ms", tuple(alone))]
    for name in moves:
        target = "" if name.endswith(tuple(bares)) else _TARGET
        found.append(ratio(f"  that meets {name}, of the others beside it", meeting_ms[name], apart_ms[name], target))
    return found


async def _run(load: engine.Load, prepare: _Move, move: _Move) -> tuple[_Times, _Times]:
    """Decodes, beside blocks that are moved again and again. Returns when the steps that only decode ran, and when
    blocks were moved."""
    steps: _Times = []
    moved: _Times = []

    def note(report: StepReport) -> None:
        if report.num_tokens == report.num_decodes == _SEQUENCES:
            steps.append((report.started_s, report.ended_s))

    load.also = note
    running = asyncio.create_task(asyncio.to_thread(load.run, _SEQUENCES, _CONTEXT, _OUTPUT))
    while not running.done():
        await prepare()
        began_s = time.monotonic()
        await move()
        moved.append((began_s, time.monotonic()))
        await asyncio.wait([running], timeout=_EVERY_S)
    await running
    return steps, moved


def _mean_ms(times: _Times) -> float:
    return statistics.mean(ended_s - began_s for began_s, ended_s in times) * 1e3


def _meets(step: tuple[float, float], moved: _Times) -> bool:
    return any(began_s < step[1] and step[0] < ended_s for began_s, ended_s in moved)
