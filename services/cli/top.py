"""Runs `baton top`: the cluster and its requests, live in a terminal, or once as plain text."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from services.cli.arguments import Parser, add_control
from services.cli.client import control, tls_of
from services.cli.tables import prints
from services.cli.top_cluster import GLYPHS
from services.cli.top_feed import RouterFeed
from services.cli.top_snapshot import snapshot

_TIMEOUT_S = 10.0


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(
        prog=prog, description="Shows the cluster live: workers, blocks, pairs and requests. q leaves, Enter opens."
    )
    add_control(parser, timeout_s=_TIMEOUT_S)
    parser.add_argument(
        "--once", action="store_true", help="print a snapshot and exit, as is done where there is no terminal"
    )
    arguments = parser.parse_args(argv)
    with contextlib.ExitStack() as connection:
        call = connection.enter_context(control(arguments.target, arguments.cluster_token_file, tls_of(arguments)))
        feed = RouterFeed(call, arguments.target, arguments.timeout)
        feed.refresh()
        if arguments.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            print("\n".join(snapshot(feed, unicode=prints("".join(GLYPHS.values()) + "→…"))))
            return 0
        from services.cli.top_app import TopApp  # what it imports takes a terminal to be of use

        app = TopApp(feed, hang_up=connection.close)
        app.run()
        return app.return_code or 0
