"""Vets constraints for a worker: the program `python -m services.worker.grammar_child`.

The first question brings the vocabulary, each later one a constraint (`grammar_process` asks them). A constraint is
compiled as the worker will compile it, and followed for some tokens, so that what overflows a stack, takes all memory
or never ends does so here.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from services.core.errors import InvalidRequest, UnsupportedModel
from services.engine.schedule.constraint import num_words
from services.worker.confinement import serve
from services.worker.grammar import Vocabulary, compile_grammar, grammar_of

_MEMORY_BYTES = 2 << 30
"""The space of addresses, of which an interpreter and a large vocabulary take a third."""
_STACK_BYTES = 2 << 20
"""A quarter of what a thread of the worker has, so that what is vetted here fits there."""
_LOAD_PROCESSOR_S = 30
"""The most seconds of processor time for the vocabulary, which the worker itself has read before: 256,000 tokens take
three of them, several times what a constraint may."""
_NUM_WALKED_TOKENS = 24
_PAGE_BYTES = 4096


class _Vetter:
    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        threading.stack_size(_STACK_BYTES)
        self._thread = ThreadPoolExecutor(1)

    def answer(self, question: Any) -> Any:
        return self._thread.submit(self._answer, question).result()

    def _answer(self, question: Any) -> Any:
        try:
            if self._vocabulary is None:
                folder, eos_token_ids = Path(question["folder"]), question["eos_token_ids"]
                self._vocabulary = Vocabulary(folder, question["vocab_size"], eos_token_ids)
                return {}
            return self._vet(self._vocabulary, question["kind"], question["text"])
        except (InvalidRequest, UnsupportedModel, ValueError) as error:
            words = error.description if isinstance(error, InvalidRequest) else f"cannot be read: {error}"
            return {"refusal": words}

    def _vet(self, vocabulary: Vocabulary, kind: str, text: str) -> Any:
        before, started_s = _resident_bytes(), time.thread_time()
        grammar = grammar_of(kind, text)
        matcher = compile_grammar(vocabulary, grammar)
        compiled_s = time.thread_time()
        # The same walk each time: what is refused once is refused always.
        choose, bits = random.Random(0), np.zeros(num_words(vocabulary.vocab_size), np.int32)
        for _ in range(_NUM_WALKED_TOKENS):
            bits[:] = 0
            matcher.fill(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            if not len(allowed):
                break
            matcher.take([int(choose.choice(allowed))])
        return {
            "grammar": grammar,
            "num_bytes": max(0, _resident_bytes() - before),
            "compile_ms": (compiled_s - started_s) * 1e3,
        }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def main() -> int:
    serve(
        _Vetter().answer,
        memory_bytes=_MEMORY_BYTES,
        processor_s=int(sys.argv[1]),
        first_processor_s=_LOAD_PROCESSOR_S,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
