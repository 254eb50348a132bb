"""Serves InferenceService: it sends a request's answer as messages of the public API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from baton.v1 import inference_pb2, inference_pb2_grpc
from services.router.answer import Answer
from services.router.catalogue import Catalogue
from services.router.front.call import Call, Caller
from services.router.front.incoming import Incoming
from services.router.front.intake import Intake
from services.rpc.interceptors import CallContext

FULL_NAME = "baton.v1.InferenceService"


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, intake: Intake, catalogue: Catalogue) -> None:
        self._intake = intake
        self._catalogue = catalogue

    async def GenerateStream(
        self, incoming: Incoming, context: CallContext
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

    async def Generate(self, incoming: Incoming, context: CallContext) -> inference_pb2.GenerateResponse:
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
        self, request: inference_pb2.ListModelsRequest, context: CallContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    id=model.model_id,
                    max_model_len=model.context_tokens,
                    vocab_size=model.facts.vocab_size,
                    ready=model.ready,
                )
                for model in self._catalogue.all()
            ]
        )

    def _answer(self, incoming: Incoming, context: CallContext, *, stream: bool) -> AbstractAsyncContextManager[Answer]:
        with self._intake.refusals():
            name = incoming.request.model if incoming.request.HasField("model") else None
            model = self._catalogue.get(name)
        return self._intake.answer(
            Call(
                Caller(traceparent=_traceparent(context)),
                model,
                incoming,
                timeout_s=context.time_remaining(),
                stream=stream,
                in_one_message=not stream,
            )
        )


def _traceparent(context: CallContext) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == "traceparent"), "")
