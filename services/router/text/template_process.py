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

from services.core.confined_process import ConfinedFailure, ConfinedLoss, ConfinedProcess
from services.core.errors import InvalidRequest, Overloaded
from services.core.printable import printable
from services.core.standing_child import Closed, StandingChild
from services.router.text.chat import Message, Tool, text_bytes

RENDER_S = 5.0
"""The most seconds that rendering the messages of one chat may take. Templates in use take milliseconds."""
_START_S = 20.0
"""The most seconds until the child has the template. On a busy machine an interpreter takes seconds to start."""
_CHILD = "services.router.text.template_child"
_RETRY_AFTER_S = 1.0
_SERVED_NO_LONGER = "the model is served no longer"
_MOST_GROWTH = 4
_MOST_ADDED_BYTES = 1 << 20
"""A text has at most so many bytes more than `_MOST_GROWTH` times those of the messages and tools."""
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
        self._child = StandingChild(_CHILD, str(math.ceil(within_s) + 1))

    @property
    def pid(self) -> int | None:
        """Returns the id of the child process; None if there is none now."""
        return self._child.pid

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opens_answer: bool = True) -> str:
        """Returns what ChatTemplate.render does.

        Raises InvalidRequest if the template refuses the messages, takes too long for them, or makes too much of them,
        and Overloaded if the process is ended from outside.
        """
        most_bytes = _MOST_GROWTH * (text_bytes(messages) + text_bytes(tools)) + _MOST_ADDED_BYTES
        chat = {
            "messages": list(messages),
            "tools": list(tools),
            "opens_answer": opens_answer,
            "most_bytes": most_bytes,
        }
        with self._turn:
            answer = self._ask(chat, self._within_s, most_bytes)
        return str(answer["text"])

    def close(self) -> None:
        """Ends the child process, and a `render` that waits for it. No other is started."""
        self._child.kill()
        with self._turn:
            self._child.drop()

    def _ask(self, question: Any, within_s: float, most_bytes: int) -> Any:
        if (process := self._child.running()) is None:
            try:
                process = self._child.start()
            except Closed:
                raise InvalidRequest("messages", _SERVED_NO_LONGER) from None
            self._exchange(process, self._template, _START_S, 0)
        return self._exchange(process, question, within_s, most_bytes)

    def _exchange(self, process: ConfinedProcess, question: Any, within_s: float, most_bytes: int) -> Any:
        try:
            most_answer_bytes = _MOST_ESCAPED_BYTES * most_bytes + _MOST_OTHER_BYTES
            answer = process.ask(question, within_s=within_s, most_bytes=most_answer_bytes)
        except ConfinedLoss as loss:
            self._child.drop()
            if self._child.is_closed:
                raise InvalidRequest("messages", _SERVED_NO_LONGER) from None
            raise Overloaded(f"the process that renders chats {loss}", retry_after_s=_RETRY_AFTER_S) from None
        except ConfinedFailure as failure:
            self._child.drop()
            raise InvalidRequest("messages", f"the model's chat template {failure}") from None
        if "refusal" in answer:
            raise InvalidRequest("messages", printable(str(answer["refusal"])))
        return answer
