"""Renders the chat template of a model that a worker brought, in a child process that is bounded in time and memory.

Owns: the one child process of a model, started when it is first needed and again after it has failed. Never: what a
template may do (`chat_template`). What it does in one operation, for however long, holds the child's interpreter lock
and not the router's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from services.core.errors import InvalidRequest
from services.core.printable import printable
from services.router.text.confined_process import ConfinedFailure, ConfinedProcess

RENDER_S = 5.0
"""The most seconds that rendering the messages of one chat may take. Templates in use take milliseconds."""
_START_S = 20.0
"""The most seconds until the child has the template. On a busy machine an interpreter takes seconds to start."""
_CHILD = "services.router.text.template_child"
_MOST_GROWTH = 4
_MOST_ADDED_BYTES = 1 << 20
"""A text has at most so many bytes more than `_MOST_GROWTH` times those of the messages."""
_MOST_ESCAPED_BYTES = 6
"""The most bytes that JSON takes for one byte of a text."""
_MOST_OTHER_BYTES = 4096


class TemplateProcess:
    """Renders messages like a `ChatTemplate`, one chat after another. Any thread may use it; all methods block."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, within_s: float = RENDER_S) -> None:
        """`special_tokens` are as for ChatTemplate. A chat has `within_s` seconds from when it is its turn."""
        self._template = {"source": source, "special_tokens": dict(special_tokens)}
        self._within_s = within_s
        self._turn = threading.Lock()
        """Is held by whoever uses the process."""
        self._changes = threading.Lock()
        """Guards the two fields below, and is held for moments only."""
        self._process: ConfinedProcess | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Returns the id of the child process; None if there is none now."""
        process = self._process
        return None if process is None else process.pid

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns the prompt up to the assistant's answer.

        Raises InvalidRequest if the template refuses the messages, takes too long for them, or makes too much of them.
        """
        chat = [dict(message) for message in messages]
        num_bytes = sum(len(text.encode()) for message in chat for text in message.values())
        most_bytes = _MOST_GROWTH * num_bytes + _MOST_ADDED_BYTES
        with self._turn:
            answer = self._ask({"messages": chat, "most_bytes": most_bytes}, self._within_s, most_bytes)
        return str(answer["text"])

    def close(self) -> None:
        """Ends the child process, and a `render` that waits for it. No other is started."""
        with self._changes:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        with self._turn:
            self._drop()

    def _ask(self, question: Any, within_s: float, most_bytes: int) -> Any:
        process = self._process
        if process is None or process.has_ended:
            self._drop()
            process = self._start()
            self._exchange(process, self._template, _START_S, 0)
        return self._exchange(process, question, within_s, most_bytes)

    def _start(self) -> ConfinedProcess:
        with self._changes:
            if self._closed:
                raise InvalidRequest("messages", "the model is served no longer")
            self._process = ConfinedProcess(_CHILD, str(math.ceil(self._within_s) + 1))
            return self._process

    def _exchange(self, process: ConfinedProcess, question: Any, within_s: float, most_bytes: int) -> Any:
        try:
            most_answer_bytes = _MOST_ESCAPED_BYTES * most_bytes + _MOST_OTHER_BYTES
            answer = process.ask(question, within_s=within_s, most_bytes=most_answer_bytes)
        except ConfinedFailure as failure:
            self._drop()
            raise InvalidRequest("messages", f"the model's chat template {failure}") from None
        if "refusal" in answer:
            raise InvalidRequest("messages", printable(str(answer["refusal"])))
        return answer

    def _drop(self) -> None:
        """Ends the child process, if there is one. Called by whoever has the turn."""
        with self._changes:
            process, self._process = self._process, None
        if process is not None:
            process.end()
