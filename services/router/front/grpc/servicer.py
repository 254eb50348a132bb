"""Serves InferenceService: it sends a request's answer as messages of the public API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager

from baton.v1 import inference_pb2, inference_pb2_grpc
from services.router.answer import Answer, append_chunk
from services.router.catalogue import Catalogue
from services.router.coordinator.progress import LiveProgress
from services.router.front.call import Call, Caller, Incoming
from services.router.front.grpc.key import tenant_of
from services.router.front.intake import Intake
from services.router.front.progress import message
from services.router.tenants.gate import Gate
from services.rpc.interceptors import CallContext

FULL_NAME = "baton.v1.InferenceService"
PROGRESS_AFTER_S = 5.0
"""Seconds without a message after which a client that has asked for it is told its progress."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self, intake: Intake, catalogue: Catalogue, gate: Gate, progress_after_s: float = PROGRESS_AFTER_S
    ) -> None:
        self._progress_after_s = progress_after_s
        self._intake = intake
        self._catalogue = catalogue
        self._gate = gate

    async def GenerateStream(
        self, incoming: Incoming, context: CallContext
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        tells_progress = incoming.request.response.progress
        async with self._answer(incoming, context, stream=True) as answer:
            answer.progress_after_s = self._progress_after_s if tells_progress else None
            async for event in answer:
                match event:
                    case inference_pb2.Chunk():
                        response = inference_pb2.GenerateStreamResponse()
                        response.chunk.CopyFrom(event)
                        yield response
                    case inference_pb2.PromptInfo():
                        yield inference_pb2.GenerateStreamResponse(prompt_info=event)
                    case inference_pb2.PromptLogprobs():
                        yield inference_pb2.GenerateStreamResponse(prompt_logprobs=event)
                    case inference_pb2.Completion():
                        yield inference_pb2.GenerateStreamResponse(completion=event)
                    case LiveProgress():
                        yield inference_pb2.GenerateStreamResponse(progress=message(event))

    async def Generate(self, incoming: Incoming, context: CallContext) -> inference_pb2.GenerateResponse:
        response = inference_pb2.GenerateResponse()
        async with self._answer(incoming, context, stream=False) as answer:
            async for event in answer:
                match event:
                    case inference_pb2.PromptInfo():
                        response.prompt_info.CopyFrom(event)
                    case inference_pb2.PromptLogprobs():
                        if not response.HasField("prompt_logprobs"):
                            response.prompt_logprobs.position = event.position
                        response.prompt_logprobs.logprobs.extend(event.logprobs)
                    case inference_pb2.Chunk():
                        output = _of_index(response, event.index).output
                        output.index = event.index
                        append_chunk(output, event)
                    case inference_pb2.Completion():
                        _of_index(response, event.index).completion.CopyFrom(event)
        return response

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: CallContext
    ) -> inference_pb2.ListModelsResponse:
        tenant = tenant_of(self._gate, context)
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    id=model.model_id,
                    max_model_len=model.context_tokens,
                    vocab_size=model.facts.vocab_size,
                    ready=model.ready,
                    has_chat_template=model.text.template is not None,
                )
                for model in self._catalogue.all()
                if tenant.may_use(model.model_id)
            ]
        )

    def counting(self, context: CallContext) -> AbstractContextManager[None]:
        """Returns what counts a request of the caller that cannot be read, or names no model. Raises InvalidKey."""
        return self._intake.refusals(caller=self._caller(context))

    def _caller(self, context: CallContext) -> Caller:
        with self._intake.refusals():
            return Caller(tenant_of(self._gate, context), _traceparent(context))

    def _answer(self, incoming: Incoming, context: CallContext, *, stream: bool) -> AbstractAsyncContextManager[Answer]:
        caller = self._caller(context)  # again: the request may have come slowly
        with self._intake.refusals(caller=caller, request_id=incoming.request.request_id):
            name = incoming.request.model if incoming.request.HasField("model") else None
            model = self._catalogue.get(name, caller.tenant)
        return self._intake.answer(
            Call(
                caller,
                model,
                incoming,
                timeout_s=context.time_remaining(),
                stream=stream,
                in_one_message=not stream,
            )
        )


def _of_index(
    response: inference_pb2.GenerateResponse, index: int
) -> inference_pb2.GenerateResponse | inference_pb2.FurtherAnswer:
    """Returns where the answer with that index stands; those before it are there too."""
    while len(response.further) < index:
        response.further.add()
    return response.further[index - 1] if index else response


def _traceparent(context: CallContext) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == "traceparent"), "")
