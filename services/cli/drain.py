"""`baton drain`: takes a worker out of service without losing what it does; its process ends.

Under `baton up` another starts in its place: one worker after the other is restarted, and no request is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.v1 import control_pb2, control_pb2_grpc
from services.cli.arguments import Parser, add_target
from services.cli.client import connect
from services.core.errors import ConfigError


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Gives a worker nothing new; when it has finished, its process ends.")
    parser.add_argument("worker", metavar="WORKER", help="its id, as `baton status` shows it")
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="what still runs after this long goes on elsewhere (default: the router's, 30)",
    )
    add_target(parser)
    arguments = parser.parse_args(argv)
    request = control_pb2.DrainRequest(worker_id=arguments.worker)
    if arguments.deadline is not None:
        if not 0 <= arguments.deadline < 1e6:
            raise ConfigError(f"--deadline: {arguments.deadline:g} is not a number of seconds")
        request.deadline_ms = round(arguments.deadline * 1000)
    with connect(arguments.target) as channel:
        answer = control_pb2_grpc.ControlServiceStub(channel).Drain(request, timeout=arguments.timeout)
    print(f"{arguments.worker} has left: {answer.num_finished} requests finished there, {answer.num_migrated} moved")
    return 0
