"""/v1/completions: a text or token ids go on."""

from __future__ import annotations

from collections.abc import Mapping

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest
from services.router.http import unsupported
from services.router.http.body import Body, as_text, as_whole, bounded
from services.router.http.call import Call, Ending, Json
from services.router.http.logprobs import TokenTexts, completion_logprobs
from services.router.http.parameters import read_shared

MAX_PROMPT_TOKENS = 1 << 20
DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""
_PARAMS: Mapping[str, str] = {"text": "prompt", "token_ids": "prompt"}


def read_call(body: Body, texts: TokenTexts) -> Call:
    """Raises InvalidRequest."""
    request = inference_pb2.GenerateRequest()
    unsupported.refuse(body, unsupported.COMPLETIONS)
    _prompt(body, request)
    options = read_shared(body, request)
    max_tokens, logprobs, echo = body.whole("max_tokens"), body.whole("logprobs"), body.boolean("echo")
    request.stopping.max_tokens = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    if logprobs is not None:
        request.response.logprobs = logprobs
    if echo and logprobs is not None:
        raise InvalidRequest("echo", "is not supported together with logprobs: the prompt has none")
    return Call(request, options, CompletionStyle(texts, request if echo else None), _PARAMS)


def _prompt(body: Body, request: inference_pb2.GenerateRequest) -> None:
    """A text, token ids, or a list of one of these."""
    prompt = body.take("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidRequest("prompt", f"is a list of {len(prompt)} prompts; only one is supported in a request")
        prompt = prompt[0]
    if prompt is None:
        raise InvalidRequest("prompt", "is missing")
    if isinstance(prompt, list):
        bounded(prompt, "prompt", MAX_PROMPT_TOKENS)
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(as_whole(token_id, f"prompt[{index}]") for index, token_id in enumerate(prompt))
    elif isinstance(prompt, str):
        request.text = as_text(prompt, "prompt")
    else:
        raise InvalidRequest("prompt", "must be a string or a list of token ids")


class CompletionStyle:
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, texts: TokenTexts, echoed: inference_pb2.GenerateRequest | None) -> None:
        """`echoed`: the request whose prompt is given before the output."""
        self._texts = texts
        self._echoed = echoed
        self._offset = 0

    def whole(self, output: inference_pb2.Chunk, ending: Ending) -> Json:
        return {**_choice(self._prompt() + output.text, self._logprobs(output)), **ending.fields()}

    def opening(self) -> Json | None:
        prompt = self._prompt()
        return _choice(prompt) if prompt else None

    def delta(self, chunk: inference_pb2.Chunk) -> Json | None:
        logprobs = self._logprobs(chunk)
        return _choice(chunk.text, logprobs) if chunk.text or logprobs else None

    def closing(self, ending: Ending) -> Json:
        return {**_choice(""), **ending.fields()}

    def _prompt(self) -> str:
        """Only once the request was found valid: token ids may be anything before."""
        if self._echoed is None:
            return ""
        return self._echoed.text or self._texts.join(self._echoed.token_ids.ids)

    def _logprobs(self, chunk: inference_pb2.Chunk) -> Json | None:
        if not chunk.logprobs:
            return None
        lists = completion_logprobs(self._texts, chunk.token_ids, chunk.logprobs, self._offset)
        self._offset += sum(len(self._texts[token_id].text) for token_id in chunk.token_ids)
        return lists


def _choice(text: str, logprobs: Json | None = None) -> Json:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}
