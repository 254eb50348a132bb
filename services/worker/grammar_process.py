"""Compiles constraints for a worker: first in a child process that is bounded in time and memory, then here.

Owns: the one child, started with the first constraint and again after it has failed, and what a constraint may cost.
Never: how a constraint is compiled (`grammar`), or which ones are kept (`constraints`). All methods block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.core.errors import InvalidRequest, Overloaded, UnsupportedModel
from services.worker.confined_process import ConfinedFailure, ConfinedLoss, ConfinedProcess
from services.worker.grammar import FIELD, Matcher, Vocabulary, compile_grammar

log = logging.getLogger(__name__)

_CHILD = "services.worker.grammar_child"
_START_S = 60.0
"""The most seconds until the child has the vocabulary. On a busy machine an interpreter takes seconds to start."""
_VET_S = 6.0
"""The most seconds until a constraint is vetted, on a machine that is busy with steps."""
_PROCESSOR_S = 1
"""The most seconds of processor time for it, of which the clock of the limit counts whole ones."""
_MOST_COMPILE_MS = 500.0
"""The most processor time of a compilation that is then done here."""
_MOST_GRAMMAR_BYTES = 8 << 20
_LEAST_BYTES = 64 << 10
_NICENESS = 10
_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Compiled:
    """Keeps a compiled constraint."""

    matcher: Matcher
    """It has taken nothing, and takes nothing: users take copies."""
    num_bytes: int
    """What it takes of memory, about."""


class GrammarCompiler:
    """Compiles constraints, one at a time, on one thread. `interrupt` alone may be called on another."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._changes = threading.Lock()
        """Guards the two fields below, and is held for moments only."""
        self._child: ConfinedProcess | None = None
        self._closed = False

    def load(self) -> None:
        """Reads the vocabulary. Raises UnsupportedModel, as `Vocabulary` does."""
        self._vocabulary = Vocabulary(self._folder, self._vocab_size, self._eos_token_ids)

    def compile(self, kind: str, text: str) -> Compiled:
        """Returns the compiled constraint; for `kind` see `grammar.grammar_of`.

        Raises InvalidRequest if it is invalid or costs too much, Overloaded if the compiler is closed, or its child
        does not start or is ended from outside, and UnsupportedModel if that cannot read the vocabulary.
        """
        assert self._vocabulary is not None, "the vocabulary is loaded first"
        vetted = self._vet({"kind": kind, "text": text})
        if vetted["compile_ms"] > _MOST_COMPILE_MS:
            took = f"took {vetted['compile_ms']:.0f} ms of processor time to compile"
            raise InvalidRequest(FIELD, f"{took}, and {_MOST_COMPILE_MS:.0f} are allowed")
        # On a thread of lower priority: the engine's come first where processors are short. A child of such a thread
        # would have its priority too, and take ages to start.
        with ThreadPoolExecutor(1, "compile constraint", _step_back) as aside:
            matcher = aside.submit(compile_grammar, self._vocabulary, vetted["grammar"]).result()
        num_bytes = vetted["num_bytes"] + len(vetted["grammar"]) + _LEAST_BYTES
        log.info("compiled a constraint: %s, %.1f ms, about %d bytes", kind, vetted["compile_ms"], num_bytes)
        return Compiled(matcher, num_bytes)

    def interrupt(self) -> None:
        """Kills the child, and with it what waits for its answer. No other is started."""
        with self._changes:
            self._closed = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """Ends the child. Call it when `compile` runs no more."""
        with self._changes:
            child, self._child = self._child, None
        if child is not None:
            child.end()

    def _vet(self, constraint: dict[str, str], *, again: bool = False) -> Any:
        child = self._child
        if child is None or child.has_ended:
            child = self._start()
        try:
            answer = child.ask(constraint, within_s=_VET_S, most_bytes=_MOST_GRAMMAR_BYTES)
        except ConfinedLoss as loss:  # not the constraint's fault, so it is tried once more
            if not again:
                return self._vet(constraint, again=True)
            message = f"the process that vets constraints {loss}"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from None
        except ConfinedFailure as failure:
            raise InvalidRequest(FIELD, f"cannot be compiled within its limits: it {failure}") from None
        if "refusal" in answer:
            raise InvalidRequest(FIELD, answer["refusal"])
        return answer

    def _start(self) -> ConfinedProcess:
        """Returns a new child that has the vocabulary."""
        self.close()  # frees what the one before needed
        with self._changes:
            if self._closed:
                raise Overloaded("the worker is about to stop")
            child = self._child = ConfinedProcess(_CHILD, str(_PROCESSOR_S))
        vocabulary = {
            "folder": str(self._folder),
            "vocab_size": self._vocab_size,
            "eos_token_ids": self._eos_token_ids,
        }
        try:
            loaded = child.ask(vocabulary, within_s=_START_S, most_bytes=_MOST_GRAMMAR_BYTES)
        except ConfinedFailure as failure:
            message = f"the process that vets constraints did not start: it {failure}"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from None
        if "refusal" in loaded:  # the file is another than the one this process has read
            self.close()
            raise UnsupportedModel(f"the process that vets constraints did not start: {loaded['refusal']}")
        return child


def _step_back() -> None:
    """Lowers this thread's priority."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS))
