"""Passes the RPCs of WorkerService on to who answers them (`session`, `model_text`). Never: an answer of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

from baton.v1 import worker_pb2, worker_pb2_grpc
from services.rpc.interceptors import CallContext
from services.worker.model_text import give_model_text
from services.worker.session import SessionHost


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, sessions: SessionHost, model: str | None) -> None:
        """`model` is the model's directory; None is that of a worker that has no model."""
        self._sessions = sessions
        self._model = model

    async def Session(self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: CallContext) -> None:
        await self._sessions.serve(aiter(request_iterator), context.write)

    async def GetModelText(self, request: worker_pb2.GetModelTextRequest, context: CallContext) -> None:
        await give_model_text(self._model, context.write)
