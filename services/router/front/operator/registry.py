"""Serves RegistryService: workers register here, and the router dials them back."""

from __future__ import annotations

from baton.v1 import control_pb2, control_pb2_grpc
from services.router.catalogue import Catalogue
from services.router.workers import wire
from services.router.workers.description import check_description, check_loading
from services.rpc.interceptors import CallContext

FULL_NAME = "baton.v1.RegistryService"


class RegistryServicer(control_pb2_grpc.RegistryServiceServicer):
    def __init__(self, catalogue: Catalogue, *, incarnation: int, interval_s: float) -> None:
        """`interval_s` is how often workers are to register again, in seconds."""
        self._catalogue = catalogue
        self._incarnation = incarnation
        self._interval_ms = round(interval_s * 1000)

    async def Register(
        self, request: control_pb2.RegisterRequest, context: CallContext
    ) -> control_pb2.RegisterResponse:
        if request.HasField("loading"):
            check_loading(request.loading)
            self._catalogue.loading(wire.loading_worker(request.loading), request.loading.model_id)
        else:
            check_description(request.worker)
            await self._catalogue.register(wire.worker_info(request.worker))
        return control_pb2.RegisterResponse(router_incarnation=self._incarnation, interval_ms=self._interval_ms)
