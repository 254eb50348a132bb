"""Checks a GenerateRequest against the ranges its proto states, and turns its tools, and the messages about them, into
what chat templates know. Pure: never tokenises, queues or places.

Every error is an InvalidRequest that names the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import InvalidRequest
from services.router.text.chat import OWN_VARIABLES, Message, Tool, Variables
from services.router.text.model_facts import ModelFacts
from services.router.text.output.families import NONE, ModelForms
from services.router.text.output.form import PLAIN, OutputForm
from services.router.text.output.grammar import any_answer, json_answer, output_grammar
from services.rpc.constraints import MAX_GRAMMAR_BYTES, check_constraint
from services.rpc.json_schemas import MAX_SCHEMA_BYTES, check_json_schema
from services.rpc.parameters import MAX_ANSWERS, MAX_LOGPROBS, check_label, check_sampling, check_stopping, within

MAX_TOOLS = 128
MAX_CALLS = 128
"""The most calls in one message."""
MAX_DESCRIPTION_BYTES = 16 << 10
MAX_SCHEMAS_BYTES = 256 << 10
"""The most bytes of all schemas together."""
MAX_SCHEMA_VALUES = 1 << 14
"""The most values in all schemas together, by their brackets and commas."""
CHAT_ROLES = ("system", "user", "assistant", "tool")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS = '{"additionalProperties": false}'
_NO_TOOLS = "this model's chat template knows no tools"


def check_tools(request: inference_pb2.GenerateRequest, forms: ModelForms) -> None:
    """Checks the tools and what is asked of them. It takes some milliseconds for the largest."""
    if not request.tools:
        if request.HasField("tool_choice"):
            raise InvalidRequest("tool_choice", "is only allowed together with tools")
        return
    if request.WhichOneof("prompt") != "messages":
        raise InvalidRequest("tools", "are only allowed together with messages")
    if len(request.tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"has {len(request.tools)} entries; at most {MAX_TOOLS} are allowed")
    _check_schema_sizes(request.tools)
    names = set[str]()
    for index, tool in enumerate(request.tools):
        _check_tool(f"tools[{index}]", tool, names)
        names.add(tool.name)
    _check_choice(request, names)
    if not tells_tools(request):
        return
    if not forms.knows_tools:
        raise InvalidRequest("tools", f"are not supported: {_NO_TOOLS}")
    if forms.tools is None:
        raise InvalidRequest("tools", "are not supported: how this model calls them is not known (--tool-parser)")
    kind = request.constraint.WhichOneof("kind")
    if kind in _WHOLE_OUTPUTS or (kind is not None and forms.tools.is_document):
        raise InvalidRequest(
            "constraint", "is not supported together with this model's tools, except with tool_choice none"
        )
    _check_enforced(request)


def _check_enforced(request: inference_pb2.GenerateRequest) -> None:
    """Checks the schemas that calls will be held to."""
    enforced = {index: tool for index, tool in enumerate(request.tools) if _is_enforced(tool, request)}
    num_bytes = sum(len(tool.parameters_schema.encode()) for tool in enforced.values())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            "tools",
            f"have {num_bytes} bytes of schemas that calls must follow; at most {MAX_GRAMMAR_BYTES} are allowed",
        )
    for index, tool in enforced.items():
        field = f"tools[{index}].parameters_schema"
        if tool.parameters_schema:
            check_json_schema(field, tool.parameters_schema)
            if json.loads(tool.parameters_schema).get("type", "object") != "object":
                raise InvalidRequest(field, "is not of an object, which arguments are")


def _is_enforced(tool: inference_pb2.Tool, request: inference_pb2.GenerateRequest) -> bool:
    """Returns whether calls of this tool must have arguments that are valid under its schema."""
    if required := required_calls(request):
        return tool.name in required
    return tool.strict


def required_calls(request: inference_pb2.GenerateRequest) -> frozenset[str]:
    """Returns the functions of which one must be called; none if the model may answer without a call."""
    if request.tool_choice.WhichOneof("choice") == "function":
        return frozenset([request.tool_choice.function])
    is_required = request.tool_choice.mode == inference_pb2.TOOL_MODE_REQUIRED
    return _allowed_calls(request) if is_required else frozenset()


def _allowed_calls(request: inference_pb2.GenerateRequest) -> frozenset[str]:
    """Returns the functions that may be called."""
    return frozenset(request.tool_choice.allowed or (tool.name for tool in request.tools))


def constrain_output(
    request: inference_pb2.GenerateRequest, form: OutputForm, forms: ModelForms, special_ids: Mapping[str, int]
) -> None:
    """Makes the request's constraint one of the whole output, if there may be more in it than the answer: what the
    model thinks, and calls, which must be made, or must follow schemas. Raises InvalidRequest."""
    answer = None if form.is_plain else _answer_rule(request.constraint)
    required = required_calls(request)
    is_free = not required and not request.tool_choice.allowed and not any(tool.strict for tool in request.tools)
    if answer is None and (form.tools is None or is_free):
        return
    schemas = {
        tool.name: json.loads(tool.parameters_schema or _NO_PARAMETERS) if _is_enforced(tool, request) else {}
        for tool in request.tools
        if tool.name in (required or form.names)
    }
    request.constraint.grammar = output_grammar(
        form, schemas, special_ids, is_required=bool(required), is_listed=forms.lists_calls, answer=answer
    )
    try:
        check_constraint(request.constraint)
    except InvalidRequest as error:
        field = "constraint.grammar" if form.tools is None else "tools"
        raise InvalidRequest(field, f"cannot be enforced: the grammar of the output {error.description}") from None


def _answer_rule(constraint: types_pb2.Constraint) -> str | None:
    """Returns what the constraint is as a rule of a grammar; None if there is none."""
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return json_answer(json.loads(constraint.json_schema))
        case "json_object":
            return json_answer({"type": "object"})
        case "choices":
            return any_answer(constraint.choices.texts)
        case _:
            return None


def _check_schema_sizes(tools: Sequence[inference_pb2.Tool]) -> None:
    num_bytes = num_values = 0
    for index, tool in enumerate(tools):
        schema = tool.parameters_schema
        size = len(schema.encode())
        if size > MAX_SCHEMA_BYTES:
            raise InvalidRequest(
                f"tools[{index}].parameters_schema", f"has {size} bytes; at most {MAX_SCHEMA_BYTES} are allowed"
            )
        num_bytes += size
        num_values += sum(map(schema.count, ",[{"))
    if num_bytes > MAX_SCHEMAS_BYTES:
        raise InvalidRequest("tools", f"have {num_bytes} bytes of schemas; at most {MAX_SCHEMAS_BYTES} are allowed")
    if num_values > MAX_SCHEMA_VALUES:
        raise InvalidRequest("tools", f"have schemas with more than {MAX_SCHEMA_VALUES} values")


def _check_tool(field: str, tool: inference_pb2.Tool, names: set[str]) -> None:
    if not _NAME.fullmatch(tool.name):
        raise InvalidRequest(f"{field}.name", "must be 1 to 64 letters, digits, '_', '-' and '.'")
    if tool.name in names:
        raise InvalidRequest(f"{field}.name", f"is {tool.name!r}, as that of another tool")
    num_bytes = len(tool.description.encode())
    if num_bytes > MAX_DESCRIPTION_BYTES:
        raise InvalidRequest(
            f"{field}.description", f"has {num_bytes} bytes; at most {MAX_DESCRIPTION_BYTES} are allowed"
        )
    if tool.parameters_schema:
        try:
            schema = json.loads(tool.parameters_schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field}.parameters_schema", f"is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{field}.parameters_schema", "is not a JSON object")


def _check_choice(request: inference_pb2.GenerateRequest, names: set[str]) -> None:
    if not request.HasField("tool_choice"):
        return
    choice = request.tool_choice
    if choice.WhichOneof("choice") == "function":
        if choice.function not in names:
            raise InvalidRequest("tool_choice.function", f"is {choice.function[:64]!r}, which is none of the tools")
    elif choice.mode not in _MODES:
        raise InvalidRequest("tool_choice.mode", "is none of the known modes")
    if choice.allowed and choice.mode not in (inference_pb2.TOOL_MODE_AUTO, inference_pb2.TOOL_MODE_REQUIRED):
        raise InvalidRequest("tool_choice.allowed", "goes with the modes auto and required only")
    if len(choice.allowed) > MAX_TOOLS:
        raise InvalidRequest(
            "tool_choice.allowed", f"has {len(choice.allowed)} entries; at most {MAX_TOOLS} are allowed"
        )
    for index, name in enumerate(choice.allowed):
        if name not in names:
            raise InvalidRequest(f"tool_choice.allowed[{index}]", f"is {name[:64]!r}, which is none of the tools")


_MODES = (inference_pb2.TOOL_MODE_AUTO, inference_pb2.TOOL_MODE_NONE, inference_pb2.TOOL_MODE_REQUIRED)
_WHOLE_OUTPUTS = ("regex", "grammar")
"""Kinds of constraints that cannot be a part of a grammar: nothing may be thought, and nothing called, beside them."""


def check_chat(messages: Sequence[inference_pb2.ChatMessage], forms: ModelForms) -> None:
    """Checks roles, and what only messages of some roles have."""
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if message.role not in CHAT_ROLES:
            raise InvalidRequest(f"{field}.role", f"is {message.role[:64]!r}, not one of {', '.join(CHAT_ROLES)}")
        check_label(f"{field}.name", message.name)
        check_label(f"{field}.tool_call_id", message.tool_call_id)
        is_tool = message.role == "tool"
        if (is_tool or message.tool_calls) and not forms.knows_tools:
            raise InvalidRequest(f"{field}.{'role' if is_tool else 'tool_calls'}", f"is not supported: {_NO_TOOLS}")
        if is_tool and not message.tool_call_id:
            raise InvalidRequest(f"{field}.tool_call_id", "is missing")
        if message.tool_call_id and not is_tool:
            raise InvalidRequest(f"{field}.tool_call_id", "is only allowed in messages of a tool")
        for name in ("tool_calls", "reasoning"):
            if getattr(message, name) and message.role != "assistant":
                raise InvalidRequest(f"{field}.{name}", "is only allowed in messages of the assistant")
        _check_calls(f"{field}.tool_calls", message.tool_calls)


def _check_calls(field: str, calls: Sequence[inference_pb2.ToolCall]) -> None:
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(field, f"has {len(calls)} entries; at most {MAX_CALLS} are allowed")
    for index, call in enumerate(calls):
        check_label(f"{field}[{index}].id", call.id)
        check_label(f"{field}[{index}].name", call.name)
        if not call.name:
            raise InvalidRequest(f"{field}[{index}].name", "is missing")


def tells_tools(request: inference_pb2.GenerateRequest) -> bool:
    """Returns whether the model is told of tools."""
    return bool(request.tools) and request.tool_choice.mode != inference_pb2.TOOL_MODE_NONE


def tools_of(request: inference_pb2.GenerateRequest) -> list[Tool]:
    """Returns the tools that the model is told of."""
    if not tells_tools(request):
        return []
    return [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters_schema}
        for tool in request.tools
    ]


def messages_of(request: inference_pb2.GenerateRequest) -> list[Message]:
    """Returns the messages as templates know them. The result of a call has the name of its function, which some
    templates need, also where the client has left it out."""
    messages, called = list[Message](), dict[str, str]()
    for entry in request.messages.messages:
        message: dict[str, object] = {"role": entry.role, "content": entry.content}
        if entry.reasoning:
            message["reasoning_content"] = entry.reasoning
        if entry.tool_calls:
            called.update((call.id, call.name) for call in entry.tool_calls)
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in entry.tool_calls
            ]
        if entry.tool_call_id:
            message["tool_call_id"] = entry.tool_call_id
        if name := entry.name or called.get(entry.tool_call_id, ""):
            message["name"] = name
        messages.append(message)
    return messages


def variables_of(chat: inference_pb2.ChatMessages) -> Variables:
    """Returns what the template is given beside its own variables."""
    return {each.name: getattr(each, each.WhichOneof("value")) for each in chat.template_variables}


def chat_texts(request: inference_pb2.GenerateRequest) -> list[str]:
    """Returns all texts of messages, tools and variables."""
    texts = [text for tool in request.tools for text in (tool.name, tool.description, tool.parameters_schema)]
    texts += (variable.text for variable in request.messages.template_variables)
    for message in request.messages.messages:
        texts += (message.content, message.reasoning, message.name, message.tool_call_id)
        texts += (text for call in message.tool_calls for text in (call.id, call.name, call.arguments))
    return texts


def output_form(request: inference_pb2.GenerateRequest, forms: ModelForms, *, is_thinking: bool) -> OutputForm:
    """Returns how the request's outputs are taken apart. `is_thinking`: the prompt ends within what is thought."""
    if request.WhichOneof("prompt") != "messages" or request.constraint.WhichOneof("kind") in _WHOLE_OUTPUTS:
        return PLAIN
    if not tells_tools(request):
        return OutputForm(forms.reasoning, is_thinking) if forms.reasoning != NONE else PLAIN
    is_named = request.tool_choice.WhichOneof("choice") == "function"
    is_alone = request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    only_one = is_named or is_alone or forms.only_one_call
    names, only_calls = _allowed_calls(request), bool(required_calls(request))
    return OutputForm(forms.reasoning, is_thinking, forms.tools, names, only_one_call=only_one, only_calls=only_calls)


MAX_MESSAGES = 1024
MAX_VARIABLES = 32
"""The most variables that a chat template is given by a client."""
MAX_VARIABLE_CHARS = 4096
MAX_PROMPT_TOKENS = 1 << 20
"""The most token ids in a prompt, even in one that is to be truncated."""
MAX_PRIORITY = 100
MOST_LOGPROB_BYTES = 3 << 20
"""The most bytes of log-probabilities in an answer of one message: gRPC's clients take no more than 4 MiB unless told
to, and the text is in it too."""
_TOKEN_BYTES, _TOP_BYTES = 8, 13
"""A position's log-probability, and each of the likeliest tokens', encoded: with the longest ids and no more."""
_RANK_BYTES = 4
MOST_PROMPT_ENTRIES = 1 << 16
"""The most log-probabilities of one prompt: that of each token, and those of the likeliest at its place."""


def validate(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> None:
    """Raises InvalidRequest.

    Lengths in tokens, and token ids, are checked later, when the prompt is known to be no longer than its context.
    """
    if request.HasField("request_id"):
        check_label("request_id", request.request_id)
        if not request.request_id:
            raise InvalidRequest("request_id", "is empty")
    check_label("session", request.session)
    check_label("cache_salt", request.cache_salt)
    if request.HasField("cache_salt") and not request.cache_salt:
        raise InvalidRequest("cache_salt", "is empty")
    within("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.HasField("n"):
        within("n", request.n, 1, MAX_ANSWERS)
    if request.HasField("truncate_prompt_tokens"):
        within("truncate_prompt_tokens", request.truncate_prompt_tokens, 1, MAX_PROMPT_TOKENS)
    _prompt(request, facts)
    check_tools(request, facts.forms)
    check_sampling(request.sampling, facts.vocab_size)
    check_stopping(request.stopping, facts.vocab_size, least_tokens=0 if request.response.echo_text else 1)
    if request.stopping.HasField("max_tokens") and request.stopping.min_tokens > request.stopping.max_tokens:
        raise InvalidRequest("stopping.min_tokens", f"is {request.stopping.min_tokens}, more than max_tokens")
    if request.response.HasField("logprobs"):
        within("response.logprobs", request.response.logprobs, 0, MAX_LOGPROBS)
    if request.response.HasField("prompt_logprobs"):
        within("response.prompt_logprobs", request.response.prompt_logprobs, 0, MAX_LOGPROBS)
    if request.HasField("constraint"):
        check_constraint(request.constraint)


def check_prompt_logprobs(request: inference_pb2.GenerateRequest, num_prompt_tokens: int) -> None:
    """Raises InvalidRequest if more of the prompt's log-probabilities are wanted than an answer may have."""
    num_entries = num_prompt_entries(request, num_prompt_tokens)
    if num_entries > MOST_PROMPT_ENTRIES:
        room = MOST_PROMPT_ENTRIES // (1 + request.response.prompt_logprobs)
        raise InvalidRequest(
            "response.prompt_logprobs",
            f"is {request.response.prompt_logprobs}: with it a prompt may have {room} tokens, and has "
            f"{num_prompt_tokens}",
        )


def num_prompt_entries(request: inference_pb2.GenerateRequest, num_prompt_tokens: int) -> int:
    """Returns how many log-probabilities of the prompt the answer has."""
    if not request.response.HasField("prompt_logprobs"):
        return 0
    return num_prompt_tokens * (1 + request.response.prompt_logprobs)


def check_fits_one_message(
    request: inference_pb2.GenerateRequest, context_tokens: int, num_prompt_tokens: int = 0
) -> None:
    """Raises InvalidRequest if a whole answer's log-probabilities, or several answers, could be more than a client
    takes in one message: it would learn of that when all is computed. Log-probabilities of the prompt count too, once
    `num_prompt_tokens` is known."""
    num_answers = request.n or 1
    if not request.response.HasField("logprobs") and num_answers == 1:
        return
    taken = 0
    if request.response.HasField("prompt_logprobs"):
        per_token = _TOKEN_BYTES + _RANK_BYTES + request.response.prompt_logprobs * _TOP_BYTES
        taken = num_prompt_tokens * per_token
    most_tokens = context_tokens - 1
    if request.stopping.HasField("max_tokens"):
        most_tokens = min(most_tokens, request.stopping.max_tokens)
    num_logprobs = request.response.logprobs
    room = (MOST_LOGPROB_BYTES - taken) // (_TOKEN_BYTES + num_logprobs * _TOP_BYTES) // num_answers
    if most_tokens > room:
        field, asked = ("response.logprobs", num_logprobs) if num_answers == 1 else ("n", num_answers)
        raise InvalidRequest(
            field,
            f"is {asked}, and an answer may have {most_tokens} tokens: more than gRPC's clients take in one "
            f"message. Use GenerateStream, or stopping.max_tokens of at most {room}",
        )


def _prompt(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> None:
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidRequest("text", "is empty")
            _text_bytes("text", [request.text], facts)
        case "token_ids":
            num_ids = len(request.token_ids.ids)
            if not num_ids:
                raise InvalidRequest("token_ids", "is empty")
            if num_ids > MAX_PROMPT_TOKENS:
                raise InvalidRequest("token_ids", f"has {num_ids} entries; at most {MAX_PROMPT_TOKENS} are allowed")
        case "messages":
            _messages(request, facts)
        case _:
            raise InvalidRequest("prompt", "is missing: set text, token_ids or messages")


def _messages(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> None:
    chat = request.messages
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"has {len(chat.messages)} entries; 1 to {MAX_MESSAGES} are allowed")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest("messages.continue_final_message", "cannot be given together with add_generation_prompt")
    if request.response.echo_text:
        raise InvalidRequest("response.echo_text", "is not available with messages")
    check_chat(chat.messages, facts.forms)
    _variables(chat)
    _text_bytes("messages", chat_texts(request), facts)


def _variables(chat: inference_pb2.ChatMessages) -> None:
    field = "messages.template_variables"
    if (count := len(chat.template_variables)) > MAX_VARIABLES:
        raise InvalidRequest(field, f"has {count} entries; at most {MAX_VARIABLES} are allowed")
    for variable in chat.template_variables:
        check_label(field, variable.name)
        place = f"{field}.{variable.name}"
        if variable.name in OWN_VARIABLES:
            raise InvalidRequest(place, "is a variable that the server sets")
        if variable.WhichOneof("value") is None:
            raise InvalidRequest(place, "has no value")
        if len(variable.text) > MAX_VARIABLE_CHARS:
            raise InvalidRequest(
                place, f"has {len(variable.text)} characters; at most {MAX_VARIABLE_CHARS} are allowed"
            )


def check_token_ids(token_ids: Sequence[int], facts: ModelFacts, field: str = "token_ids") -> None:
    """Raises InvalidRequest if an id is out of range.

    It walks through all ids: call it only if they are known to be few.
    """
    if min(token_ids) < 0 or max(token_ids) >= facts.vocab_size:
        raise InvalidRequest(field, f"has ids outside [0, {facts.vocab_size})")


def utf8_bytes(texts: Iterable[str]) -> int:
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


def _text_bytes(field: str, texts: Sequence[str], facts: ModelFacts) -> None:
    num_bytes = utf8_bytes(texts)
    if num_bytes > facts.max_text_bytes:
        raise InvalidRequest(field, f"has {num_bytes} bytes of text; at most {facts.max_text_bytes} are allowed")
