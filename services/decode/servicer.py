"""DecodeService: decode the message, hand it to its leg, encode what happened."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from baton.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from services.core.errors import BatonError, Draining, ProtocolViolation
from services.decode.intake import Intake
from services.decode.leg import DecodeLeg
from services.rpc.logging import ids
from services.rpc.status import to_status
from services.worker.host import WorkerHost
from services.worker.session import RouterSession, SessionHost

log = logging.getLogger(__name__)

Request = decode_pb2.DecodeServiceSessionRequest
Response = decode_pb2.DecodeServiceSessionResponse


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """One SessionHost; its sessions' legs are imports and running sequences."""

    full_name = "baton.v1.DecodeService"

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._intake = Intake(host)
        self.sessions: SessionHost[Request, Response] = host.session_host("decode", self._accept, self._respond)

    def register(self, server: Any) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    def Session(self, request_iterator: AsyncIterator[Request], context: Any) -> AsyncIterator[Response]:
        return self.sessions.serve(aiter(request_iterator))

    def _respond(self, events: list[Any]) -> Response:
        return Response(events=events, load=self._host.load_snapshot())

    def _accept(self, session: RouterSession, request: Request) -> None:
        match request.WhichOneof("message"):
            case "decode":
                self._decode(session, request.decode)
            case "cancel":
                if leg := session.legs.get(request.cancel.leg):
                    leg.cancel()
            case "leave":
                self._host.leave(request.leave.remaining_ms / 1000, "a router asks for it")

    def _decode(self, session: RouterSession, command: decode_pb2.DecodeCommand) -> None:
        if command.leg in session.legs:
            raise ProtocolViolation(f"leg {command.leg} is in use")
        try:
            if self._host.draining:
                raise Draining("this worker is draining")
            DecodeLeg(self._host, self._intake, session, command).start()
        except BatonError as error:
            about = ids(command.request_id, command.traceparent)
            log.warning("leg %d refused: %s", command.leg, error, extra=about)
            failed = types_pb2.LegFailed(leg=command.leg, status=to_status(error))
            session.emit(decode_pb2.DecodeEvent(failed=failed))
            session.flush()
