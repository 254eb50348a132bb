"""Runs `baton health`: grpc.health.v1 from the command line, for container checks. Exit status 0 means SERVING."""

from __future__ import annotations

from collections.abc import Sequence

from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.arguments import Parser, add_address, add_timeout, add_tls
from services.cli.client import connect, tls_of

_TIMEOUT_S = 5.0


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Asks one process, router or worker, whether it serves.")
    add_address(parser, "the process's gRPC address")
    add_tls(parser, names_server=True)
    add_timeout(parser, _TIMEOUT_S)
    parser.add_argument(
        "--service", default="", metavar="S", help="such as baton.v1.InferenceService (default: the process itself)"
    )
    parser.set_defaults(allow_plain_token=True)  # it sends neither token nor key
    arguments = parser.parse_args(argv)
    with connect(arguments.target, tls_of(arguments)) as channel:
        request = health_pb2.HealthCheckRequest(service=arguments.service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=arguments.timeout)
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(name)
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
