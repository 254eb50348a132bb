"""Loads `VllmEngine` over the processes of `scripted_vllm`, and collects what it reports."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.engine.config import EngineConfig, StepReport
from services.engine.schedule.sequence import Failed, Sequence, SequenceEvent, StoppingParams, Token
from services.engine.schedule.sequence import SamplingParams as Sampling
from services.vllm.engine import VllmEngine, vllm_engine
from tests.support import ROOT
from tests.support.patience import HANG_S, Patience
from tests.support.scripted_vllm_controls import Controls
from tests.support.text_model import byte_tokenizer

VOCAB_SIZE = byte_tokenizer().get_vocab_size()
"""Of `text_model.write_model`."""


class ScriptedVllm:
    """Makes engines whose processes all look at `controls`."""

    def __init__(self, folder: Path, **engine_args: str) -> None:
        """`engine_args` are those of --engine-arg."""
        self.controls = Controls(folder / "controls")
        self.python = folder / "python"
        self._engine_args = engine_args
        settings = f"export PYTHONPATH='{ROOT}' SCRIPTED_CONTROLS='{self.controls.folder}'"
        program = f"exec '{sys.executable}' -m tests.support.scripted_vllm"
        version = 'if [ "$1" = -c ]; then echo \'"0.32.0"\'; exit; fi'  # `environment` has asked
        self.python.write_text(f'#!/bin/sh\n{version}\n{settings}\n{program} "$3" "$4"\n')
        self.python.chmod(0o755)

    def load(self, config: EngineConfig) -> VllmEngine:
        return vllm_engine(config, self.python, self._engine_args)


def engine_config(model: Path, **changes: Any) -> EngineConfig:
    fields = {"num_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8, "dtype": "float32", "threads": 1}
    return EngineConfig(model_path=str(model), model_id="scripted", **(fields | changes))


def processes(engine: VllmEngine) -> dict[str, int]:
    """Returns the pids of vLLM's processes by name: front, core, rank0 and so on, and that of their keeper."""
    peers = engine._process.peers
    named = {peer.who if peer.who != "rank" else f"rank{peer.rank}": peer.pid for peer in peers if peer.who}
    return {**named, "keeper": engine._process.keeper_pid}


class Driver:
    """Runs sequences on an engine, as a context that stops and closes it."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.events: list[SequenceEvent] = []
        self.on_event: Callable[[SequenceEvent], None] = self.events.append
        """Is called on the engine's thread."""
        self._ids = iter(range(1, 1 << 30))
        self._reported = threading.Event()
        engine.start(self._report)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self.engine.close()

    def _report(self, report: StepReport) -> None:
        for event in report.events:
            self.on_event(event)

    def sequence(self, prompt: list[int], max_tokens: int, sampling: Sampling | None = None, **fields: Any) -> Sequence:
        sampling = sampling or Sampling(temperature=0.0)
        stopping, now = StoppingParams(max_tokens), time.monotonic()
        return Sequence(next(self._ids), list(prompt), len(prompt), sampling, stopping, now, **fields)

    def add(self, prompt: list[int], max_tokens: int, **fields: Any) -> Sequence:
        sequence = self.sequence(prompt, max_tokens, **fields)
        self.engine.add(sequence)
        return sequence

    def of(self, sequence: Sequence) -> list[SequenceEvent]:
        return [event for event in list(self.events) if event.seq_id == sequence.seq_id]

    def said(self, sequence: Sequence) -> list[int]:
        return [event.token.token_id for event in self.of(sequence) if isinstance(event, Token)]

    def is_over(self, sequence: Sequence) -> bool:
        events = self.of(sequence)
        return any(isinstance(event, Failed) or (isinstance(event, Token) and event.finish) for event in events)

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = HANG_S) -> None:
        patience = Patience(timeout_s)
        while not condition():
            assert not patience.is_over(), f"not within {patience.waited_s:.1f} s: {what}; {self.events[-5:]}"
            time.sleep(0.003)

    def idle(self) -> None:
        """Waits until nothing is held, and asserts that all counts agree."""
        stats = self.engine.stats
        self.until(lambda: stats().ledger.idle and not stats().num_running and not stats().num_waiting, f"{stats()}")
        self.until(lambda: not self.engine._runs, "no sequence is left")
        self.engine.check_idle()
