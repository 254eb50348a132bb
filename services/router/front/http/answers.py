"""Turns a parsed body into requests, and their answers into OpenAI's JSON.

An `HttpCall` has requests as the router knows them, each with the `Style` in which its endpoint writes choices. A
writer makes one JSON object of all answers, or the chunks of one stream; nothing is written before the first token, so
an error until then is reported by the status. Owns: what is written when, and the usage of all answers together. Never:
bytes on the wire (reply.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.v1 import inference_pb2, types_pb2
from services.router.answer import AnswerEvent
from services.router.front.http.parameters import StreamOptions
from services.router.front.http.reply import Reply
from services.router.front.incoming import Incoming
from services.router.text.token_texts import TokenText, TokenTexts

Json = dict[str, Any]

_FINISH_REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True)
class Ending:
    """Says how an output ended, in OpenAI's words, and which of the request's stops ended it (vLLM's `stop_reason`)."""

    finish_reason: str
    stop_reason: str | int | None

    @staticmethod
    def of(completion: inference_pb2.Completion, request: inference_pb2.GenerateRequest) -> Ending:
        stop_reason: str | int | None = None
        if completion.HasField("stop_string"):
            stop_reason = completion.stop_string
        elif completion.HasField("stop_token_id") and completion.stop_token_id in request.stopping.stop_token_ids:
            stop_reason = completion.stop_token_id
        return Ending(_FINISH_REASONS[completion.finish_reason], stop_reason)

    def fields(self) -> Json:
        return {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}


class Style(Protocol):
    """Writes the choices of one prompt as one endpoint does. Each prompt has a style of its own."""

    def whole(self, output: inference_pb2.Chunk, ending: Ending) -> Json:
        """Returns the choice of an answer that is not streamed."""
        ...

    def opening(self) -> Json | None:
        """Returns the choice that comes before the first token's; None for no such choice."""
        ...

    def delta(self, chunk: inference_pb2.Chunk) -> Json | None:
        """Returns the choice with tokens as they arrive; None if the client would see nothing in it."""
        ...

    def closing(self, ending: Ending) -> Json:
        """Returns the last choice."""
        ...


@dataclass(frozen=True)
class Objects:
    """Names the ids and objects of an endpoint."""

    id_prefix: str
    whole: str
    chunk: str


@dataclass(frozen=True)
class Prompt:
    """Describes one prompt of a call, with its request."""

    incoming: Incoming
    style: Style
    params: Mapping[str, str]
    """The request's field names in this body, where they differ."""

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        """Returns what is left of the request: the prompt is dropped when it is tokenised."""
        return self.incoming.request


@dataclass(frozen=True)
class HttpCall:
    prompts: Sequence[Prompt]
    """The prompts in the order of the choices."""
    options: StreamOptions
    objects: Objects


# JSON has no infinity, which is the log-probability of a masked token. vLLM uses the same bound.
_LEAST = -9999.0


def chat_logprobs(
    texts: TokenTexts, token_ids: Iterable[int], logprobs: Iterable[types_pb2.TokenLogprobs]
) -> dict[str, object]:
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        top = [_chat_entry(texts[other.token_id], other.logprob) for other in entry.top]
        content.append({**_chat_entry(texts[token_id], entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_entry(token: TokenText, logprob: float) -> dict[str, object]:
    return {"token": token.text, "logprob": max(logprob, _LEAST), "bytes": list(token.data)}


def completion_logprobs(
    texts: TokenTexts, token_ids: Iterable[int], logprobs: Iterable[types_pb2.TokenLogprobs], offset: int
) -> dict[str, list[object]]:
    """Returns the lists of /v1/completions.

    `offset` is where the first token begins in the whole text, in characters.
    """
    lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text = texts[token_id].text
        lists["tokens"].append(text)
        lists["token_logprobs"].append(max(entry.logprob, _LEAST))
        # Of tokens with the same text the likeliest counts, and the chosen token is always listed.
        top = {texts[other.token_id].text: max(other.logprob, _LEAST) for other in reversed(entry.top)}
        top.setdefault(text, max(entry.logprob, _LEAST))
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(offset)
        offset += len(text)
    return lists


class Writer(Protocol):
    async def take(self, index: int, event: AnswerEvent) -> None:
        """Takes an event of the prompt with that index. Returns once the client's connection has room for more."""
        ...


def writer(call: HttpCall, request_id: str, model_id: str, reply: Reply) -> Writer:
    return (_Stream if call.options.stream else _Whole)(call, request_id, model_id, reply)


class _Whole:
    def __init__(self, call: HttpCall, request_id: str, model_id: str, reply: Reply) -> None:
        self._call = call
        self._request_id = request_id
        self._model_id = model_id
        self._reply = reply
        self._outputs = [inference_pb2.Chunk() for _ in call.prompts]
        self._usages = [inference_pb2.Usage() for _ in call.prompts]
        self._choices: dict[int, Json] = {}

    async def take(self, index: int, event: AnswerEvent) -> None:
        prompt, output = self._call.prompts[index], self._outputs[index]
        match event:
            case inference_pb2.Chunk():
                output.text += event.text
                output.token_ids.extend(event.token_ids)
                output.logprobs.extend(event.logprobs)
            case inference_pb2.Completion():
                self._choices[index] = prompt.style.whole(output, Ending.of(event, prompt.request))
                self._usages[index] = event.usage
                if len(self._choices) == len(self._call.prompts):
                    await self._finish()

    async def _finish(self) -> None:
        envelope = _envelope(self._call, self._call.objects.whole, self._request_id, self._model_id)
        choices = [self._choices[index] for index in sorted(self._choices)]
        await self._reply.json({**envelope, "choices": choices, "usage": _sum(self._usages)})


class _Stream:
    def __init__(self, call: HttpCall, request_id: str, model_id: str, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._envelope = _envelope(call, call.objects.chunk, request_id, model_id)
        self._unopened = set(range(len(call.prompts)))
        self._unfinished = set(range(len(call.prompts)))
        self._usages = [inference_pb2.Usage() for _ in call.prompts]
        # While a client does not read, one answer waits for it and the others for their turns, each with a single
        # event; later events are collected in the answers' own buffers.
        self._turn = asyncio.Lock()

    async def take(self, index: int, event: AnswerEvent) -> None:
        async with self._turn:
            if payloads := self._payloads(index, event):
                await self._reply.events(payloads)
            if not self._unfinished:
                await self._reply.done()

    def _payloads(self, index: int, event: AnswerEvent) -> list[Json]:
        prompt, usage = self._call.prompts[index], self._usages[index]
        match event:
            case inference_pb2.PromptInfo():
                usage.prompt_tokens, usage.cached_tokens = event.prompt_tokens, event.cached_tokens
                return []
            case inference_pb2.Chunk():
                usage.output_tokens += len(event.token_ids)
                delta = prompt.style.delta(event)
                return [] if delta is None else [*self._opening(index), self._chunk([delta])]
            case inference_pb2.Completion():
                usage.CopyFrom(event.usage)
                self._unfinished.remove(index)
                closing = prompt.style.closing(Ending.of(event, prompt.request))
                return [*self._opening(index), self._chunk([closing]), *self._last()]

    def _opening(self, index: int) -> list[Json]:
        if index not in self._unopened:
            return []
        self._unopened.remove(index)
        opening = self._call.prompts[index].style.opening()
        return [] if opening is None else [self._chunk([opening])]

    def _last(self) -> list[Json]:
        if self._unfinished or not self._call.options.include_usage:
            return []
        return [{**self._envelope, "choices": [], "usage": _sum(self._usages)}]

    def _chunk(self, choices: list[Json]) -> Json:
        options = self._call.options
        if not options.include_usage:
            return {**self._envelope, "choices": choices}
        usage = _sum(self._usages) if options.continuous_usage else None
        return {**self._envelope, "choices": choices, "usage": usage}


def _envelope(call: HttpCall, kind: str, request_id: str, model_id: str) -> Json:
    return {
        "id": call.objects.id_prefix + request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model_id,
    }


def _sum(usages: Iterable[inference_pb2.Usage]) -> Json:
    total = inference_pb2.Usage()
    for usage in usages:
        total.prompt_tokens += usage.prompt_tokens
        total.output_tokens += usage.output_tokens
        total.cached_tokens += usage.cached_tokens
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.output_tokens,
        "total_tokens": total.prompt_tokens + total.output_tokens,
        "prompt_tokens_details": {"cached_tokens": total.cached_tokens},
    }
