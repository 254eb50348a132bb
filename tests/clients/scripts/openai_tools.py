"""Uses `openai`: a required call of a tool made from a pydantic model, whole and as a stream, and its result; a call or
an answer in a form, as agents ask for; one tool of several."""

# needs: openai, pydantic

import json
import sys
from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

url, model = sys.argv[1:]
client = OpenAI(base_url=url, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": "How is the weather in Rome?"}]


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


COMMON = {
    "model": model,
    "tools": [pydantic_function_tool(Weather)],
    "max_tokens": 150,
    "seed": 1,
    "parallel_tool_calls": False,
}
choice = client.chat.completions.parse(messages=MESSAGES, tool_choice="required", **COMMON).choices[0]
assert choice.finish_reason == "tool_calls"
(call,) = choice.message.tool_calls
assert isinstance(call.function.parsed_arguments, Weather)

named = {"type": "function", "function": {"name": "Weather"}}
with client.chat.completions.stream(messages=MESSAGES, tool_choice=named, **COMMON) as stream:
    parts = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
    (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
assert len(parts) > 1
assert "".join(parts) == streamed.function.arguments
assert isinstance(streamed.function.parsed_arguments, Weather)

result = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
said = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]}
either = client.chat.completions.parse(messages=MESSAGES, response_format=Weather, **COMMON).choices[0].message
assert isinstance(either.parsed, Weather) != bool(either.tool_calls)

now = {"type": "function", "function": {"name": "now", "strict": True}}
allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [now]}}
tools = [*COMMON["tools"], now]
only = client.chat.completions.create(messages=MESSAGES, tool_choice=allowed, **{**COMMON, "tools": tools}).choices[0]
assert [(call.function.name, json.loads(call.function.arguments)) for call in only.message.tool_calls] == [("now", {})]

last = client.chat.completions.create(messages=[*MESSAGES, said, result], tool_choice="none", **COMMON).choices[0]
assert last.message.tool_calls is None
