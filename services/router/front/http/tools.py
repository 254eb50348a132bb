"""Reads the fields of chats that are about tools, and writes calls of tools, as OpenAI does.

Types are checked here, and sizes as far as a value is to be written as JSON again; the rest is the router's validation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest
from services.router.front.http.body import Body, as_list, as_record, as_text
from services.router.front.validation import MAX_CALLS, MAX_SCHEMA_VALUES, MAX_TOOLS
from services.rpc.json_schemas import MAX_SCHEMA_BYTES

_MODES = {
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "none": inference_pb2.TOOL_MODE_NONE,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}


_NAMES = {
    r"\1.function.parameters": re.compile(r"^(tools\[\d+\])\.parameters_schema"),
    r"\1.function.\2": re.compile(
        r"^(tools\[\d+\]|messages\[\d+\]\.tool_calls\[\d+\])\.(name|description|strict|arguments)$"
    ),
    r"\1.reasoning_content": re.compile(r"^(messages\[\d+\])\.reasoning$"),
    "tool_choice.function.name": re.compile(r"^tool_choice\.function$"),
    r"tool_choice.allowed_tools.tools\1": re.compile(r"^tool_choice\.allowed\b(.*)$"),
}


def name_in_chats(field: str) -> str:
    """Returns a request field's path as chats have it: with the groups that it is in with OpenAI."""
    for written, pattern in _NAMES.items():
        field = pattern.sub(written, field)
    return field


def read_tools(body: Body, request: inference_pb2.GenerateRequest, *, is_flat: bool = False) -> None:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`. `is_flat`: a function's name stands beside its type, as
    in /v1/responses, and not in a record `function`."""
    num_values = 0
    for index, entry in enumerate(body.items("tools", MAX_TOOLS)):
        function = _function(Body(as_record(entry, f"tools[{index}]"), f"tools[{index}]"), is_flat=is_flat)
        tool = request.tools.add(name=function.text("name") or "", description=function.text("description") or "")
        parameters, strict = function.take("parameters"), function.boolean("strict")
        if parameters is not None:
            field = function.path("parameters")
            num_values += _check_size(as_record(parameters, field), field, MAX_SCHEMA_VALUES - num_values)
            tool.parameters_schema = as_text(json.dumps(parameters, ensure_ascii=False), field)
        if strict is not None:
            tool.strict = strict
    _read_choice(body.take("tool_choice"), request, is_flat=is_flat)
    parallel = body.boolean("parallel_tool_calls")
    if parallel is not None:
        request.parallel_tool_calls = parallel


def _read_choice(choice: Any, request: inference_pb2.GenerateRequest, *, is_flat: bool) -> None:
    if choice is None or (choice in ("auto", "none") and not request.tools):
        return
    if isinstance(choice, str):
        if choice not in _MODES:
            raise InvalidRequest("tool_choice", f"is {choice[:64]!r}, not one of {', '.join(_MODES)}, or a function")
        request.tool_choice.mode = _MODES[choice]
    elif (given := Body(as_record(choice, "tool_choice"), "tool_choice")).text("type") == "allowed_tools":
        _read_allowed(given if is_flat else given.record("allowed_tools"), request, is_flat=is_flat)
    else:
        request.tool_choice.function = _function(given, is_flat=is_flat).text("name") or ""


def _read_allowed(given: Body, request: inference_pb2.GenerateRequest, *, is_flat: bool) -> None:
    """Reads which of the tools may be called."""
    mode = given.text("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest(given.path("mode"), "must be 'auto' or 'required'")
    request.tool_choice.mode = _MODES[mode]
    path = given.path("tools")
    for index, entry in enumerate(given.items("tools", MAX_TOOLS)):
        function = _function(Body(as_record(entry, f"{path}[{index}]"), f"{path}[{index}]"), is_flat=is_flat)
        request.tool_choice.allowed.append(function.text("name") or "")
    if not request.tool_choice.allowed:
        raise InvalidRequest(path, "is empty")


def _function(record: Body, *, is_flat: bool = False) -> Body:
    """Returns the function of a tool, a call or a choice: the only type there is here."""
    kind = record.text("type")
    if kind not in (None, "function"):
        raise InvalidRequest(record.path("type"), f"is {kind[:64]!r}; only 'function' is supported by this server")
    return record if is_flat else record.record("function")


def _check_size(value: Any, field: str, most_values: int) -> int:
    """Returns how many values there are in it. Raises InvalidRequest as soon as there are too many, or too much
    text, so that it is never walked through, or written as JSON, for long."""
    num_values = num_chars = 0
    remaining = [value]
    while remaining:
        each = remaining.pop()
        num_values += 1
        if isinstance(each, dict):
            num_chars += sum(map(len, each))
            remaining += each.values()
        elif isinstance(each, list):
            remaining += each
        elif isinstance(each, str):
            num_chars += len(each)
        if num_chars > MAX_SCHEMA_BYTES:
            raise InvalidRequest(field, f"has more than {MAX_SCHEMA_BYTES} bytes")
        if num_values + len(remaining) > most_values:
            raise InvalidRequest(field, f"has too many values: all schemas may have {MAX_SCHEMA_VALUES}")
    return num_values


def read_calls(message: Body, into: inference_pb2.ChatMessage) -> None:
    """Reads the calls that an assistant's message asks for."""
    field = message.path("tool_calls")
    for index, entry in enumerate(as_list(message.take("tool_calls") or [], field, MAX_CALLS)):
        record = Body(as_record(entry, f"{field}[{index}]"), f"{field}[{index}]")
        function, call_id = _function(record), record.text("id")
        call = into.tool_calls.add(id=call_id or "", name=function.text("name") or "")
        call.arguments = function.text("arguments") or ""


def calls(output: inference_pb2.Chunk) -> list[dict[str, object]]:
    """Returns the calls of a whole answer."""
    return [{**_call(part), "function": _named(part)} for part in output.tool_calls]


def call_deltas(parts: Iterable[inference_pb2.ToolCallDelta]) -> list[dict[str, object]]:
    """Returns parts of calls as a stream has them: id, type and name are in the first of a call only."""
    return [
        {"index": part.index, **_call(part), "function": _named(part)}
        if part.id
        else {"index": part.index, "function": {"arguments": part.arguments}}
        for part in parts
    ]


def _call(part: inference_pb2.ToolCallDelta) -> dict[str, object]:
    return {"id": part.id, "type": "function"}


def _named(part: inference_pb2.ToolCallDelta) -> Mapping[str, str]:
    return {"name": part.name, "arguments": part.arguments}
