"""Confines this process and answers the questions of the one that has started it: the child's end of a
`ConfinedProcess`.

Owns: the limits that the process sets itself, the form of questions and answers on stdin and stdout (JSON after its
length), and the process's end with its stdin. Never: what is asked.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import resource
import struct
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")
"""Precedes each question and each answer: the number of bytes of JSON that follow."""
_NICENESS = 5
_MOST_QUESTION_BYTES = 1 << 30


def serve(answer: Callable[[Any], Any], *, memory_bytes: int, processor_s: int, first_processor_s: int) -> None:
    """Answers each question on stdin on stdout, until stdin ends. Call it once, at the end of `main`.

    The end of stdin ends the process, whatever it is doing then: its other end is the parent's, which is gone. A
    question that takes more processor time than `processor_s` seconds ends the process too; the first one, which brings
    what answers to the others need, may take `first_processor_s`.
    """
    answers = os.fdopen(os.dup(1), "wb")
    _silence()
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # where the host is short of memory, this process goes first
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory_bytes)
    questions: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read, args=(os.fdopen(0, "rb"), questions), daemon=True).start()
    allowed_s = first_processor_s
    while True:
        question = questions.get()
        used = os.times()
        _limit(resource.RLIMIT_CPU, math.ceil(used.user + used.system) + allowed_s)
        allowed_s = processor_s
        reply = json.dumps(answer(json.loads(question)), ensure_ascii=False).encode()
        answers.write(LENGTH.pack(len(reply)))
        answers.write(reply)
        answers.flush()


def _read(source: BinaryIO, questions: SimpleQueue[bytes]) -> None:
    try:
        while len(head := source.read(LENGTH.size)) == LENGTH.size:
            (num_bytes,) = LENGTH.unpack(head)
            questions.put(source.read(min(num_bytes, _MOST_QUESTION_BYTES)))
    finally:
        os._exit(0)


def _silence() -> None:
    """Closes stdout and stderr to whatever a library prints: it may quote what is not to be trusted."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _limit(kind: int, most: int) -> None:
    """Sets a limit that may be raised again, but not above what this process was started with."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
