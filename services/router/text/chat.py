"""Defines the messages and tools of a chat, as a template is given them. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
"""Is a message as templates know it, but that the arguments of its `tool_calls` are still JSON text."""
Tool = Mapping[str, str]
"""Has the name of a function, its description if there is one, and the JSON Schema of its parameters, as JSON text."""


class PromptEnd(enum.Enum):
    """Says where the prompt of a chat ends."""

    OPEN_ANSWER = "open answer"
    """The prompt ends with what opens the assistant's answer."""
    MESSAGES = "messages"
    """The prompt ends with the messages."""
    FINAL_MESSAGE = "final message"
    """The prompt ends within the last message, whose content is continued."""


def text_bytes(value: Any) -> int:
    """Returns how many bytes of text there are in messages or tools, in UTF-8."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode())
    return sum(map(text_bytes, value.values() if isinstance(value, Mapping) else value))
