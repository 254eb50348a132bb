"""Measures the engine alone, on this process's threads: no network, no handoff."""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.figure import Figure, Findings, Series, ratio
from benchmarks.precision import Precision
from benchmarks.works import WorkSettings, works
from services.engine.config import EngineConfig, StepReport
from services.engine.engine import Engine
from services.engine.loading import torch_engine
from services.engine.schedule.constraint import TokenConstraint
from services.engine.schedule.sequence import SamplingParams, Sequence, StoppingParams, Token
from services.engine.worker_engine import OnStep

_GREEDY = SamplingParams(temperature=0.0)
_BLOCKS = 2048
"""Of 16 tokens."""
_BATCHES, _CONTEXTS = (1, 4, 16, 64), (128, 512, 2048)
_MOST_TOKENS = 16_384
"""Of all sequences of one point of the step times: more would take minutes to prefill."""
_STEPS = 16


class Load:
    """Runs sequences to their ends and counts tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._random = random.Random(0)
        self._next_id = 0
        self._left = 0
        self._over = threading.Event()
        self.token_times_s: list[float] = []
        self.decode_steps_ms: dict[int, list[float]] = {}
        """Of the last run: milliseconds of each step that only decoded, by the number of its sequences."""
        self.also: OnStep | None = None
        """What is called with each step's report as well."""
        engine.start(self._on_step)

    def run(
        self,
        count: int,
        num_prompt_tokens: int,
        max_tokens: int,
        sampling: SamplingParams = _GREEDY,
        constraints: Iterable[TokenConstraint] = (),
    ) -> float:
        """Returns the seconds for `count` sequences at once, with prompts that share nothing. The first ones have the
        constraints, as many as there are."""
        self._left, self.token_times_s, self.decode_steps_ms = count, [], {}
        self._over.clear()
        each, started = iter(constraints), time.perf_counter()
        for _ in range(count):
            self._next_id += 1
            prompt = self._random.choices(range(100, self.engine.info.vocab_size), k=num_prompt_tokens)
            stopping = StoppingParams(max_tokens=max_tokens)
            now = time.monotonic()
            constraint = next(each, None)
            self.engine.add(
                Sequence(self._next_id, prompt, num_prompt_tokens, sampling, stopping, now, constraint=constraint)
            )
        self._over.wait()
        return time.perf_counter() - started

    def _on_step(self, report: StepReport) -> None:
        if report.step_number and report.num_tokens == report.num_decodes:
            steps = self.decode_steps_ms.setdefault(report.num_decodes, [])
            steps.append((report.ended_s - report.started_s) * 1e3)
        if self.also is not None:
            self.also(report)
        for event in report.events:
            if isinstance(event, Token):
                self.token_times_s.append(event.now)
                self._left -= event.finish is not None
        if not self._left:
            self._over.set()


@contextlib.contextmanager
def running(model: Path, precision: Precision, threads: int, max_num_batched_tokens: int = 2048) -> Iterator[Load]:
    """Yields an engine that is loaded and idle, and stops it at the end."""
    config = EngineConfig(
        str(model),
        model.name,
        num_blocks=_BLOCKS,
        threads=threads,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=precision.dtype,
        quantization=precision.quantization,
        kv_dtype=precision.kv_dtype,
    )
    engine = torch_engine(config)
    try:
        yield Load(engine)
    finally:
        engine.stop()
        engine.cache.close()


def measure(model: Path, precision: Precision, threads: int, repeats: int, settings: WorkSettings) -> Findings:
    """Runs the works of `benchmarks/works.py`, a round of all of them at a time; then times decode steps."""
    each = works(settings.batch)
    with running(model, precision, threads) as load:
        load.run(4, 256, 8)
        rounds = [[work.measure(load.run) for work in each] for _ in range(repeats)]
        single, prefill, batch = (tuple(samples) for samples in zip(*rounds, strict=True))
        found: Findings = [
            Figure(f"engine: {each[0].name}", each[0].unit, single),
            Figure(f"engine: {each[1].name}", each[1].unit, prefill),
            Figure(f"engine: {each[2].name}", each[2].unit, batch),
            ratio("  batch over single stream", batch, single),
            ratio(
                "  a prompt's token over a single stream's", [each / 2048 for each in prefill], [1 / s for s in single]
            ),
        ]
        return [*found, *(_step_times(load) if settings.step_times else [])]


def _step_times(load: Load) -> Findings:
    """Measures the median time of steps that only decode, over the sequences in them and the tokens before each."""
    medians: dict[tuple[int, int], float] = {}
    for context in _CONTEXTS:
        for batch in _BATCHES:
            if batch * context <= _MOST_TOKENS:
                load.run(batch, context, 1 + _STEPS)
                medians[batch, context] = statistics.median(load.decode_steps_ms[batch])
    found: Findings = [
        Figure(f"  decode step, {batch} sequences at {context} tokens", "ms", (median,))
        for (batch, context), median in medians.items()
    ]
    for context in _CONTEXTS:
        points = tuple((float(batch), median) for (batch, at), median in medians.items() if at == context)
        found.append(Series("step_batch", f"{context} tokens of context", points))
    for batch in _BATCHES:
        points = tuple((float(context), median) for (of, context), median in medians.items() if of == batch)
        if len(points) > 1:
            found.append(Series("step_context", f"{batch} sequences", points))
    return found
