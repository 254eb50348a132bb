"""InferenceService: validate, tokenise, submit, stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from services.core.clock import Clock
from services.core.errors import InvalidRequest
from services.core.ids import new_request_id, new_seed
from services.router.answer import Answer
from services.router.conductor import Conductor
from services.router.coordinator.requests import RequestSpec
from services.router.metrics import RouterMetrics
from services.router.tokenisation import ModelText
from services.router.tracing import RequestTrace, error_outcome
from services.router.validation import ModelFacts, validate
from services.rpc.telemetry import Tracer

FULL_NAME = "baton.v1.InferenceService"
# Shorter prompts cost less to tokenise than to send to another thread.
_INLINE_CHARS = 512


@dataclass(frozen=True)
class ServedModel:
    text: ModelText
    facts: ModelFacts


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self,
        conductor: Conductor,
        model: ServedModel,
        *,
        clock: Clock,
        tracer: Tracer,
        metrics: RouterMetrics,
        executor: Executor,
    ) -> None:
        """`executor` tokenises."""
        self._conductor = conductor
        self._model = model
        self._clock = clock
        self._tracer = tracer
        self._metrics = metrics
        self._executor = executor

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        async with self._answer(request, context, stream=True) as answer:
            async for event in answer:
                match event:
                    case inference_pb2.PromptInfo():
                        yield inference_pb2.GenerateStreamResponse(prompt_info=event)
                    case inference_pb2.Chunk():
                        yield inference_pb2.GenerateStreamResponse(chunk=event)
                    case inference_pb2.Completion():
                        yield inference_pb2.GenerateStreamResponse(completion=event)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> inference_pb2.GenerateResponse:
        response = inference_pb2.GenerateResponse()
        async with self._answer(request, context, stream=False) as answer:
            async for event in answer:
                match event:
                    case inference_pb2.PromptInfo():
                        response.prompt_info.CopyFrom(event)
                    case inference_pb2.Chunk():
                        response.output.text += event.text
                        response.output.token_ids.extend(event.token_ids)
                        response.output.logprobs.extend(event.logprobs)
                    case inference_pb2.Completion():
                        response.completion.CopyFrom(event)
        return response

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        coordinator, facts = self._conductor.coordinator, self._model.facts
        model = inference_pb2.Model(
            id=facts.model_id,
            max_model_len=coordinator.context_tokens(),
            vocab_size=facts.vocab_size,
            ready=coordinator.ready,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    @contextlib.asynccontextmanager
    async def _answer(
        self, request: inference_pb2.GenerateRequest, context: Any, *, stream: bool
    ) -> AsyncIterator[Answer]:
        """The request's answer while it lives; leaving early, as a client that goes away does, cancels it."""
        arrived_s = self._clock.now()
        with self._refusals():
            validate(request, self._model.facts)
        if not request.HasField("request_id"):
            request.request_id = new_request_id()
        if not request.sampling.HasField("seed"):
            request.sampling.seed = new_seed()
        trace = RequestTrace(
            self._tracer,
            request,
            model_id=self._model.facts.model_id,
            parent=_traceparent(context),
            stream=stream,
            arrived_s=arrived_s,
        )
        with self._refusals(trace):
            answer = await self._submit(request, trace, _deadline_s(context, arrived_s))
        try:
            yield answer
        finally:
            self._conductor.cancel(request.request_id, answer)

    async def _submit(
        self, request: inference_pb2.GenerateRequest, trace: RequestTrace, deadline_s: float | None
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
            model_id=self._model.facts.model_id,
            tokenizer=self._model.text.tokenizer,
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
        self._conductor.submit(spec, answer, trace)
        return answer

    async def _tokenise(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Off the event loop unless it is short. A prompt of messages always renders a template: off the loop."""
        text = self._model.text
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
    def _refusals(self, trace: RequestTrace | None = None) -> Iterator[None]:
        """Requests that never reach the coordinator are counted too, and their traces ended."""
        try:
            yield
        except BaseException as error:
            self._metrics.failed(error_outcome(error))
            if trace is not None:
                trace.failed(error, self._clock.now())
            raise


def _fewest_tokens(stopping: types_pb2.StoppingParams) -> int:
    """Without anything that could end it earlier, all of max_tokens."""
    endless = stopping.ignore_eos and not stopping.stop and not stopping.stop_token_ids
    return stopping.max_tokens if endless else stopping.min_tokens


def _traceparent(context: Any) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == "traceparent"), "")


def _deadline_s(context: Any, now: float) -> float | None:
    remaining_s = context.time_remaining()
    return None if remaining_s is None else now + remaining_s
