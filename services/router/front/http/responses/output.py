"""Makes a response's output of what the model makes: items, and the events that tell of them as they grow. Pure.

An item is what the model thinks, a message or a call of a function. One is open at a time: it grows until another kind
of output begins. Never: the response around the items, or numbers of events (writer.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from baton.v1 import inference_pb2

_Json = dict[str, Any]
OutputEvent = tuple[str, _Json]
"""The event's type without "response.", and its fields."""
Status = Literal["in_progress", "completed", "incomplete"]


@dataclass(slots=True)
class _Item:
    """Is an item that has begun. `text` is all of it so far: of a call, its arguments."""

    kind: Literal["reasoning", "message", "function_call"]
    item_id: str
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    call_index: int = -1

    @property
    def place(self) -> _Json:
        return {"item_id": self.item_id, "output_index": self.index}

    def part(self, text: str) -> _Json:
        """Returns the one content part of a message, or of what was thought."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def written(self, status: Status) -> _Json:
        begun = status != "in_progress"
        head: _Json = {"id": self.item_id, "type": self.kind, "status": status}
        match self.kind:
            case "function_call":
                arguments = self.text if begun else ""
                return {**head, "call_id": self.call_id, "name": self.name, "arguments": arguments}
            case "reasoning":
                return {**head, "summary": [], "content": [self.part(self.text)] if begun else []}
            case _:
                return {**head, "role": "assistant", "content": [self.part(self.text)] if begun else []}


class ResponseOutput:
    """Collects the output of one response. `add` and `end` return the events of what they bring."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self._open: _Item | None = None
        self.items: list[_Json] = []
        """Those that are complete."""

    def add(self, chunk: inference_pb2.Chunk) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        if chunk.reasoning:
            events += self._text("reasoning", chunk.reasoning)
        if chunk.text:
            events += self._text("message", chunk.text)
        for part in chunk.tool_calls:
            events += self._call(part)
        return events

    def end(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """Completes the output; if it is cut off, its last item is incomplete. Without any it is an empty message."""
        events = [] if self._open is not None or self.items else self._begin("message")
        return events + self._close("incomplete" if is_cut else "completed")

    def _text(self, kind: Literal["reasoning", "message"], text: str) -> list[OutputEvent]:
        events = [] if self._open is not None and self._open.kind == kind else self._begin(kind)
        assert self._open is not None
        self._open.text += text
        delta: _Json = {**self._open.place, "content_index": 0, "delta": text}
        if kind == "reasoning":
            return [*events, ("reasoning_text.delta", delta)]
        return [*events, ("output_text.delta", {**delta, "logprobs": []})]

    def _call(self, part: inference_pb2.ToolCallDelta) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        if self._open is None or self._open.kind != "function_call" or self._open.call_index != part.index:
            events = self._begin("function_call", part)
        assert self._open is not None
        self._open.text += part.arguments
        if part.arguments:
            events.append(("function_call_arguments.delta", {**self._open.place, "delta": part.arguments}))
        return events

    def _begin(
        self, kind: Literal["reasoning", "message", "function_call"], call: inference_pb2.ToolCallDelta | None = None
    ) -> list[OutputEvent]:
        events = self._close("completed")
        index = len(self.items)
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = self._open = _Item(kind, f"{prefix}_{self._response_id}_{index}", index)
        if call is not None:
            item.call_id, item.name, item.call_index = call.id, call.name, call.index
        events.append(("output_item.added", {"output_index": index, "item": item.written("in_progress")}))
        if kind != "function_call":
            events.append(("content_part.added", {**item.place, "content_index": 0, "part": item.part("")}))
        return events

    def _close(self, status: Status) -> list[OutputEvent]:
        item, self._open = self._open, None
        if item is None:
            return []
        written = item.written(status)
        self.items.append(written)
        events: list[OutputEvent] = []
        if item.kind == "function_call":
            done = {**item.place, "name": item.name, "arguments": item.text}
            events.append(("function_call_arguments.done", done))
        else:
            place: _Json = {**item.place, "content_index": 0}
            if item.kind == "reasoning":
                events.append(("reasoning_text.done", {**place, "text": item.text}))
            else:
                events.append(("output_text.done", {**place, "text": item.text, "logprobs": []}))
            events.append(("content_part.done", {**place, "part": item.part(item.text)}))
        return [*events, ("output_item.done", {"output_index": item.index, "item": written})]
