"""Serves InferenceService: it sends a request's answer as messages of the public API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from baton.v1 import inference_pb2, inference_pb2_grpc
from services.router.answer import Answer
from services.router.coordinator import Coordinator
from services.router.incoming import Incoming
from services.router.intake import Intake

FULL_NAME = "baton.v1.InferenceService"
RAW_METHODS = ("Generate", "GenerateStream")
"""Methods whose requests arrive as `Incoming` (services/router/reading.py)."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, intake: Intake, coordinator: Coordinator) -> None:
        self._intake = intake
        self._coordinator = coordinator

    async def GenerateStream(
        self, incoming: Incoming, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        async with self._answer(incoming, context, stream=True) as answer:
            async for event in answer:
                match event:
                    case inference_pb2.PromptInfo():
                        yield inference_pb2.GenerateStreamResponse(prompt_info=event)
                    case inference_pb2.Chunk():
                        yield inference_pb2.GenerateStreamResponse(chunk=event)
                    case inference_pb2.Completion():
                        yield inference_pb2.GenerateStreamResponse(completion=event)

    async def Generate(self, incoming: Incoming, context: Any) -> inference_pb2.GenerateResponse:
        response = inference_pb2.GenerateResponse()
        async with self._answer(incoming, context, stream=False) as answer:
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
        coordinator, facts = self._coordinator, self._intake.model.facts
        model = inference_pb2.Model(
            id=facts.model_id,
            max_model_len=coordinator.context_tokens(),
            vocab_size=facts.vocab_size,
            ready=coordinator.ready,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    def _answer(self, incoming: Incoming, context: Any, *, stream: bool) -> AbstractAsyncContextManager[Answer]:
        return self._intake.answer(
            incoming,
            traceparent=_traceparent(context),
            timeout_s=context.time_remaining(),
            stream=stream,
            in_one_message=not stream,
        )


def _traceparent(context: Any) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == "traceparent"), "")
