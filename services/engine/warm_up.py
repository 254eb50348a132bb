"""Runs a loaded model a few times before it serves, because first uses are slow and the costs of steps must be known.

It also defines what a loader returns: `Loaded`, with the protocols of its parts. Never: torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.hashing import num_blocks_for
from services.core.start_progress import StartProgress, TellProgress, tell_nobody
from services.engine.config import EngineConfig, EngineInfo
from services.engine.cost_model import CostModel
from services.engine.schedule.sequence import SampleRow, SamplingParams, ScheduledSequence, StepPlan, StepResult
from services.kv.regions import BlockMemory

_FEWEST_WARM_TOKENS, _WARM_GROWTH = 16, 4
"""Tokens of the first prefill that is measured, and how many times as many the next one has."""
_LONG_MS = 500.0
"""Milliseconds that a prefill takes if no longer one is to be measured."""
WARM_DECODES = 3
"""Decode steps that are measured for each setting."""
_WARM_SEQUENCES = 8
"""Sequences in the larger of the two decode steps that are measured."""


class Runner(Protocol):
    """Runs step plans on a device."""

    def run(self, plan: StepPlan) -> StepResult:
        """Runs a step and returns its result when it is complete on the device, so that its KV may be announced. It may
        raise any exception."""
        ...

    def reclaim(self) -> None:
        """Cleans up after a failed step, so that its blocks may be freed and a smaller step may fit.

        It waits until the device does no more work of that step, and gives back the memory that the allocator keeps.
        It raises if the device is lost. It is unknown then what still writes to the pool, so no step may follow.
        """
        ...

    def tune(self, decode: Callable[[], float]) -> None:
        """Chooses settings by measurement. `decode()` runs a step of one token and returns its milliseconds."""
        ...

    def device_memory(self) -> dict[str, int]:
        """Returns bytes of accelerator memory by kind (see `WorkerEngine.device_memory`)."""
        ...


class PoolMemory(BlockMemory, Protocol):
    """Gives access to the bytes of a pool's blocks, and lets the engine, which owns them, free them."""

    def close(self) -> None:
        """Frees the memory. Nothing may read or write it afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """Keeps a model that was loaded and checked, with the memory of its pool."""

    info: EngineInfo
    cache: PoolMemory
    runner: Runner
    touch: Callable[[int], bool] | None = None
    """Makes memory ready for the blocks after the first ones, whose number it is given, a little at each call, and
    returns whether there is more to do. Called on the step thread while no step runs."""


def warm_up(loaded: Loaded, config: EngineConfig, costs: CostModel, tell: TellProgress = tell_nobody) -> None:
    """Runs a few prefill and decode steps on a pool that nobody uses yet, and adds their durations to `costs`. `tell`
    hears of each.

    The KV that it leaves in the blocks belongs to no sequence and is never read. It raises what the runner raises.
    """
    info = loaded.info
    num_tokens = min(config.max_num_batched_tokens, info.max_model_len - 1, info.num_blocks * info.block_size - 1)
    blocks = tuple(range(num_blocks_for(num_tokens + 1, info.block_size)))
    greedy = SampleRow(0, SamplingParams(temperature=0.0))

    def run(start: int, count: int, num_sequences: int = 1) -> float:
        part = ScheduledSequence(0, start, (0,) * count, blocks, (greedy,), is_decode=count == 1)
        started = time.perf_counter()
        loaded.runner.run(StepPlan(0, (part,) * num_sequences))
        return (time.perf_counter() - started) * 1e3

    sizes = _sizes(num_tokens)
    num_parts = len(sizes) + 1 + WARM_DECODES

    def tell_part(part: str, done: int) -> None:
        tell(StartProgress("warm-up", part, done, num_parts))

    def prefill(count: int) -> float:
        tell_part(f"prefill of {count} tokens", sizes.index(count))
        return run(0, count)

    measured = _prefill_ms(prefill, sizes)
    for num_tokens, prefill_ms in measured:
        costs.calibrate(num_tokens, 0, prefill_ms)
    tell_part("settings", len(sizes))
    loaded.runner.tune(lambda: run(num_tokens, 1))
    for index in range(WARM_DECODES):
        tell_part("decode steps", len(sizes) + 1 + index)
        for num_sequences in (1, min(_WARM_SEQUENCES, config.max_num_seqs)):
            costs.calibrate(0, num_sequences, run(num_tokens, 1, num_sequences))


def _sizes(most: int) -> list[int]:
    """Returns the tokens of the prefills that are measured, each more than the one before, the last `most`."""
    sizes = [min(_FEWEST_WARM_TOKENS, most)]
    while sizes[-1] < most:
        sizes.append(min(_WARM_GROWTH * sizes[-1], most))
    return sizes


def _prefill_ms(run: Callable[[int], float], sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Returns (tokens, milliseconds) of the steps that count, the largest last.

    The first step of a size is slow, so a second one counts. No other follows a step that takes `_LONG_MS`, so that a
    worker starts in seconds even where the largest takes half a minute.
    """
    measured = list[tuple[int, float]]()
    for count in sizes:
        if (ms := run(count)) >= _LONG_MS:
            return [*measured, (count, ms)]
        measured.append((count, run(count)))
    return measured
