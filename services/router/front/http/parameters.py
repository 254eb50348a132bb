"""Reads the fields that all endpoints share into a GenerateRequest, and refuses unsupported fields by name.

Types are checked here, ranges by the router's validation. The refused fields are those of OpenAI's API, and of vLLM's
additions, that change an answer and that Baton does not have: ignoring one would give an answer that was not asked for.
What chats or completions refuse, no endpoint ignores. Values that ask for nothing are accepted, since clients send
them. Fields that are neither refused nor supported are ignored.

What an output is constrained to has several spellings: OpenAI has `response_format`, vLLM `structured_outputs` and, in
older versions, `guided_json` and its like. They are the same thing, so two of them at once are refused. Every
constraint is kept to strictly, whatever `strict` says; what OpenAI demands of the schemas of a strict format (all
properties required, none additional) is not demanded. What a constraint may be says `services/rpc/constraints.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import InvalidRequest
from services.router.front.http.body import Body, as_list, as_number, as_record, as_text, as_whole, bounded
from services.router.front.validation import MAX_VARIABLES
from services.rpc.constraints import MAX_CHOICES
from services.rpc.json_schemas import schema_text
from services.rpc.parameters import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_ANSWERS,
    MAX_BAD_WORDS,
    MAX_LABEL_CHARS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
Params = Mapping[str, str]
"""Maps fields of a request to their names in the body."""


def read_constraint(body: Body, constraint: types_pb2.Constraint) -> Params:
    """Fills in the constraint, if the body has one, and returns where its parts stand there. Raises InvalidRequest."""
    found: dict[str, Params] = {}
    for name in FIELDS:
        value = body.take(name)
        if value is None or (name == "response_format" and _format(body.record(name)) == "text"):
            continue
        if found:
            raise InvalidRequest(name, f"cannot be given together with {next(iter(found))}")
        match name:
            case "response_format":
                found[name] = _response_format(body.record(name), constraint)
            case "structured_outputs":
                found[name] = _structured_outputs(body.record(name), constraint)
            case _:
                found[name] = _one(name.removeprefix("guided_"), value, name, constraint)
    return {"constraint": next(iter(found)), **next(iter(found.values()))} if found else {}


def _format(given: Body) -> str:
    kind = given.text("type")
    if kind not in ("text", "json_object", "json_schema"):
        shown = "missing" if kind is None else repr(kind[:32])
        raise InvalidRequest(given.path("type"), f"is {shown}; it must be 'text', 'json_object' or 'json_schema'")
    return kind


def _response_format(given: Body, constraint: types_pb2.Constraint) -> Params:
    kind = _format(given)
    if kind == "json_object":
        given.refuse_unknown()
        return _one("json_object", True, "response_format", constraint)
    described = given.record("json_schema")
    given.refuse_unknown()
    return _described(described, constraint)


def read_text_format(given: Body, constraint: types_pb2.Constraint) -> Params:
    """Reads the format of a response's text, in which the schema stands beside its name. Returns as `read_constraint`
    does."""
    kind, place = _format(given), given.path("type").removesuffix(".type")
    if kind == "text":
        return {}
    params = _described(given, constraint) if kind == "json_schema" else _one("json_object", True, place, constraint)
    given.refuse_unknown()
    return {"constraint": place, **params}


def _described(described: Body, constraint: types_pb2.Constraint) -> Params:
    """Reads a schema with its name."""
    for label in ("name", "description"):
        described.text(label)
    described.boolean("strict")
    schema, place = described.take("schema"), described.path("schema")
    described.refuse_unknown()
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(place, "is missing" if schema is None else "must be an object")
    return _one("json", schema, place, constraint)


_KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Parts of vLLM's `structured_outputs` that change what is made.
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")


def _structured_outputs(given: Body, constraint: types_pb2.Constraint) -> Params:
    for name in _OPTIONS:
        if given.boolean(name):
            raise InvalidRequest(given.path(name), "is not supported by this server")
    asked = {kind: given.take(kind) is not None for kind in _KINDS}
    asked["json_object"] = given.boolean("json_object") or False
    kinds = [kind for kind, is_asked in asked.items() if is_asked]
    given.refuse_unknown()
    if len(kinds) != 1:
        count = "none" if not kinds else " and ".join(kinds[:2])
        raise InvalidRequest("structured_outputs", f"has {count}; it must have one of {', '.join(_KINDS)}")
    return _one(kinds[0], given.take(kinds[0]), given.path(kinds[0]), constraint)


def _one(kind: str, value: Any, place: str, constraint: types_pb2.Constraint) -> Params:
    # Where the model may think or call a tool first, all of it becomes a grammar.
    params = {"constraint.grammar": place}
    match kind:
        case "json":
            constraint.json_schema = as_text(value, place) if isinstance(value, str) else schema_text(place, value)
            return {**params, "constraint.json_schema": place}
        case "json_object":
            constraint.json_object.SetInParent()
            return {**params, "constraint.json_object": place}
        case "choice":
            constraint.choices.SetInParent()
            for index, text in enumerate(as_list(value, place, MAX_CHOICES)):
                constraint.choices.texts.append(as_text(text, f"{place}[{index}]"))
            return {**params, "constraint.choices": place, "constraint.choices.texts": place}
        case _:
            setattr(constraint, kind, as_text(value, place))
            return {f"constraint.{kind}": place}


_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_SEEDS = (-(1 << 63), (1 << 64) - 1)
_TOKEN_ID = re.compile(r"[0-9]{1,9}", re.ASCII)


@dataclass(frozen=True)
class StreamOptions:
    stream: bool
    include_usage: bool
    """Whether a last chunk has the usage, and all others have null."""
    continuous_usage: bool
    """Whether each chunk has the usage so far, as with vLLM."""


def read_shared(body: Body, request: inference_pb2.GenerateRequest) -> tuple[StreamOptions, Params]:
    """Reads all fields but the prompt, max_tokens and logprobs. Raises InvalidRequest.

    Returns also the names in the body of the request's fields that have others there.
    """
    model = body.text("model")
    if model is not None:
        request.model = model
    params = {**_sampling(body, request.sampling), **_stopping(body, request.stopping)}
    priority, cache_salt = body.whole("priority"), body.text("cache_salt")
    if priority is not None:
        request.priority = priority
    if cache_salt is not None:
        request.cache_salt = cache_salt
    session = body.text("session")
    if session is not None:
        request.session = session
    _answers(body, request)
    skip_special_tokens, include_stop = body.boolean("skip_special_tokens"), body.boolean("include_stop_str_in_output")
    if skip_special_tokens is not None:
        request.response.skip_special_tokens = skip_special_tokens
    if include_stop is not None:
        request.response.include_stop_text = include_stop
    read_special_tokens(body, request)
    _truncation(body, request)
    constraint = types_pb2.Constraint()
    constrained = read_constraint(body, constraint)
    if constrained:
        request.constraint.CopyFrom(constraint)
    return _stream_options(body), {**params, **constrained}


def read_special_tokens(body: Body, request: inference_pb2.GenerateRequest) -> None:
    special = body.boolean("add_special_tokens")
    if special is not None:
        request.add_special_tokens = special


def _truncation(body: Body, request: inference_pb2.GenerateRequest) -> None:
    kept = body.whole("truncate_prompt_tokens")
    if kept == -1:  # vLLM's word for as many as fit
        request.truncate_prompt = True
    elif kept is not None:
        request.truncate_prompt_tokens = kept


@dataclass(frozen=True)
class TokenOptions:
    """Says how tokens are told."""

    are_ids: bool
    """Whether log-probabilities name tokens by their ids (vLLM's `return_tokens_as_token_ids`)."""
    are_listed: bool
    """Whether the ids of the prompt and of the output are listed (vLLM's `return_token_ids`)."""


AS_TEXTS = TokenOptions(are_ids=False, are_listed=False)


def read_token_options(body: Body, request: inference_pb2.GenerateRequest) -> TokenOptions:
    are_listed = body.boolean("return_token_ids") or False
    if are_listed:
        request.response.echo_token_ids = True
    return TokenOptions(body.boolean("return_tokens_as_token_ids") or False, are_listed)


def _answers(body: Body, request: inference_pb2.GenerateRequest) -> None:
    """Reads `n`. Its range is checked here too: a choice is prepared for each answer."""
    n, best_of = body.whole("n", (1, MAX_ANSWERS)), body.whole("best_of")
    if n is not None:
        request.n = n
    if best_of not in (None, 0, 1, n):
        raise InvalidRequest(body.path("best_of"), "is not supported by this server, unless it is n")


def _sampling(body: Body, sampling: types_pb2.SamplingParams) -> Params:
    for name in _NUMBERS:
        number = body.number(name)
        if number is not None:
            setattr(sampling, name, number)
    top_k, seed = body.whole("top_k"), body.whole("seed", _SEEDS)
    if top_k is not None:
        sampling.top_k = 0 if top_k == -1 else top_k  # vLLM's clients write -1 for all
    if seed is not None:
        sampling.seed = seed % (1 << 64)
    for index, token_id in enumerate(body.items("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)):
        sampling.allowed_token_ids.append(as_whole(token_id, f"allowed_token_ids[{index}]"))
    for index, word in enumerate(body.items("bad_words", MAX_BAD_WORDS)):
        sampling.bad_words.append(as_text(word, f"bad_words[{index}]"))
    value = body.take("logit_bias")
    biases = {} if value is None else as_record(value, "logit_bias")
    bounded(biases, "logit_bias", MAX_LOGIT_BIASES)
    if odd := [repr(text[:32]) for text in biases if not _TOKEN_ID.fullmatch(text)]:
        raise InvalidRequest("logit_bias", f"has keys that are no token ids: {', '.join(odd[:8])}")
    for text, bias in biases.items():
        sampling.logit_bias.add(token_id=int(text), bias=as_number(bias, f"logit_bias.{text}"))
    params = {"sampling.bad_token_ids": "bad_words"}
    for index, text in enumerate(biases):
        params |= dict.fromkeys(
            (f"sampling.logit_bias[{index}].{part}" for part in ("token_id", "bias")), f"logit_bias.{text}"
        )
    return params


def _stopping(body: Body, stopping: types_pb2.StoppingParams) -> Params:
    stop = body.take("stop")
    if isinstance(stop, list):
        bounded(stop, "stop", MAX_STOP_STRINGS)
        stopping.stop.extend(as_text(text, f"stop[{index}]") for index, text in enumerate(stop))
    elif stop is not None:
        stopping.stop.append(as_text(stop, "stop"))
    for index, token_id in enumerate(body.items("stop_token_ids", MAX_STOP_TOKEN_IDS)):
        stopping.stop_token_ids.append(as_whole(token_id, f"stop_token_ids[{index}]"))
    min_tokens, ignore_eos = body.whole("min_tokens"), body.boolean("ignore_eos")
    if min_tokens is not None:
        stopping.min_tokens = min_tokens
    if ignore_eos is not None:
        stopping.ignore_eos = ignore_eos
    return {"stopping.stop[0]": "stop"} if isinstance(stop, str) else {}


def read_prompt_logprobs(body: Body, options: StreamOptions) -> int | None:
    """Returns how many log-probabilities the prompt's tokens are to have (vLLM's field), None for none at all."""
    num_top = body.whole("prompt_logprobs")
    if num_top is not None and options.stream:
        raise InvalidRequest("prompt_logprobs", "is not available in a stream")
    return num_top


def _stream_options(body: Body) -> StreamOptions:
    stream = body.boolean("stream") or False
    if body.take("stream_options") is not None and not stream:
        raise InvalidRequest("stream_options", "is only allowed together with stream")
    options = body.record("stream_options")
    include_usage = options.boolean("include_usage") or False
    continuous_usage = options.boolean("continuous_usage_stats") or False
    return StreamOptions(stream, include_usage, include_usage and continuous_usage)


Neutral = Mapping[str, tuple[Any, ...]]
"""Maps a field to the values, beside null, that ask for nothing."""

OF_ENDINGS: Neutral = {"add_generation_prompt": (True,), "continue_final_message": (False,)}
"""Fields that say where a prompt of messages ends."""
VARIABLES = "chat_template_kwargs"
"""Has variables for the chat template."""
OF_TEMPLATES: Neutral = {
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
"""Fields that change how messages become a prompt."""
NOT_SERVED: Neutral = {
    **OF_TEMPLATES,
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": (),
    "guided_decoding_backend": (),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "reasoning_effort": ("medium",),
    # vLLM's
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "include_reasoning": (True,),
    "vllm_xargs": ({},),
    "structural_tag": (),
    "truncation_side": ("left",),
    "watermarking": (False,),
    "prompt_token_ids": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "ec_transfer_params": (),
    "enable_response_messages": (False,),
    "previous_input_messages": ([],),
    "previous_response": (),
    # SGLang's
    "regex": ("",),
    "ebnf": ("",),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "separate_reasoning": (True,),
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "lora_path": (),
    "return_hidden_states": (False,),
    "sampling_params": ({},),
    "input_ids": (),
    "extra_key": (),
    "session_params": ({},),
    "stream_reasoning": (True,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    # llama.cpp's; what only shapes another of them changes nothing by itself
    "grammar": ("",),
    "json_schema": ({},),
    "mirostat": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "repeat_penalty": (1,),
    "samplers": ([],),
    "n_predict": (),
    "n_keep": (0,),
    "n_indent": (0,),
    "n_probs": (0,),
    "t_max_predict_ms": (0,),
    "cache_prompt": (True,),
    "reasoning_format": ("auto",),
    "thinking_forced_open": (False,),
    "lora": ([],),
    "response_fields": ([],),
    "n_cmpl": (1,),
    "min_keep": (0,),
    "adaptive_target": (-1,),
    "return_tokens": (False,),
    "post_sampling_probs": (False,),
    "parse_tool_calls": (True,),
    "reasoning_in_content": (False,),
    "reasoning_budget_tokens": (-1,),
    "thinking_budget_tokens": (-1,),
    # of others
    "thinking": (),
    "enable_thinking": (),
    "think": (),
    "thinking_budget": (),
    "format": ("",),
    "random_seed": (),
    "safe_prompt": (False,),
    "truncate": (),
    "prompt_truncate_len": (),
    "context_length_exceeded_behavior": ("error",),
    "return_full_text": (False,),
    "decoder_input_details": (False,),
    "top_n_tokens": (0,),
    "max_length": (),
    "min_length": (0,),
    "banned_tokens": ([], ""),
    "banned_strings": ([], ""),
    "ban_eos_token": (False,),
    "add_bos_token": (True,),
    "token_healing": (False,),
    "temperature_last": (False,),
    "nsigma": (0,),
    "skew": (0,),
    "rep_pen": (1,),
    "extra_body": ({},),
    "typical": (1,),
    "top_a": (0,),
    "tfs": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "smoothing_factor": (0,),
    "no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "num_beams": (1,),
    "do_sample": (True,),
    "watermark": (False,),
    "stop_sequences": ([],),
    "options": ({},),
    "system_prompt": ("",),
}
"""Fields that no endpoint serves. Any that would change an answer stands here: there is no other such list."""
NOT_IN_COMPLETIONS: Neutral = {
    **NOT_SERVED,
    **OF_ENDINGS,
    VARIABLES: ({},),
    "reasoning": ({},),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
NOT_IN_CHAT: Neutral = {**NOT_SERVED, "echo": (False,), "reasoning": ({},)}


def read_variables(body: Body, chat: inference_pb2.ChatMessages) -> Params:
    """Reads what the chat template is given beside its own variables. Returns as `read_constraint` does."""
    given = body.take(VARIABLES)
    variables = {} if given is None else as_record(given, VARIABLES)
    bounded(variables, VARIABLES, MAX_VARIABLES)
    for name, value in variables.items():
        place = f"{VARIABLES}.{as_text(name, VARIABLES)[:MAX_LABEL_CHARS]}"
        match value:
            case None:
                continue
            case bool():
                chat.template_variables.add(name=name, boolean=value)
            case int():
                chat.template_variables.add(name=name, whole=as_whole(value, place))
            case float():
                chat.template_variables.add(name=name, number=as_number(value, place))
            case str():
                chat.template_variables.add(name=name, text=as_text(value, place))
            case _:
                raise InvalidRequest(place, "must be a text, a number, true or false")
    return {"messages.template_variables": VARIABLES}


def refuse_unsupported(body: Body, fields: Neutral) -> None:
    """Raises an InvalidRequest that names the first field which asks for what Baton does not have."""
    for name, neutral in fields.items():
        value = body.take(name)
        if value is not None and not any(_same(value, other) for other in neutral):
            raise InvalidRequest(body.path(name), "is not supported by this server")


def _same(value: Any, other: Any) -> bool:
    """Returns whether two values are equal as JSON, in which true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
