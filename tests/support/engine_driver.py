"""Runs an engine's step thread for tests: submit sequences, wait for their ends, look at what happened."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from services.engine.config import EngineConfig, StepReport
from services.engine.engine import Engine
from services.engine.loading import load
from services.engine.schedule.sequence import (
    Admitted,
    Failed,
    Finish,
    Mode,
    SampledToken,
    SamplingParams,
    Sequence,
    SequenceEvent,
    StoppingParams,
    Token,
)
from services.kv.pool import Holder

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Output:
    mode: Mode
    base: int
    block_ids: tuple[int, ...] = ()
    tokens: list[SampledToken] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class EngineDriver:
    """Runs a started engine for a block of code; at its end it asserts that the pool is idle."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reports: list[StepReport] = []
        self.outputs: dict[int, Output] = {}
        self.stopped = False
        """The test stopped the engine itself."""
        self._ids = itertools.count(1)

    def __enter__(self) -> Self:
        self.engine.start(self._on_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        alive = self.engine.alive
        self.engine.stop()
        if error is None:
            assert alive or self.stopped, "the step thread ended"
            self.engine.check_idle()
        self.engine.close()

    def submit(
        self,
        token_ids: Tokens[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        **fields: Any,
    ) -> int:
        """Returns the id to wait for. fields: others of `Sequence`."""
        sequence = self._sequence(token_ids, max_tokens, sampling, stop_token_ids, min_tokens, **fields)
        self.outputs[sequence.seq_id] = Output(sequence.mode, sequence.output_base)
        self.engine.add(sequence)
        return sequence.seq_id

    def adopt(self, token_ids: Tokens[int], block_ids: Tokens[int], first_token: int, max_tokens: int) -> int:
        """Goes on after KV and a token from elsewhere; the blocks are held as an import's. Returns the id to wait for.

        Its output is what comes after the first token.
        """
        sequence = self._sequence(token_ids, max_tokens)
        self.outputs[sequence.seq_id] = Output(sequence.mode, base=1)
        self.engine.adopt(sequence, (), block_ids, first_token, Holder.IMPORT)
        return sequence.seq_id

    def _sequence(
        self,
        token_ids: Tokens[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        **fields: Any,
    ) -> Sequence:
        seq_id = next(self._ids)
        return Sequence(
            seq_id=seq_id,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            stopping=StoppingParams(max_tokens, min_tokens, stop_token_ids),
            arrival_s=float(seq_id),
            **fields,
        )

    def wait(self, *seq_ids: int, timeout_s: float = 120.0) -> list[Output]:
        for seq_id in seq_ids:
            assert self.outputs[seq_id].over.wait(timeout_s), f"sequence {seq_id} did not end"
        return [self.outputs[seq_id] for seq_id in seq_ids]

    def generate(self, prompts: Tokens[Tokens[int]], max_tokens: int, **fields: Any) -> list[list[int]]:
        """Returns the outputs of all prompts, which run at once."""
        outputs = self.wait(*[self.submit(prompt, max_tokens, **fields) for prompt in prompts])
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [output.token_ids for output in outputs]

    def _on_step(self, report: StepReport) -> None:
        self.reports.append(report)
        for event in report.events:
            self._note(event)

    def _note(self, event: SequenceEvent) -> None:
        output = self.outputs[event.seq_id]
        if isinstance(event, Admitted):
            output.block_ids = event.block_ids
        elif isinstance(event, Token):
            assert event.position == output.base + len(output.tokens)
            output.tokens.append(event.token)
            output.finish = event.finish
            if event.finish is not None or output.mode is Mode.PREFILL_ONLY:
                output.over.set()
        elif isinstance(event, Failed):
            output.error = event.error
            output.over.set()


def drive(directory: Path, **config: Any) -> EngineDriver:
    """Returns a driver of an engine over a model directory: float32 and a pool of 256 blocks unless told otherwise."""
    fields = {"dtype": "float32", "num_blocks": 256, "max_num_batched_tokens": 64, "threads": 1, **config}
    engine_config = EngineConfig(model_path=str(directory), model_id="tiny", **fields)
    return EngineDriver(Engine(engine_config, load))
