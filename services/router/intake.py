"""Requests on their way in, whatever protocol brought them: validate, tokenise, submit.

Owns: what happens between a GenerateRequest and its Answer. There is one such way, so that admission, traces and
metrics are the same for all. Never: gRPC or HTTP, or what becomes of a request once it is submitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from baton.v1 import inference_pb2, types_pb2
from services.core.clock import Clock
from services.core.errors import InvalidRequest
from services.core.ids import new_request_id, new_seed
from services.router.answer import Answer
from services.router.conductor import Conductor
from services.router.coordinator.requests import RequestSpec
from services.router.request_metrics import RequestMetrics, RequestRecord
from services.router.tokenisation import ModelText
from services.router.tracing import RequestTrace
from services.router.validation import ModelFacts, validate
from services.rpc.logging import ids
from services.rpc.telemetry import Tracer

log = logging.getLogger(__name__)

# Shorter prompts cost less to tokenise than to send to another thread.
_INLINE_CHARS = 512


@dataclass(frozen=True)
class ServedModel:
    text: ModelText
    facts: ModelFacts


class Intake:
    def __init__(
        self,
        conductor: Conductor,
        model: ServedModel,
        *,
        clock: Clock,
        tracer: Tracer,
        metrics: RequestMetrics,
        executor: Executor,
        log_prompts: bool = False,
    ) -> None:
        """`executor` tokenises."""
        self.model = model
        self._conductor = conductor
        self._clock = clock
        self._tracer = tracer
        self._metrics = metrics
        self._executor = executor
        self._log_prompts = log_prompts

    @contextlib.asynccontextmanager
    async def answer(
        self, request: inference_pb2.GenerateRequest, *, traceparent: str, timeout_s: float | None, stream: bool
    ) -> AsyncIterator[Answer]:
        """The request's answer while it lives; leaving early, as a client that goes away does, cancels it.

        Fills in what the request leaves to the router. `traceparent`: the caller's, or empty. `timeout_s`: from now.
        """
        arrived_s = self._clock.now()
        record = self._metrics.begin(request, arrived_s)
        with self.refusals(record=record):
            validate(request, self.model.facts)
        if not request.HasField("request_id"):
            request.request_id = new_request_id()
        if not request.sampling.HasField("seed"):
            request.sampling.seed = new_seed()
        trace = RequestTrace(
            self._tracer,
            request,
            model_id=self.model.facts.model_id,
            parent=traceparent,
            stream=stream,
            arrived_s=arrived_s,
        )
        if self._log_prompts:
            about = ids(request.request_id, trace.traceparent)
            log.info("prompt: %s", _prompt(request), extra=about)
        with self.refusals(trace, record):
            deadline_s = None if timeout_s is None else arrived_s + timeout_s
            answer = await self._submit(request, trace, record, deadline_s)
        try:
            yield answer
        finally:
            self._conductor.cancel(request.request_id, answer)

    async def _submit(
        self,
        request: inference_pb2.GenerateRequest,
        trace: RequestTrace,
        record: RequestRecord,
        deadline_s: float | None,
    ) -> Answer:
        started_s = self._clock.now()
        token_ids = self._truncated(request, await self._tokenise(request))
        if not token_ids:
            raise InvalidRequest("prompt", "has no tokens")
        ended_s = self._clock.now()
        trace.tokenized(started_s, ended_s, len(token_ids))
        answer = Answer(
            request,
            token_ids,
            model_id=self.model.facts.model_id,
            tokenizer=self.model.text.tokenizer,
            tokenize_ms=(ended_s - started_s) * 1000,
        )
        spec = RequestSpec(
            request_id=request.request_id,
            token_ids=tuple(token_ids),
            max_tokens=request.stopping.max_tokens if request.stopping.HasField("max_tokens") else None,
            priority=request.priority,
            deadline_s=deadline_s,
            cache_salt=request.cache_salt,
            min_tokens=_fewest_tokens(request.stopping),
            payload=request,
        )
        self._conductor.submit(spec, answer, trace, record)
        return answer

    async def _tokenise(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Off the event loop unless it is short. A prompt of messages always renders a template: off the loop."""
        text = self.model.text
        loop = asyncio.get_running_loop()
        match request.WhichOneof("prompt"):
            case "token_ids":
                return list(request.token_ids.ids)
            case "text" if len(request.text) <= _INLINE_CHARS:
                return text.encode_text(request.text)
            case "text":
                return await loop.run_in_executor(self._executor, text.encode_text, request.text)
            case _:
                messages = [{"role": entry.role, "content": entry.content} for entry in request.messages.messages]
                return await loop.run_in_executor(self._executor, text.encode_messages, messages)

    def _truncated(self, request: inference_pb2.GenerateRequest, token_ids: list[int]) -> list[int]:
        """If asked for: the prompt's end that leaves room for max_tokens, or for one token."""
        if not request.truncate_prompt:
            return token_ids
        wanted = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else 1
        room = self._conductor.coordinator.context_tokens() - wanted
        return token_ids[-room:] if room > 0 else token_ids

    @contextlib.contextmanager
    def refusals(self, trace: RequestTrace | None = None, record: RequestRecord | None = None) -> Iterator[None]:
        """Requests that never reach the coordinator are counted too, and their traces ended."""
        try:
            yield
        except BaseException as error:
            if record is not None:
                record.failed(error, self._clock.now())
            else:  # it could not even be read
                self._metrics.failed(error)
            if trace is not None:
                trace.failed(error, self._clock.now())
            raise


def _prompt(request: inference_pb2.GenerateRequest) -> str:
    """On one line."""
    match request.WhichOneof("prompt"):
        case "text":
            return json.dumps(request.text, ensure_ascii=False)
        case "token_ids":
            return str(list(request.token_ids.ids))
        case _:
            messages = [{"role": entry.role, "content": entry.content} for entry in request.messages.messages]
            return json.dumps(messages, ensure_ascii=False)


def _fewest_tokens(stopping: types_pb2.StoppingParams) -> int:
    """Without anything that could end it earlier, all of max_tokens."""
    endless = stopping.ignore_eos and not stopping.stop and not stopping.stop_token_ids
    return stopping.max_tokens if endless else stopping.min_tokens
