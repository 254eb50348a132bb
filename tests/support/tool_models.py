"""Provides models that know tools, as a router sees them, and a router with scripted workers behind it.

The templates are short ones, each with what tells its family.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from baton.v1 import inference_pb2
from tests.support.cluster import CONFIG, Cluster
from tests.support.text_model import write_model

_CALLS = "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"


def _turns(before_calls: str = "", after_calls: str = "") -> str:
    calls = f"{{% if message.tool_calls %}}{before_calls}{_CALLS}{after_calls}{{% endif %}}"
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}{{ ' ' + message.name if message.name }}\n"
        "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
        "{{ message.content }}" + calls + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    'Answer <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<|im_end|>\n{% endif %}'
    + _turns("<tool_call>", "</tool_call>")
)
LLAMA_TEMPLATE = (
    "{% if tools is not none %}{{ tools | tojson }} Respond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.{% endif %}' + _turns()
)
MISTRAL_TEMPLATE = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}" + _turns(
    "[TOOL_CALLS][", "]"
)
THINKING_TEMPLATE = HERMES_TEMPLATE.replace("assistant\n", "assistant\n<think>\n") + "{# </think> #}"

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells the weather.", "parameters": WEATHER_SCHEMA},
}
"""A tool as OpenAI's clients write it."""
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
WEATHER_TOOL = inference_pb2.Tool(
    name="get_weather", description="Tells the weather.", parameters_schema=json.dumps(WEATHER_SCHEMA)
)
NOW_TOOL = inference_pb2.Tool(name="now")
_ROOM = {"num_blocks": 128}


def tool_request(**fields: Any) -> inference_pb2.GenerateRequest:
    """Returns the question with both tools; fields that are given come before these."""
    messages = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(**QUESTION[0])])
    return inference_pb2.GenerateRequest(**{"messages": messages, "tools": [WEATHER_TOOL, NOW_TOOL], **fields})


class ToolCluster:
    """Keeps a router with HTTP whose model has a given template, and a prefill and a decode worker that output what a
    test says."""

    def __init__(self, cluster: Cluster, tokenizer: Tokenizer) -> None:
        self.cluster = cluster
        self.tokenizer = tokenizer
        self.says: list[int] = []

    def say(self, text: str) -> int:
        """Sets the output of all workers; its special tokens are that. Returns the number of its tokens."""
        self.says = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        for worker in self.cluster.scripted:
            worker.output = [*self.says, 2]
        return len(self.says)

    async def add(self, role: str, **facts: Any) -> Any:
        worker = await self.cluster.add(role, **{**_ROOM, **facts})
        worker.output = [*self.says, 2]
        return worker

    def prompt(self) -> str:
        """Returns the newest prompt that a worker was sent."""
        return str(self.tokenizer.decode(list(self.cluster.scripted[0].commands[-1].token_ids)))


@contextlib.asynccontextmanager
async def tool_cluster(
    folder: pathlib.Path, template: str, special_tokens: tuple[str, ...] = (), **config: Any
) -> AsyncIterator[ToolCluster]:
    write_model(folder, template=template, context_tokens=2048, special_tokens=special_tokens)
    cluster = Cluster(replace(CONFIG, model=str(folder), http_port=0, **config))
    await cluster.start()
    try:
        tools = ToolCluster(cluster, Tokenizer.from_file(str(folder / "tokenizer.json")))
        for role in ("prefill", "decode"):
            await tools.add(role)
        yield tools
        await cluster.idle()
    finally:
        await cluster.stop()
