"""Runs `baton drain`: takes a worker out of service without losing its requests; then its process ends.

Under `baton up` another starts in its place: so workers can be restarted one after the other, and no request is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.v1 import control_pb2
from services.cli.arguments import Parser, add_control
from services.cli.client import control, tls_of
from services.core.config import A_DURATION_OR_ZERO, duration_or_zero
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
    add_control(parser)
    arguments = parser.parse_args(argv)
    request = control_pb2.DrainRequest(worker_id=arguments.worker)
    if arguments.deadline is not None:
        if not duration_or_zero(arguments.deadline):
            raise ConfigError(f"--deadline: {arguments.deadline:g} {A_DURATION_OR_ZERO}")
        request.deadline_ms = round(arguments.deadline * 1000)
    with control(arguments.target, arguments.cluster_token_file, tls_of(arguments)) as call:
        answer = call("Drain", request, arguments.timeout)
    print(f"{arguments.worker} has left: {answer.num_finished} requests finished there, {answer.num_migrated} moved")
    return 0
