"""One request over HTTP: a body becomes a GenerateRequest, takes the router's one way in, and its answer is written.

Nothing is sent before the first token: what goes wrong until then is told by the status. Never: another queue,
another validation, another trace than gRPC's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from baton.v1 import inference_pb2
from services.core.errors import InvalidRequest
from services.core.ids import new_request_id
from services.router.answer import Answer
from services.router.http.body import Body, read_body
from services.router.http.call import Call, Ending, Json
from services.router.http.connection import while_connected
from services.router.http.errors import http_error
from services.router.http.logprobs import TokenTexts
from services.router.http.reply import REQUEST_ID, Reply
from services.router.intake import Intake
from services.rpc.logging import ids

log = logging.getLogger(__name__)

# Seconds, a client's; and what Envoy tells of the time it will wait, milliseconds.
TIMEOUT, ENVOY_TIMEOUT_MS = "x-request-timeout", "x-envoy-expected-rq-timeout-ms"

ReadCall = Callable[[Body, TokenTexts], Call]


class Generation:
    """An endpoint (ASGI). Waits for no client but the one it serves."""

    def __init__(self, intake: Intake, texts: TokenTexts, read_call: ReadCall, *, max_body_bytes: int) -> None:
        self._intake = intake
        self._texts = texts
        self._read_call = read_call
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID) or new_request_id()
        reply = Reply(send, request_id)
        params = {"request_id": REQUEST_ID}
        try:
            with self._intake.refusals():
                timeout_s = _timeout_s(headers)
                body = await read_body(receive, headers, self._max_body_bytes)
                call = self._read_call(body, self._texts)
            if unknown := body.unknown():
                log.debug("fields ignored: %s", ", ".join(unknown)[:200], extra=ids(request_id, ""))
            params |= call.params
            call.request.request_id = request_id
            await while_connected(receive, self._answer(call, headers.get("traceparent", ""), timeout_s, reply))
        except Exception as error:  # the edge: whatever it is, the client gets an answer and no traceback
            await reply.failed(http_error(error, params))

    async def _answer(self, call: Call, traceparent: str, timeout_s: float | None, reply: Reply) -> None:
        stream = call.options.stream
        taken = self._intake.answer(call.request, traceparent=traceparent, timeout_s=timeout_s, stream=stream)
        async with taken as answer:
            model_id = self._intake.model.facts.model_id
            await (_stream(call, answer, model_id, reply) if stream else _whole(call, answer, model_id, reply))


async def _whole(call: Call, answer: Answer, model_id: str, reply: Reply) -> None:
    output = inference_pb2.Chunk()
    async for event in answer:
        match event:
            case inference_pb2.Chunk():
                output.text += event.text
                output.token_ids.extend(event.token_ids)
                output.logprobs.extend(event.logprobs)
            case inference_pb2.Completion():
                choice = call.style.whole(output, Ending.of(event, call.request))
                usage = _usage(event.usage.prompt_tokens, event.usage.output_tokens, event.usage.cached_tokens)
                envelope = _envelope(call, call.style.whole_object, model_id)
                await reply.json({**envelope, "choices": [choice], "usage": usage})


async def _stream(call: Call, answer: Answer, model_id: str, reply: Reply) -> None:
    chunks = _Chunks(call, _envelope(call, call.style.chunk_object, model_id))
    async for event in answer:
        match event:
            case inference_pb2.PromptInfo():
                chunks.begin(event)
            case inference_pb2.Chunk():
                if payloads := chunks.delta(event):
                    await reply.events(payloads)
            case inference_pb2.Completion():
                await reply.events(chunks.end(event))
                await reply.done()


@dataclass
class _Chunks:
    """The events of one stream."""

    call: Call
    envelope: Json
    opened: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def begin(self, info: inference_pb2.PromptInfo) -> None:
        self.prompt_tokens, self.cached_tokens = info.prompt_tokens, info.cached_tokens

    def delta(self, chunk: inference_pb2.Chunk) -> list[Any]:
        self.output_tokens += len(chunk.token_ids)
        choice = self.call.style.delta(chunk)
        return [] if choice is None else [*self._opening(), self._event([choice])]

    def end(self, completion: inference_pb2.Completion) -> list[Any]:
        usage = completion.usage
        self.output_tokens, self.cached_tokens = usage.output_tokens, usage.cached_tokens
        closing = self.call.style.closing(Ending.of(completion, self.call.request))
        events = [*self._opening(), self._event([closing])]
        if self.call.options.include_usage:
            events.append({**self.envelope, "choices": [], "usage": self._usage()})
        return events

    def _opening(self) -> list[Any]:
        choice = None if self.opened else self.call.style.opening()
        self.opened = True
        return [] if choice is None else [self._event([choice])]

    def _event(self, choices: list[Json]) -> Json:
        options = self.call.options
        if not options.include_usage:
            return {**self.envelope, "choices": choices}
        return {**self.envelope, "choices": choices, "usage": self._usage() if options.continuous_usage else None}

    def _usage(self) -> Json:
        return _usage(self.prompt_tokens, self.output_tokens, self.cached_tokens)


def _envelope(call: Call, kind: str, model_id: str) -> Json:
    request_id = call.style.id_prefix + call.request.request_id
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model_id}


def _usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _timeout_s(headers: Headers) -> float | None:
    """The shorter of what the headers say; None: as long as it takes."""
    given = [(TIMEOUT, 1.0), (ENVOY_TIMEOUT_MS, 1e-3)]
    limits = [_positive(name, headers[name]) * unit for name, unit in given if name in headers]
    return min(limits, default=None)


def _positive(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidRequest(name, f"is {text!r}; it must be a positive number")
    return number
