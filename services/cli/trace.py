"""Runs `baton trace`: where a request spent its time, from the file that `--trace-file` wrote.

Owns: the arguments, which request is shown, the JSON form, and opening a browser. Never: reading spans, arithmetic or
drawing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import secrets
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from typing import Any

from services.cli.arguments import Parser
from services.cli.tables import columns, prints
from services.cli.trace_breakdown import break_down
from services.cli.trace_reader import RecordedRequest, read_requests
from services.cli.trace_view import ASCII, UNICODE, WIDTH, Ink, request_list, request_view
from services.core.errors import ConfigError
from services.core.home import baton_state
from services.core.jaeger import A_WEB_ADDRESS, JAEGER_HELP, comparison_link, is_web_address, search_link, trace_link
from services.core.own_files import write_named, write_whole
from services.core.printable import printable

_LISTED = 20
_ROUTER = "baton-router"
"""The service in which a request's trace begins, unless its spans name another."""


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Where a request spent its time.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what --trace-file wrote, all processes together")
    parser.add_argument(
        "--request",
        metavar="ID",
        action="append",
        default=[],
        help="request or trace id; repeatable (default: list them, show the latest)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON: the one request, or a list")
    form.add_argument("--open", action="store_true", help="as a page with all requests, which a browser opens")
    parser.add_argument(
        "--html", metavar="PATH", help="write that page to this file (default: trace.html in Baton's state folder)"
    )
    parser.add_argument(
        "--jaeger-url",
        metavar="URL",
        default=os.environ.get("BATON_JAEGER_URL", ""),
        help=f"{JAEGER_HELP} [BATON_JAEGER_URL]",
    )


def run(args: argparse.Namespace) -> int:
    """Prints what was asked for and returns 0. Raises ConfigError if the file cannot be read or has no such request."""
    if args.jaeger_url and not is_web_address(args.jaeger_url):
        raise ConfigError(f"--jaeger-url: {args.jaeger_url!r} {A_WEB_ADDRESS}")
    if args.json and args.html is not None:
        raise ConfigError("--html: not allowed with --json")
    requests = read_requests(args.file)
    if not requests:
        raise ConfigError(f"{args.file}: no request in it yet")
    if args.request:
        requests = [_find(requests, wanted, args.file) for wanted in args.request]
    if args.json:
        documents = [as_document(request) for request in requests]
        print(json.dumps(documents[0] if len(args.request) == 1 else documents))
    elif args.open or args.html is not None:
        _write_page(args, requests)
    else:
        _print_text(args, requests)
    return 0


def _print_text(args: argparse.Namespace, requests: Sequence[RecordedRequest]) -> None:
    if len(requests) > 1:
        shown = requests[-_LISTED:]
        print("\n".join(map(printable, request_list(shown))))
        if len(shown) < len(requests):
            print(f"({len(requests) - len(shown)} earlier ones are not listed)")
        print()
    views = requests if args.request else requests[-1:]
    ink = UNICODE if prints(UNICODE.solid + UNICODE.hidden) else ASCII
    print("\n\n".join("\n".join(map(printable, _view(request, ink))) for request in views))
    if args.jaeger_url:
        print("\n" + "\n".join(map(printable, _jaeger_links(args.jaeger_url, views))))


def _view(request: RecordedRequest, ink: Ink) -> list[str]:
    lines, missing = request_view(request, ink, columns(WIDTH)), request.missing()
    if missing:
        lines += ["", f"not there: {', '.join(missing)}; each process writes its own, a moment after the end"]
    return lines


def _jaeger_links(base: str, requests: Sequence[RecordedRequest]) -> list[str]:
    """Returns where Jaeger shows these requests, the newest traces, and, of two, the comparison."""
    links = [("Jaeger", trace_link(base, request.trace_id)) for request in requests]
    if len(requests) == 2:
        links.append(("compared", comparison_link(base, *(request.trace_id for request in requests))))
    root = requests[-1].root
    links.append(("search", search_link(base, root.service if root is not None and root.service else _ROUTER)))
    return [f"{name:<10}{link}" for name, link in links]


def _write_page(args: argparse.Namespace, requests: Sequence[RecordedRequest]) -> None:
    from services.cli.trace_page import page  # reads more of Baton than is needed for text

    name = pathlib.Path(args.file).name
    text = page(requests, name, args.jaeger_url).encode(errors="backslashreplace")
    try:
        if args.html is not None:
            path = pathlib.Path(args.html).expanduser().absolute()
            write_named(path, text)
        else:
            path = _written_for_this_user(text)
    except OSError as error:
        raise ConfigError(f"--html: the page cannot be written: {error.filename}: {error.strerror}") from error
    print(printable(str(path)))
    if args.open and not webbrowser.open(path.as_uri()):
        print("no browser could be opened here; open that file in one", file=sys.stderr)


def _written_for_this_user(page: bytes) -> pathlib.Path:
    """Returns the file in Baton's state directory that each call overwrites, so that no pages pile up; if that cannot
    be written, a temporary one. Others cannot read it. Raises OSError if neither can be written."""
    try:
        path = baton_state() / "trace.html"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, page)
    except OSError:
        path = pathlib.Path(tempfile.gettempdir(), f"baton-trace-{secrets.token_hex(8)}.html")
        write_whole(path, page)
    return path


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
