"""Runs `baton trace`: where a request spent its time, from the file that `--trace-file` wrote.

Owns: the arguments, which request is shown, and the JSON form. Never: reading spans, arithmetic or drawing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from services.cli.arguments import Parser
from services.cli.trace_breakdown import break_down
from services.cli.trace_reader import RecordedRequest, read_requests
from services.cli.trace_view import ASCII, UNICODE, request_list, request_view
from services.core.errors import ConfigError
from services.core.printable import printable

_LISTED = 20


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Where a request spent its time.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what --trace-file wrote, all processes together")
    parser.add_argument("--request", metavar="ID", help="request or trace id (default: list them, show the latest)")
    parser.add_argument("--json", action="store_true", help="as JSON: the one request, or without --request a list")


def run(args: argparse.Namespace) -> int:
    """Prints what was asked for and returns 0. Raises ConfigError if the file cannot be read or has no such request."""
    requests = read_requests(args.file)
    if not requests:
        raise ConfigError(f"{args.file}: no request in it yet")
    if args.request is not None:
        requests = [_find(requests, args.request, args.file)]
    if args.json:
        documents = [as_document(request) for request in requests]
        print(json.dumps(documents if args.request is None else documents[0]))
        return 0
    if len(requests) > 1:
        shown = requests[-_LISTED:]
        print("\n".join(map(printable, request_list(shown))))
        if len(shown) < len(requests):
            print(f"({len(requests) - len(shown)} earlier ones are not listed)")
        print()
    print("\n".join(map(printable, request_view(requests[-1], UNICODE if _prints_unicode() else ASCII))))
    return 0


def as_document(request: RecordedRequest) -> dict[str, Any]:
    """Returns the trace as data for programs: times in milliseconds, starts counted from the request's."""
    root = request.root
    return {
        "request_id": request.request_id,
        "trace_id": request.trace_id,
        "start_unix_s": request.start_ns / 1e9,
        "finished": root is not None,
        "total_ms": root.duration_ms if root else None,
        "error": root.message if root and root.failed else None,
        "attributes": root.attributes if root else {},
        **dataclasses.asdict(break_down(request)),
        "spans": [
            {
                "name": span.name,
                "depth": depth,
                "service": span.service,
                "instance": span.instance,
                "start_ms": (span.start_ns - request.start_ns) / 1e6,
                "duration_ms": span.duration_ms,
                "failed": span.failed,
                "attributes": span.attributes,
                "events": [
                    {"name": event.name, "at_ms": (event.at_ns - request.start_ns) / 1e6, **event.attributes}
                    for event in span.events
                ],
            }
            for depth, span in request.tree()
        ],
    }


def _find(requests: Sequence[RecordedRequest], wanted: str, path: str) -> RecordedRequest:
    """Returns the latest request with that request or trace id."""
    found = [request for request in requests if wanted in (request.request_id, request.trace_id)]
    if not found:
        known = ", ".join(request.request_id for request in requests[-3:])
        raise ConfigError(f"--request: {path} has no {wanted!r}; the latest of its {len(requests)} are {known}")
    return found[-1]


def _prints_unicode() -> bool:
    try:
        (UNICODE.solid + UNICODE.hidden).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
