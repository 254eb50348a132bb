"""Runs `baton run`: one prompt, answered by the cluster that runs here, or by one that is started for it.

Owns: when a cluster is started, and that it ends with the answer unless it is to stay. Never: the request and its
answer (generate.py), or the cluster (`baton up`, as a child).
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from baton_client import Unavailable
from services.cli.arguments import DEFAULT_TARGET, Parser, add_target, command_line
from services.cli.child import Lifeline
from services.cli.client import inference, tls_of
from services.cli.cluster import PROGRAM
from services.cli.generate import add_options, answer_of, request_of
from services.cli.model_names import resolve_model
from services.cli.waiting import waiting
from services.core.errors import BatonError
from services.core.process_config import DEFAULT_MODEL

_IS_THERE_S = 5.0
_END_S = 40.0
"""How long a cluster may drain which the terminal's Ctrl-C has reached too."""
_OF_ITS_OWN = ("--port=0", "--http-port=-1", "--metrics-port=-1")
"""Flags of a cluster that nobody else is to find."""


def main(argv: Sequence[str], prog: str) -> int:
    arguments = make_parser(prog).parse_args(argv)
    request = request_of(arguments)
    if is_served(arguments):
        with inference(arguments.target, tls_of(arguments)) as client:
            answer_of(client, request, arguments)
        return 0
    request.ClearField("model")  # there is no other in the cluster that is started
    # Whoever is told to stop ends the cluster too, on the way out.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with cluster(arguments.model or DEFAULT_MODEL, stay=arguments.stay) as (up, target):
        with inference(target) as client:
            answer_of(client, request, arguments)
        if arguments.stay:
            print(
                f"the cluster stays: {command_line('chat', target, DEFAULT_TARGET)}; Ctrl-C stops it", file=sys.stderr
            )
            with contextlib.suppress(KeyboardInterrupt):
                _forward(up)
            _forward(up)  # the terminal has told it too
            if up.wait():
                raise BatonError("the cluster has failed; its message is above")
    return 0


def _forward(up: subprocess.Popen[str]) -> None:
    """Prints what the cluster says, until it has ended."""
    assert up.stdout is not None
    for line in up.stdout:
        print(line, end="", file=sys.stderr)


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description="Answers one prompt. If no cluster runs here, one is started for it.")
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask")
    parser.set_defaults(prompt_file=None, token_ids=None)
    parser.add_argument("--stay", action="store_true", help="if a cluster is started, keep it until Ctrl-C")
    add_target(parser)
    add_options(parser)
    return parser


def is_served(arguments: argparse.Namespace) -> bool:
    """Returns whether a router is there. Raises BatonError if it cannot be asked, or if nobody is where a target of the
    caller's own is: no cluster would be started there."""
    with inference(arguments.target, tls_of(arguments)) as client:
        try:
            client.list_models(timeout_s=_IS_THERE_S)
        except Unavailable as error:
            if error.reason or arguments.target != DEFAULT_TARGET:
                raise
            return False
    return True


@contextlib.contextmanager
def cluster(model: str, *, stay: bool, program: Sequence[str] = PROGRAM) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields a cluster that serves the model, and its router's address; ends it afterwards. One that is to stay has the
    ports that others ask at. Raises BatonError if it cannot be started."""
    resolve_model(model)  # here, where a download shows how far it is
    command = [*program, "up", "--model", model, "--log-level", "warning", *(() if stay else _OF_ITS_OWN)]
    lifeline = Lifeline()  # who is killed takes the cluster along
    command += ["--lifeline-fd", str(lifeline.read_fd)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, pass_fds=(lifeline.read_fd,)
    ) as up:
        try:
            yield up, _ready(up, model)
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                up.wait(_END_S)
            raise
        finally:
            up.terminate()  # nothing happens to what has ended
            up.wait()
            lifeline.close()


def _ready(up: subprocess.Popen[str], model: str) -> str:
    """Returns the router's address once a request would succeed, and shows meanwhile that it is waited for."""
    assert up.stdout is not None
    target, what = "", f"starting a cluster with {model}"
    with waiting(what) as show:
        for line in up.stdout:
            words = line.split()
            if words[:1] == ["router"]:
                target = words[1]
            if words == ["ready"]:
                return target
            show(f"{what}: {' '.join(words[:2]).rstrip(',')}")
    raise BatonError("the cluster has ended before it was ready")
