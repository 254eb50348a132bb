"""The engine alone, on this process's threads: no network, no handoff."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figure import Figure
from services.engine.config import EngineConfig, StepReport
from services.engine.engine import Engine
from services.engine.loading import torch_engine
from services.engine.schedule.sequence import SamplingParams, Sequence, StoppingParams, Token

_GREEDY = SamplingParams(temperature=0.0)


class Load:
    """Runs sequences to their ends and counts tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._random = random.Random(0)
        self._next_id = 0
        self._left = 0
        self._over = threading.Event()
        self.token_times_s: list[float] = []
        engine.start(self._on_step)

    def run(self, count: int, num_prompt_tokens: int, max_tokens: int) -> float:
        """Seconds for `count` sequences at once, with prompts that share nothing."""
        self._left, self.token_times_s = count, []
        self._over.clear()
        started = time.perf_counter()
        for _ in range(count):
            self._next_id += 1
            prompt = self._random.choices(range(100, self.engine.info.vocab_size), k=num_prompt_tokens)
            stopping = StoppingParams(max_tokens=max_tokens)
            now = time.monotonic()
            self.engine.add(Sequence(self._next_id, prompt, num_prompt_tokens, _GREEDY, stopping, now))
        self._over.wait()
        return time.perf_counter() - started

    def _on_step(self, report: StepReport) -> None:
        for event in report.events:
            if isinstance(event, Token):
                self.token_times_s.append(event.now)
                self._left -= event.finish is not None
        if not self._left:
            self._over.set()


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One round, on an engine that has nothing else to do."""

    single_stream_tok_s: float
    """Decoding 64 tokens after 16."""
    prefill_s: float
    """2048 tokens."""
    batch_tok_s: float
    """64 sequences at once, 256 tokens in and 64 out: output tokens over the whole time."""


@contextlib.contextmanager
def engine_rounds(model: Path, threads: int) -> Iterator[Callable[[], EngineFigures]]:
    """Each call measures one round."""
    config = EngineConfig(
        str(model), model.name, dtype="bfloat16", num_blocks=2048, threads=threads, max_num_batched_tokens=2048
    )
    engine = torch_engine(config)
    load = Load(engine)

    def measure_once() -> EngineFigures:
        load.run(1, 16, 65)
        times = load.token_times_s
        single = (len(times) - 1) / (times[-1] - times[0])
        return EngineFigures(single, load.run(1, 2048, 1), 64 * 64 / load.run(64, 256, 64))

    try:
        yield measure_once
    finally:
        engine.stop()
        engine.cache.close()


def measure(model: Path, threads: int, repeats: int) -> list[Figure]:
    with engine_rounds(model, threads) as measure_once:
        rounds = [measure_once() for _ in range(repeats)]
    where = "2-core AMX machine"
    single = tuple(each.single_stream_tok_s for each in rounds)
    prefill, batch = tuple(each.prefill_s for each in rounds), tuple(each.batch_tok_s for each in rounds)
    return [
        Figure("engine: single-stream decode", "tok/s", single, f">= 25 on a {where}"),
        Figure("engine: prefill of 2048 tokens", "s", prefill, f"<= 1.2 on a {where}"),
        Figure("engine: 64 x (256 in, 64 out)", "tok/s", batch, f">= 300 on a {where}"),
    ]
