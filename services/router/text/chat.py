"""Defines the messages and tools of a chat, as a template is given them. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
"""Is a message as templates know it, but that the arguments of its `tool_calls` are still JSON text."""
Tool = Mapping[str, str]
"""Has the name of a function, its description if there is one, and the JSON Schema of its parameters, as JSON text."""
Variables = Mapping[str, bool | int | float | str]
"""Maps variables that a client gives to a template to their values."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Variables that have the texts of the model's special tokens."""
OWN_VARIABLES = {
    *SPECIAL_TOKENS,
    *("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
}
"""Names of variables that no client gives a template: they come from the model, or from fields of the request."""


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
