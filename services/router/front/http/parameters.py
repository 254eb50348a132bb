"""Reads the fields that both endpoints share into a GenerateRequest, and refuses unsupported fields by name.

Types are checked here, ranges by the router's validation. The refused fields are those of OpenAI's API, and of vLLM's
additions, that change an answer and that Baton does not have: ignoring one would give an answer that was not asked for.
Values that ask for nothing are accepted, since clients send them. Fields that are neither refused nor supported are
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import InvalidRequest
from services.router.front.http.body import Body, as_number, as_record, as_text, as_whole, bounded
from services.rpc.parameters import MAX_LOGIT_BIASES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_SEEDS = (-(1 << 63), (1 << 64) - 1)


@dataclass(frozen=True)
class StreamOptions:
    stream: bool
    include_usage: bool
    """Whether a last chunk has the usage, and all others have null."""
    continuous_usage: bool
    """Whether each chunk has the usage so far, as with vLLM."""


def read_shared(body: Body, request: inference_pb2.GenerateRequest) -> StreamOptions:
    """Reads all fields but the prompt, max_tokens and logprobs. Raises InvalidRequest."""
    model = body.text("model")
    if model is not None:
        request.model = model
    _sampling(body, request.sampling)
    _stopping(body, request.stopping)
    priority, cache_salt = body.whole("priority"), body.text("cache_salt")
    if priority is not None:
        request.priority = priority
    if cache_salt is not None:
        request.cache_salt = cache_salt
    skip_special_tokens = body.boolean("skip_special_tokens")
    if skip_special_tokens is not None:
        request.response.skip_special_tokens = skip_special_tokens
    return _stream_options(body)


def _sampling(body: Body, sampling: types_pb2.SamplingParams) -> None:
    for name in _NUMBERS:
        number = body.number(name)
        if number is not None:
            setattr(sampling, name, number)
    top_k, seed = body.whole("top_k"), body.whole("seed", _SEEDS)
    if top_k is not None:
        sampling.top_k = 0 if top_k == -1 else top_k  # vLLM's clients write -1 for all
    if seed is not None:
        sampling.seed = seed % (1 << 64)
    value = body.take("logit_bias")
    biases = {} if value is None else as_record(value, "logit_bias")
    bounded(biases, "logit_bias", MAX_LOGIT_BIASES)
    for text, bias in biases.items():
        if not (text.isascii() and text.isdecimal()) or len(text) > 9:
            raise InvalidRequest("logit_bias", f"has the key {text[:32]!r}, which is no token id")
        sampling.logit_bias.add(token_id=int(text), bias=as_number(bias, f"logit_bias.{text}"))


def _stopping(body: Body, stopping: types_pb2.StoppingParams) -> None:
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

_NOT_IN_BOTH: Neutral = {
    "n": (1,),
    "best_of": (0, 1),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "kv_transfer_params": (),
}
NOT_IN_COMPLETIONS: Neutral = {**_NOT_IN_BOTH, "suffix": ("",), "prompt_embeds": (), "add_special_tokens": (True,)}
NOT_IN_CHAT: Neutral = {
    **_NOT_IN_BOTH,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}


def refuse_unsupported(body: Body, fields: Neutral) -> None:
    """Raises an InvalidRequest that names the first field which asks for what Baton does not have."""
    for name, neutral in fields.items():
        value = body.take(name)
        if value is not None and not any(_same(value, other) for other in neutral):
            raise InvalidRequest(body.path(name), "is not supported by this server")


def _same(value: Any, other: Any) -> bool:
    """Returns whether two values are equal as JSON, in which true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
