"""Serves /v1/completions: the model continues texts or token ids, several in one call if asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest
from services.router.front.http.answers import Ending, HttpCall, Json, Objects, Prompt
from services.router.front.http.body import Body, as_text, as_whole, bounded
from services.router.front.http.parameters import (
    NOT_IN_COMPLETIONS,
    read_prompt_logprobs,
    read_shared,
    refuse_unsupported,
)
from services.router.front.http.prompt_scores import PromptScores, completion_logprobs
from services.router.front.incoming import Incoming
from services.router.front.validation import MAX_PROMPT_TOKENS
from services.router.text.token_texts import TokenTexts

MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""
_OBJECTS = Objects("cmpl-", "text_completion", "text_completion")
# Fields of a GenerateRequest whose errors are the prompt's.
_PROMPT_FIELDS = ("text", "token_ids", "prompt")


def read_call(body: Body, texts: TokenTexts) -> HttpCall:
    """Returns the call that the body describes. Raises InvalidRequest."""
    refuse_unsupported(body, NOT_IN_COMPLETIONS)
    requests = {place: _request(prompt, place) for place, prompt in _prompts(body.take("prompt")).items()}
    shared = inference_pb2.GenerateRequest()
    options, constrained = read_shared(body, shared)
    max_tokens, logprobs, echo = body.whole("max_tokens"), body.whole("logprobs"), body.boolean("echo")
    # Workers make at least one token, which is not told to a client that wants none.
    is_echo_only = max_tokens == 0 and echo is True and not options.stream
    if is_echo_only:
        max_tokens = 1
    shared.stopping.max_tokens = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    if logprobs is not None:
        shared.response.logprobs = logprobs
    if echo and logprobs is not None and options.stream:
        raise InvalidRequest("echo", "is not supported together with logprobs in a stream")
    num_echoed, num_top = logprobs if echo else None, read_prompt_logprobs(body, options)
    prompts = []
    for index, (place, request) in enumerate(requests.items()):
        scores = PromptScores(texts, num_echoed=num_echoed, num_top=num_top)
        scores.ask(shared.response)
        request.MergeFrom(shared)
        num_answers, echoed = request.n or 1, _prompt_of(request) if echo else None
        choices = range(index * num_answers, (index + 1) * num_answers)
        style, *further = [CompletionStyle(texts, choice, echoed, scores) for choice in choices]
        params = {**dict.fromkeys(_PROMPT_FIELDS, place), **constrained}
        if num_top is None:
            params["response.prompt_logprobs"] = "logprobs"
        incoming = Incoming(request, has_default_output=max_tokens is None)
        prompts.append(Prompt(incoming, style, params, is_echo_only=is_echo_only, further_styles=further))
    return HttpCall(prompts, options, _OBJECTS)


def _prompts(value: Any) -> dict[str, Any]:
    """Returns the prompts by their places in the body. A list of one prompt is the same as that prompt."""
    if value is None:
        raise InvalidRequest("prompt", "is missing")
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return {"prompt": value}
    bounded(value, "prompt", MAX_PROMPTS)
    if len(value) == 1:
        return {"prompt": value[0]}
    kind = type(value[0])
    for index, prompt in enumerate(value):
        if not isinstance(prompt, kind):
            what = "a string" if kind is str else "a list of token ids"
            raise InvalidRequest(f"prompt[{index}]", f"must be {what}, as the first is: prompts cannot be mixed")
    if kind is list and (num_tokens := sum(map(len, value))) > MAX_PROMPT_TOKENS:
        raise InvalidRequest("prompt", f"has {num_tokens} token ids; at most {MAX_PROMPT_TOKENS} are allowed")
    return {f"prompt[{index}]": prompt for index, prompt in enumerate(value)}


def _request(prompt: Any, place: str) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    if isinstance(prompt, list):
        request.token_ids.SetInParent()
        read_ids(request.token_ids.ids, prompt, place, MAX_PROMPT_TOKENS)
    elif isinstance(prompt, str):
        request.text = as_text(prompt, place)
    else:
        raise InvalidRequest(place, "must be a string or a list of token ids")
    return request


def read_ids(ids: Any, prompt: list[Any], place: str, most: int) -> None:
    """Adds a list's token ids: all at once if they are valid, otherwise one by one, to name the first that is not.

    Raises InvalidRequest for an entry that is no id, or for more than `most`.
    """
    bounded(prompt, place, most)
    if all(kind is int for kind in set(map(type, prompt))):
        with contextlib.suppress(ValueError):  # an id beyond 32 bits
            ids.extend(prompt)
            return
        del ids[:]
    ids.extend(as_whole(token_id, f"{place}[{index}]") for index, token_id in enumerate(prompt))


def _prompt_of(request: inference_pb2.GenerateRequest) -> str | list[int]:
    return request.text if request.HasField("text") else list(request.token_ids.ids)


class CompletionStyle:
    def __init__(self, texts: TokenTexts, index: int, echoed: str | Sequence[int] | None, scores: PromptScores) -> None:
        """`index` is that of its choice. `echoed` is the prompt, if it is to be written before the output."""
        self.scores = scores
        self._texts = texts
        self._index = index
        self._echoed = echoed
        self._offset = 0

    def whole(self, output: inference_pb2.Chunk, ending: Ending) -> Json:
        self._offset = self.scores.num_chars
        logprobs = self.scores.echoed(self._logprobs(output))
        choice = self._choice(self._prompt() + output.text, logprobs)
        return {**choice, **ending.fields(), **self.scores.fields()}

    def opening(self) -> Json | None:
        prompt = self._prompt()
        return self._choice(prompt) if prompt else None

    def delta(self, chunk: inference_pb2.Chunk) -> Json | None:
        logprobs = self._logprobs(chunk)
        return self._choice(chunk.text, logprobs) if chunk.text or logprobs else None

    def closing(self, ending: Ending) -> Json:
        return {**self._choice(""), **ending.fields()}

    def _prompt(self) -> str:
        """Returns the prompt to echo.

        Call it only once the request was found valid: before, token ids may be anything.
        """
        if self._echoed is None:
            return ""
        return self._echoed if isinstance(self._echoed, str) else self._texts.join(self._echoed)

    def _logprobs(self, chunk: inference_pb2.Chunk) -> Json | None:
        if not chunk.logprobs:
            return None
        lists = completion_logprobs(self._texts, chunk.token_ids, chunk.logprobs, self._offset)
        self._offset += sum(len(self._texts[token_id].text) for token_id in chunk.token_ids)
        return lists

    def _choice(self, text: str, logprobs: Json | None = None) -> Json:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}
