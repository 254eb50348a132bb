"""Tests tools and reasoning over gRPC, with scripted workers: what is told to the model, what is found in its output,
through faults too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from tests.support.cluster import code_of
from tests.support.text_model import write_model
from tests.support.tool_models import (
    HERMES_TEMPLATE,
    LLAMA_TEMPLATE,
    MISTRAL_TEMPLATE,
    NOW_TOOL,
    THINKING_TEMPLATE,
    WEATHER_TOOL,
    ToolCluster,
    tool_cluster,
    tool_request,
)

CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
HERMES_CALL = f"<tool_call>\n{CALL}\n</tool_call>"
TOOL_CALLS, STOP, LENGTH = (
    types_pb2.FINISH_REASON_TOOL_CALLS,
    types_pb2.FINISH_REASON_STOP,
    types_pb2.FINISH_REASON_LENGTH,
)


async def streamed(call: Any) -> tuple[list[inference_pb2.Chunk], inference_pb2.Completion]:
    events = [event async for event in call]
    return [event.chunk for event in events if event.HasField("chunk")], events[-1].completion


def joined(chunks: Sequence[inference_pb2.Chunk]) -> list[tuple[str, str]]:
    """Returns name and arguments of each call. Its id and name must come once, and first."""
    calls: list[tuple[str, str]] = []
    for part in (part for chunk in chunks for part in chunk.tool_calls):
        if part.index == len(calls):
            assert part.id
            calls.append((part.name, part.arguments))
        else:
            assert (part.id, part.name, part.index) == ("", "", len(calls) - 1)
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return calls


def text_of(chunks: Sequence[inference_pb2.Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def test_calls_are_told_apart_from_text(tmp_path: Path) -> None:
    async with tool_cluster(tmp_path, HERMES_TEMPLATE) as tools:
        num_tokens = tools.say(f'I look.\n{HERMES_CALL}\n<tool_call>{{"name": "now"}}</tool_call>')
        generate = tools.cluster.inference
        logprobs = inference_pb2.ResponseOptions(logprobs=0)
        chunks, completion = await streamed(generate.GenerateStream(tool_request(response=logprobs)))
        assert (text_of(chunks), joined(chunks)) == ("I look.", [("get_weather", '{"city": "Rome"}'), ("now", "{}")])
        assert sum(bool(chunk.tool_calls) for chunk in chunks) > 3, "arguments come as they are made"
        assert completion.finish_reason == TOOL_CALLS
        assert completion.stop_token_id == 2
        assert completion.usage.output_tokens == num_tokens + 1
        assert sum(len(chunk.logprobs) for chunk in chunks) == num_tokens + 1
        whole = await generate.Generate(tool_request())
        assert whole.output.text == "I look."
        assert [(call.name, call.arguments) for call in whole.output.tool_calls] == joined(chunks)
        assert whole.completion.finish_reason == TOOL_CALLS
        schema = WEATHER_TOOL.parameters_schema
        told = f'"name": "get_weather", "description": "Tells the weather.", "parameters": {schema}'
        assert told in tools.prompt()


@pytest.mark.parametrize(
    ("template", "special", "output", "text"),
    [
        (LLAMA_TEMPLATE, ("<|python_tag|>",), f"<|python_tag|>{CALL}", ""),
        (LLAMA_TEMPLATE, (), CALL, ""),
        (MISTRAL_TEMPLATE, ("[TOOL_CALLS]",), f"Hm.[TOOL_CALLS] [{CALL}]", "Hm."),
        (MISTRAL_TEMPLATE, ("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}', ""),
    ],
    ids=range(4),
)
async def test_each_family_by_its_template(
    tmp_path: Path, template: str, special: tuple[str, ...], output: str, text: str
) -> None:
    async with tool_cluster(tmp_path, template, special) as tools:
        tools.say(output)
        whole = await tools.cluster.inference.Generate(tool_request())
        (call,) = whole.output.tool_calls
        assert (whole.output.text, call.name, call.arguments) == (text, "get_weather", '{"city": "Rome"}')
        assert len(call.id) == 9 if template == MISTRAL_TEMPLATE else call.id.startswith("call_")


async def test_what_is_no_call_is_text_without_its_special_token(tmp_path: Path) -> None:
    async with tool_cluster(tmp_path, MISTRAL_TEMPLATE, ("[TOOL_CALLS]",)) as tools:
        tools.say('[TOOL_CALLS][{"name": "unknown"}]')
        generate = tools.cluster.inference.Generate
        whole = await generate(tool_request())
        assert (whole.output.text, whole.completion.finish_reason) == ('[{"name": "unknown"}]', STOP)
        shown = await generate(tool_request(response=inference_pb2.ResponseOptions(skip_special_tokens=False)))
        assert shown.output.text == '[TOOL_CALLS][{"name": "unknown"}]', "but never the token that ended it"


async def test_a_model_whose_template_takes_one_call_a_message(tmp_path: Path) -> None:
    """Several could not be sent back to it."""
    several = (
        "messages | selectattr('tool_calls') | map(attribute='tool_calls') | map('length') | select('gt', 1) | list"
    )
    refuses = f"{{% if {several} %}}{{{{ raise_exception('only single tool-calls') }}}}{{% endif %}}"
    async with tool_cluster(tmp_path, refuses + LLAMA_TEMPLATE) as tools:
        tools.say(f"{CALL}; {CALL}")
        whole = await tools.cluster.inference.Generate(tool_request())
        messages = [
            inference_pb2.ChatMessage(role="user", content="How?"),
            inference_pb2.ChatMessage(
                role="assistant",
                tool_calls=[
                    inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                    for call in whole.output.tool_calls
                ],
            ),
        ]
        await tools.cluster.inference.Generate(tool_request(messages=inference_pb2.ChatMessages(messages=messages)))
        assert len(whole.output.tool_calls) == 1


async def test_without_tools_nothing_is_looked_for(tmp_path: Path) -> None:
    none = inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_NONE)
    async with tool_cluster(tmp_path, HERMES_TEMPLATE) as tools:
        tools.say(HERMES_CALL)
        for request in (tool_request(tools=[]), tool_request(tool_choice=none)):
            whole = await tools.cluster.inference.Generate(request)
            assert (whole.output.text, whole.completion.finish_reason) == (HERMES_CALL, STOP)
            assert "get_weather" not in tools.prompt()


async def test_the_conversation_about_a_call(tmp_path: Path) -> None:
    """The model is shown arguments as an object, and the name of the function that a result is of."""
    call = inference_pb2.ToolCall(id="call_1", name="get_weather", arguments='{"city":"Rom\\u00e9"}')
    broken = inference_pb2.ToolCall(id="call_2", name="now", arguments="{oh")
    messages = [
        inference_pb2.ChatMessage(role="user", content="How?", name="ann"),
        inference_pb2.ChatMessage(role="assistant", reasoning="I must ask.", tool_calls=[call, broken]),
        inference_pb2.ChatMessage(role="tool", content="dry", tool_call_id="call_1"),
        inference_pb2.ChatMessage(role="tool", content="never", tool_call_id="call_2", name="clock"),
    ]
    async with tool_cluster(tmp_path, HERMES_TEMPLATE) as tools:
        tools.say("Dry.")
        chat = inference_pb2.ChatMessages(messages=messages)
        assert (await tools.cluster.inference.Generate(tool_request(messages=chat))).output.text == "Dry."
        prompt = tools.prompt()
    for part in ('{"city": "Romé"}', '"arguments": "{oh"', "tool get_weather\ndry", "tool clock\nnever", "user ann"):
        assert part in prompt
    assert "<think>I must ask.</think>" in prompt


async def test_a_stream_with_a_call_survives_its_decode_worker(tmp_path: Path) -> None:
    async with tool_cluster(tmp_path, HERMES_TEMPLATE) as tools:
        tools.say(f"I look.\n{HERMES_CALL}")
        cluster, (_, decode) = tools.cluster, tools.cluster.scripted
        decode.decode_gate.clear()
        reading = cluster.inference.GenerateStream(tool_request())
        await decode.until(lambda: decode.commands)
        said = types_pb2.SequenceTokens(leg=decode.commands[-1].leg, position=1, token_ids=decode.output[1:-30])
        decode.say(worker_pb2.LegEvent(tokens=said))  # it says no more, and then it is gone
        first: list[inference_pb2.Chunk] = []
        async for event in reading:
            first.append(event.chunk)
            if any(part.arguments for part in event.chunk.tool_calls):
                break
        other = await tools.add("decode", worker_id="other")
        decode.cut()
        rest, completion = await streamed(reading)
        assert joined([*first, *rest]) == [("get_weather", '{"city": "Rome"}')]
        assert text_of([*first, *rest]) == "I look."
        assert (completion.finish_reason, completion.workers.decode) == (TOOL_CALLS, "other")
        assert completion.workers.retries >= 1
        assert other.commands[-1].output_base > 10


async def test_a_call_that_is_cut_off(tmp_path: Path) -> None:
    async with tool_cluster(tmp_path, HERMES_TEMPLATE) as tools:
        tools.say(HERMES_CALL)
        generate = tools.cluster.inference.Generate
        most = next(
            number for number in range(1, 200) if tools.tokenizer.decode(tools.says[:number]).endswith('"city": "R')
        )
        cut = await generate(tool_request(stopping=types_pb2.StoppingParams(max_tokens=most)))
        (call,) = cut.output.tool_calls
        assert (cut.output.text, call.arguments, cut.completion.finish_reason) == ("", '{"city": "R', LENGTH)
        stopped = await generate(tool_request(stopping=types_pb2.StoppingParams(stop=["ome"])))
        (call,) = stopped.output.tool_calls
        assert (call.arguments, stopped.completion.stop_string) == ('{"city": "R', "ome")
        assert stopped.completion.finish_reason == TOOL_CALLS


async def test_a_cancelled_call_leaves_nothing(tmp_path: Path) -> None:
    async with tool_cluster(tmp_path, HERMES_TEMPLATE) as tools:
        tools.say(HERMES_CALL)
        decode = tools.cluster.scripted[1]
        decode.decode_gate.clear()
        reading = tools.cluster.inference.GenerateStream(tool_request())
        await decode.until(lambda: decode.commands)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await streamed(reading)


async def test_one_call_at_most_ends_the_output(tmp_path: Path) -> None:
    async with tool_cluster(tmp_path, HERMES_TEMPLATE) as tools:
        tools.say(f"{HERMES_CALL}{HERMES_CALL}")
        whole = await tools.cluster.inference.Generate(tool_request(parallel_tool_calls=False))
        assert len(whole.output.tool_calls) == 1
        assert whole.completion.finish_reason == TOOL_CALLS
        assert whole.completion.WhichOneof("stop") is None
        assert whole.completion.usage.output_tokens < len(tools.says) / 2


@pytest.mark.parametrize("opened", [True, False])
async def test_what_is_thought_is_told_apart(tmp_path: Path, opened: bool) -> None:
    async with tool_cluster(tmp_path, THINKING_TEMPLATE if opened else HERMES_TEMPLATE + "{# </think> #}") as tools:
        tools.say(f"{'' if opened else '<think>'}\nHm.\n</think>\n\nI look.\n{HERMES_CALL}")
        chunks, completion = await streamed(tools.cluster.inference.GenerateStream(tool_request()))
        assert "".join(chunk.reasoning for chunk in chunks) == "Hm."
        num_thought = next(
            number for number in range(200) if tools.tokenizer.decode(tools.says[:number]).endswith("</think>")
        )
        assert completion.usage.reasoning_tokens == num_thought < completion.usage.output_tokens
        whole = await tools.cluster.inference.Generate(tool_request())
        assert whole.completion.usage.reasoning_tokens == num_thought
        assert (text_of(chunks), joined(chunks)) == ("I look.", [("get_weather", '{"city": "Rome"}')])
        plain = await tools.cluster.inference.Generate(inference_pb2.GenerateRequest(text="hello"))
        assert (plain.output.reasoning, plain.completion.usage.reasoning_tokens) == ("", 0)
        assert plain.output.text.endswith(HERMES_CALL)


async def test_flags_come_before_the_template(tmp_path: Path) -> None:
    flags = {"tool_parser": ("hermes", "other=none"), "reasoning_parser": ("tiny=none",)}
    async with tool_cluster(tmp_path, LLAMA_TEMPLATE + "{# </think> #}", **flags) as tools:
        tools.say(f"<think>Hm.</think>{HERMES_CALL}")
        output = (await tools.cluster.inference.Generate(tool_request())).output
        assert (output.text, output.reasoning, len(output.tool_calls)) == ("<think>Hm.</think>", "", 1)


NO_TOOLS = "{% for message in messages %}{{ message.role }}{{ message.content }}{% endfor %}"
UNKNOWN_FORM = "{{ tools }}" + NO_TOOLS


@pytest.mark.parametrize(
    ("template", "flags", "reason"),
    [
        (NO_TOOLS, (), "tools: are not supported: this model's chat template knows no tools"),
        (NO_TOOLS, ("hermes",), "tools: are not supported: this model's chat template knows no tools"),
        (UNKNOWN_FORM, (), "tools: are not supported: how this model calls them is not known (--tool-parser)"),
        (HERMES_TEMPLATE, ("none",), "tools: are not supported: how this model calls them is not known"),
    ],
)
async def test_a_model_that_knows_no_tools(tmp_path: Path, template: str, flags: tuple[str, ...], reason: str) -> None:
    async with tool_cluster(tmp_path, template, tool_parser=flags) as tools:
        tools.say("Hm.")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await tools.cluster.inference.Generate(tool_request())
        assert code_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT
        assert reason in (caught.value.details() or "")
        none = inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_NONE)
        assert (await tools.cluster.inference.Generate(tool_request(tool_choice=none))).output.text == "Hm."


async def test_tools_of_a_model_that_a_worker_has_brought(tmp_path: Path) -> None:
    """Its template says how its calls are read."""
    brought = write_model(tmp_path / "brought", template=MISTRAL_TEMPLATE, special_tokens=["[TOOL_CALLS]"])
    async with tool_cluster(tmp_path / "own", NO_TOOLS) as tools:
        await tools.add("mixed", worker_id="m", model_id="brought", text=brought, num_blocks=128)
        bringer = tools.cluster.scripted[-1]
        own = ToolCluster(tools.cluster, type(tools.tokenizer).from_file(str(brought / "tokenizer.json")))
        own.say('[TOOL_CALLS]now{"a": 1}')
        request = tool_request(model="brought", tools=[NOW_TOOL])
        (call,) = (await tools.cluster.inference.Generate(request)).output.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("now", {"a": 1})
        assert '"name": "now"' in own.tokenizer.decode(list(bringer.commands[-1].token_ids))


async def test_calls_that_must_follow_schemas_become_a_constraint(tmp_path: Path) -> None:
    strict = inference_pb2.Tool(name="now", strict=True, parameters_schema='{"type": "object", "maxProperties": 0}')
    required = inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_REQUIRED)
    named = inference_pb2.ToolChoice(function="now")
    async with tool_cluster(tmp_path, HERMES_TEMPLATE.replace("</think>", "")) as tools:
        tools.say(HERMES_CALL)
        generate, prefill = tools.cluster.inference.Generate, tools.cluster.scripted[0]
        grammars = []
        for fields in ({"tool_choice": required}, {"tool_choice": named}, {"tools": [WEATHER_TOOL, strict]}, {}):
            await generate(tool_request(**fields))
            grammars.append(prefill.commands[-1].constraint.grammar)
        assert grammars[0].startswith('start: "<tool_call>" whole ("\\n" "<tool_call>" whole)*\n')
        assert grammars[1].startswith('start: "<tool_call>" whole\n')
        assert grammars[2].startswith("start: (head whole)* TEXT\n")
        assert ["city" in grammar for grammar in grammars] == [True, False, False, False], "it is held to nothing"
        assert "maxProperties" in grammars[2]
        assert grammars[3] == ""
        assert 'call_1_arguments: %json {"additionalProperties":false' in grammars[0], "it has no parameters"


HELD = types_pb2.Constraint(json_schema='{"type": "object", "properties": {"a": {"const": 1}}}')
DOCUMENT = '{"a": 1}'


async def test_an_answer_in_a_form_comes_after_what_is_thought(tmp_path: Path) -> None:
    """A prompt that ends within what is thought does not make the answer a thought."""
    async with tool_cluster(tmp_path, THINKING_TEMPLATE) as tools:
        generate, prefill = tools.cluster.inference.Generate, tools.cluster.scripted[0]
        choices = types_pb2.Constraint(choices=types_pb2.Choices(texts=["yes", "no"]))
        anything = types_pb2.Constraint(json_object=types_pb2.AnyJsonObject())
        for constraint, answer in ((HELD, DOCUMENT), (anything, DOCUMENT), (choices, "yes")):
            tools.say(f"Hm.\n</think>\n\n{answer}")
            whole = await generate(tool_request(tools=[], constraint=constraint))
            assert (whole.output.reasoning, whole.output.text) == ("Hm.", answer)
            assert prefill.commands[-1].constraint.grammar.startswith("start: thought NEWLINES answer\n")
        for constraint in (types_pb2.Constraint(regex="[a-z]+"), types_pb2.Constraint(grammar='start: "yes"')):
            tools.say("yes")  # the whole output is held to these: there is nothing before
            whole = await generate(tool_request(tools=[], constraint=constraint))
            assert (whole.output.reasoning, whole.output.text) == ("", "yes")
            assert prefill.commands[-1].constraint == constraint


async def test_an_answer_in_a_form_or_calls(tmp_path: Path) -> None:
    required = inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_REQUIRED)
    async with tool_cluster(tmp_path, HERMES_TEMPLATE.replace("</think>", "")) as tools:
        generate, prefill = tools.cluster.inference.Generate, tools.cluster.scripted[0]
        tools.say(DOCUMENT)
        whole = await generate(tool_request(constraint=HELD))
        assert (whole.output.text, len(whole.output.tool_calls), whole.completion.finish_reason) == (DOCUMENT, 0, STOP)
        tools.say(HERMES_CALL)
        whole = await generate(tool_request(constraint=HELD))
        assert (whole.output.text, len(whole.output.tool_calls)) == ("", 1)
        grammar = prefill.commands[-1].constraint.grammar
        assert grammar.startswith('start: ("<tool_call>" whole ("\\n" "<tool_call>" whole)* | answer)\n')
        await generate(tool_request(constraint=HELD, tool_choice=required))
        assert "answer" not in prefill.commands[-1].constraint.grammar, "there is none beside a call"
    async with tool_cluster(tmp_path / "llama", LLAMA_TEMPLATE) as tools:
        with pytest.raises(grpc.aio.AioRpcError, match="not supported together with this model's tools"):
            await tools.cluster.inference.Generate(tool_request(constraint=HELD))


async def test_only_some_of_the_tools_may_be_called(tmp_path: Path) -> None:
    """The model is told of all, so that the prompt stays the same."""
    async with tool_cluster(tmp_path, HERMES_TEMPLATE.replace("</think>", "")) as tools:
        generate, prefill = tools.cluster.inference.Generate, tools.cluster.scripted[0]
        tools.say(HERMES_CALL)
        for mode, begin in (
            (inference_pb2.TOOL_MODE_AUTO, "start: (head whole)* TEXT\n"),
            (inference_pb2.TOOL_MODE_REQUIRED, 'start: "<tool_call>" whole '),
        ):
            whole = await generate(tool_request(tool_choice=inference_pb2.ToolChoice(mode=mode, allowed=["now"])))
            assert not whole.output.tool_calls
            grammar = prefill.commands[-1].constraint.grammar
            assert grammar.startswith(begin)
            assert "get_weather" not in grammar
            assert '"name": "get_weather"' in tools.prompt()


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"tool_choice": inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_AUTO, allowed=["now", "g"])},
        "tool_choice.allowed[1]",
    ),
    ({"tool_choice": inference_pb2.ToolChoice(function="now", allowed=["now"])}, "tool_choice.allowed"),
    ({"tools": [inference_pb2.Tool(name="f", parameters_schema='{"not": {}}')]}, "tools[0].parameters_schema"),
    ({"tools": [inference_pb2.Tool(name="f", parameters_schema='{"type": "string"}')]}, "tools[0].parameters_schema"),
    (
        {
            "tools": [
                inference_pb2.Tool(name=f"f{n}", parameters_schema=f'{{"$comment": "{"x" * 40_000}"}}') for n in (1, 2)
            ]
        },
        "tools",
    ),
    ({"constraint": types_pb2.Constraint(regex="a")}, "constraint"),
    ({"tool_choice": inference_pb2.ToolChoice(function="g")}, "tool_choice.function"),
    ({"tool_choice": inference_pb2.ToolChoice()}, "tool_choice.mode"),
]


async def test_what_cannot_be_enforced_is_refused(tmp_path: Path) -> None:
    required = inference_pb2.ToolChoice(mode=inference_pb2.TOOL_MODE_REQUIRED)
    async with tool_cluster(tmp_path, HERMES_TEMPLATE) as tools:
        tools.say("Hm.")
        for fields, field in REFUSED:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tools.cluster.inference.Generate(tool_request(**{"tool_choice": required, **fields}))
            assert code_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(f"{field}: ")
        free = tool_request(**REFUSED[2][0])
        assert (await tools.cluster.inference.Generate(free)).output.text == "Hm.", "nothing is enforced"
