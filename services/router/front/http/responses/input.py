"""Turns the input of a response into chat messages: a text, or items of a conversation.

What the assistant has said is in several items: what it thought, a message, calls of functions. Those that follow one
another become one message, as chat templates expect. Never: what a message may be; `validation.py` says it for all
fronts.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest
from services.router.front.http.body import Body, as_list, as_record, as_text
from services.router.front.http.content import REFUSAL, ROLES, as_content
from services.router.front.http.parameters import Neutral, refuse_unsupported
from services.router.front.validation import MAX_MESSAGES

MAX_ITEMS = MAX_MESSAGES
_TEXTS = ("input_text", "output_text", "text")
_NOT_IN_REASONING: Neutral = {"encrypted_content": ("",)}
_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "reasoning")
_NAMES = {"role": "role", "tool_call_id": "call_id"}


def read_input(body: Body, chat: inference_pb2.ChatMessages) -> Mapping[str, str]:
    """Fills in the messages. Returns where in the body each of their fields comes from. Raises InvalidRequest."""
    given, instructions = body.take("input"), body.text("instructions")
    if given is None:
        raise InvalidRequest("input", "is missing")
    conversation = _Conversation(chat)
    if instructions is not None:
        conversation.begin("instructions", role="system", content=instructions)
    if isinstance(given, str):
        conversation.begin("input", role="user", content=as_text(given, "input"))
        return conversation.places
    items = as_list(given, "input", MAX_ITEMS)
    if not items:
        raise InvalidRequest("input", "is empty")
    for index, entry in enumerate(items):
        path = f"input[{index}]"
        conversation.add(Body(as_record(entry, path), path))
    return conversation.places


class _Conversation:
    def __init__(self, chat: inference_pb2.ChatMessages) -> None:
        self._chat = chat
        self.places: dict[str, str] = {}

    def begin(self, place: str, item: Body | None = None, **fields: str) -> inference_pb2.ChatMessage:
        """Begins a message. What is wrong with it is told of `place`, or of the item's field where that is known."""
        index = len(self._chat.messages)
        for name in _FIELDS:
            own = None if item is None else _NAMES.get(name)
            self.places[f"messages[{index}].{name}"] = place if item is None or own is None else item.path(own)
        return self._chat.messages.add(**fields)

    def add(self, item: Body) -> None:
        kind = item.text("type")
        match kind:
            case None | "message":
                self._message(item)
            case "function_call":
                call = self._assistant(item, may_have_content=True).tool_calls.add()
                call.id, call.name = _required(item, "call_id"), _required(item, "name")
                call.arguments = _required(item, "arguments")
            case "function_call_output":
                call_id = _required(item, "call_id")
                content = as_content(item.take("output"), item.path("output"), _TEXTS)
                self.begin(item.path("output"), item, role="tool", content=content, tool_call_id=call_id)
            case "reasoning":
                self._reasoning(item)
            case _:
                raise InvalidRequest(item.path("type"), f"is {kind[:64]!r}, which is not supported by this server")

    def _message(self, item: Body) -> None:
        role = item.text("role") or ""
        kinds = (*_TEXTS, REFUSAL) if role == "assistant" else _TEXTS
        content = as_content(item.take("content"), item.path("content"), kinds)
        if role == "assistant":
            self._assistant(item, may_have_content=False).content = content
        else:
            self.begin(item.path("content"), item, role=ROLES.get(role, role), content=content)

    def _reasoning(self, item: Body) -> None:
        refuse_unsupported(item, _NOT_IN_REASONING)
        content = item.take("content")
        text = "" if content is None else as_content(content, item.path("content"), ("reasoning_text",))
        if text:  # a summary alone is not what the model has thought
            self.begin(item.path("content"), role="assistant", content="").reasoning = text

    def _assistant(self, item: Body, *, may_have_content: bool) -> inference_pb2.ChatMessage:
        """Returns the message that the item is a part of: the last one, if the assistant has gone on with it."""
        messages = self._chat.messages
        if messages and messages[-1].role == "assistant":
            last = messages[-1]
            if (not last.tool_calls and not last.content) or may_have_content:
                return last
        return self.begin(item.path("content"), role="assistant", content="")


def _required(item: Body, name: str) -> str:
    text = item.text(name)
    if text is None:
        raise InvalidRequest(item.path(name), "is missing")
    return text
