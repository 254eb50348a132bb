"""Serves /v1/completions: the model continues texts or token ids, several in one call if asked for."""

from __future__ import annotations

import contextlib
from typing import Any

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest
from services.router.front.call import Incoming
from services.router.front.http.answers import (
    Ending,
    HttpCall,
    Json,
    Objects,
    Prompt,
    PromptScores,
    TextPlaces,
    completion_logprobs,
)
from services.router.front.http.body import Body, as_text, as_whole, bounded
from services.router.front.http.parameters import (
    NOT_IN_COMPLETIONS,
    read_prompt_logprobs,
    read_shared,
    read_token_options,
    refuse_unsupported,
)
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
    tokens = read_token_options(body, shared)
    max_tokens, logprobs, echo = body.whole("max_tokens"), body.whole("logprobs"), body.boolean("echo")
    if echo:
        shared.response.echo_text = True
    shared.stopping.max_tokens = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    if logprobs is not None:
        shared.response.logprobs = logprobs
        shared.response.echo_token_ids = True
    num_echoed, num_top = logprobs if echo else None, read_prompt_logprobs(body, options)
    prompts = []
    for index, (place, request) in enumerate(requests.items()):
        scores = PromptScores(texts, tokens, num_echoed=num_echoed, num_top=num_top, is_streamed=options.stream)
        scores.ask(shared.response)
        request.MergeFrom(shared)
        num_answers = request.n or 1
        choices = range(index * num_answers, (index + 1) * num_answers)
        style, *further = [CompletionStyle(texts, choice, scores) for choice in choices]
        params = {**dict.fromkeys(_PROMPT_FIELDS, place), **constrained}
        if num_top is None:
            params["response.prompt_logprobs"] = "logprobs"
        incoming = Incoming(request, has_default_output=max_tokens is None)
        prompts.append(Prompt(incoming, style, params, further_styles=further))
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


class CompletionStyle:
    def __init__(self, texts: TokenTexts, index: int, scores: PromptScores) -> None:
        """`index` is that of its choice."""
        self.scores = scores
        self._texts = texts
        self._index = index
        self._text = ""
        """What has come of the text, if the places of tokens in it are told."""
        self._places: TextPlaces | None = None
        self._untold = dict[str, list[object]]()
        """The lists of the tokens whose places in the text are not certain."""
        self._has_begun = False

    def whole(self, output: inference_pb2.Chunk, ending: Ending) -> Json:
        lists = self.scores.echoed(self._lists(output))
        if lists is not None:
            places = self._places_of(output)
            lists["text_offset"] = list(places.told(output.text, is_whole=True))
        choice = {**self._choice(output.text, lists), **ending.fields(), **self.scores.fields()}
        return {**choice, **self.scores.listed(output), **self.scores.prompt_ids()}

    def opening(self) -> Json | None:
        return None

    def delta(self, chunk: inference_pb2.Chunk) -> Json | None:
        logprobs = self._told(chunk)
        listed = self.scores.listed(chunk) if self.scores.tokens.are_listed and chunk.token_ids else {}
        if not (chunk.text or logprobs or listed):
            return None
        return {**self._choice(chunk.text, logprobs), **listed, **self._first()}

    def closing(self, ending: Ending) -> Json:
        logprobs = self._told(None)
        return {**self._choice("", logprobs), **ending.fields(), **self._first()}

    def _first(self) -> Json:
        """Returns what only the first choice of a stream has."""
        has_begun, self._has_begun = self._has_begun, True
        return {} if has_begun else self.scores.prompt_ids()

    def _lists(self, chunk: inference_pb2.Chunk) -> dict[str, list[object]] | None:
        """Returns the lists of the chunk's tokens; None if they have no log-probabilities."""
        if not chunk.logprobs:
            return None
        return completion_logprobs(self._texts, chunk.token_ids, chunk.logprobs, are_ids=self.scores.tokens.are_ids)

    def _places_of(self, chunk: inference_pb2.Chunk) -> TextPlaces:
        if self._places is None:
            self._places = self.scores.places.copy()
        self._places.add(chunk.token_ids)
        return self._places

    def _told(self, chunk: inference_pb2.Chunk | None) -> Json | None:
        """Returns the lists of the tokens whose places in the text have become certain: of all that are left with None,
        when the text is whole. Those of a prompt that is echoed come first."""
        is_first = self._places is None
        if chunk is not None and (chunk.logprobs or (is_first and self.scores.is_echoed)):
            lists = self._lists(chunk)
            for name, values in ((self.scores.echoed(lists) if is_first else lists) or {}).items():
                self._untold.setdefault(name, []).extend(values)
            self._places_of(chunk)
        if self._places is None:
            return None
        self._text += "" if chunk is None else chunk.text
        told = self._places.told(self._text, is_whole=chunk is None)
        lists = {name: values[: len(told)] for name, values in self._untold.items()}
        self._untold = {name: values[len(told) :] for name, values in self._untold.items()}
        return {**lists, "text_offset": told} if told else None

    def _choice(self, text: str, logprobs: Json | None = None) -> Json:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}
