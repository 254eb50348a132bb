"""PrefillService: decode the message, hand it to its leg, encode what happened."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from baton.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2
from services.core.errors import BatonError, Draining, ProtocolViolation
from services.prefill.leg import PrefillLeg
from services.rpc.logging import ids
from services.rpc.status import to_status
from services.worker.host import WorkerHost
from services.worker.session import RouterSession, SessionHost

log = logging.getLogger(__name__)

Request = prefill_pb2.PrefillServiceSessionRequest
Response = prefill_pb2.PrefillServiceSessionResponse


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """One SessionHost; its sessions' legs are prompts and leases."""

    full_name = "baton.v1.PrefillService"

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self.sessions: SessionHost[Request, Response] = host.session_host("prefill", self._accept, self._respond)

    def register(self, server: Any) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    def Session(self, request_iterator: AsyncIterator[Request], context: Any) -> AsyncIterator[Response]:
        return self.sessions.serve(aiter(request_iterator))

    def _respond(self, events: list[Any]) -> Response:
        return Response(events=events, load=self._host.load_snapshot())

    def _accept(self, session: RouterSession, request: Request) -> None:
        match request.WhichOneof("message"):
            case "prefill":
                self._prefill(session, request.prefill)
            case "cancel":
                if leg := session.legs.get(request.cancel.leg):
                    leg.cancel()
            case "heartbeat":
                self._host.leases.hold(session, request.heartbeat.held_leases, self._host.clock.now())
            case "leave":
                self._host.leave(request.leave.remaining_ms / 1000, "a router asks for it")

    def _prefill(self, session: RouterSession, command: prefill_pb2.PrefillCommand) -> None:
        if command.leg in session.legs:
            raise ProtocolViolation(f"leg {command.leg} is in use")
        try:
            if self._host.draining:
                raise Draining("this worker is draining")
            PrefillLeg(self._host, session, command).start()
        except BatonError as error:
            about = ids(command.request_id, command.traceparent)
            log.warning("leg %d refused: %s", command.leg, error, extra=about)
            failed = types_pb2.LegFailed(leg=command.leg, status=to_status(error))
            session.emit(prefill_pb2.PrefillEvent(failed=failed))
            session.flush()
