"""The answers of a call's prompts on their way to the client: one JSON object, or the chunks of one stream.

Owns: what is written when, and the usage of all together. Never: a choice's form (the endpoint's `Style`), or bytes
(reply.py). Nothing is written before the first token: what goes wrong until then is told by the status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

from baton.v1 import inference_pb2
from services.router.answer import Event
from services.router.http.call import Call, Ending, Json
from services.router.http.reply import Reply


class Writer(Protocol):
    async def take(self, index: int, event: Event) -> None:
        """Of the prompt with that index. Returns once the client's connection has room for more."""
        ...


def writer(call: Call, request_id: str, model_id: str, reply: Reply) -> Writer:
    return (_Stream if call.options.stream else _Whole)(call, request_id, model_id, reply)


class _Whole:
    def __init__(self, call: Call, request_id: str, model_id: str, reply: Reply) -> None:
        self._call = call
        self._request_id = request_id
        self._model_id = model_id
        self._reply = reply
        self._outputs = [inference_pb2.Chunk() for _ in call.prompts]
        self._usages = [inference_pb2.Usage() for _ in call.prompts]
        self._choices: dict[int, Json] = {}

    async def take(self, index: int, event: Event) -> None:
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
    def __init__(self, call: Call, request_id: str, model_id: str, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._envelope = _envelope(call, call.objects.chunk, request_id, model_id)
        self._unopened = set(range(len(call.prompts)))
        self._unfinished = set(range(len(call.prompts)))
        self._usages = [inference_pb2.Usage() for _ in call.prompts]
        # While a client does not read, one waits for it and the others for their turns, each with a single event; what
        # comes meanwhile is gathered in the answers' own buffers.
        self._turn = asyncio.Lock()

    async def take(self, index: int, event: Event) -> None:
        async with self._turn:
            if payloads := self._payloads(index, event):
                await self._reply.events(payloads)
            if not self._unfinished:
                await self._reply.done()

    def _payloads(self, index: int, event: Event) -> list[Json]:
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


def _envelope(call: Call, kind: str, request_id: str, model_id: str) -> Json:
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
