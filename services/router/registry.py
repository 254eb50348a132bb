"""Serves RegistryService: workers register here, and the router dials them back."""

from __future__ import annotations

from typing import Any

from baton.v1 import control_pb2, control_pb2_grpc
from services.core.errors import LayoutMismatch
from services.router import wire
from services.router.conductor import Conductor
from services.router.description import check_description

FULL_NAME = "baton.v1.RegistryService"


class RegistryServicer(control_pb2_grpc.RegistryServiceServicer):
    def __init__(self, conductor: Conductor, *, model_id: str, interval_s: float) -> None:
        """`interval_s` is how often workers are to register again, in seconds."""
        self._conductor = conductor
        self._model_id = model_id
        self._interval_ms = round(interval_s * 1000)

    async def Register(self, request: control_pb2.RegisterRequest, context: Any) -> control_pb2.RegisterResponse:
        check_description(request.worker)
        info = wire.worker_info(request.worker)
        if request.worker.layout.model_id != self._model_id:
            raise LayoutMismatch(f"this router serves {self._model_id!r}, not {request.worker.layout.model_id!r}")
        self._conductor.register(info)
        return control_pb2.RegisterResponse(
            router_incarnation=self._conductor.incarnation, interval_ms=self._interval_ms
        )
