"""Lays out what `baton top` knows as plain text: the whole of it, and one request.

Owns: the order of the parts. Never: what stands in a row, asking, or printing. All lines are printable.
"""

from __future__ import annotations

import time
from typing import Any

from services.cli import explain
from services.cli.tables import clip, table
from services.cli.timeline_spans import as_recorded, has_failed
from services.cli.top_cluster import (
    ASCII_GLYPHS,
    GLYPHS,
    PAIR_HEADINGS,
    WORKER_HEADINGS,
    bar,
    heading,
    legend,
    pair_rows,
    worker_rows,
)
from services.cli.top_feed import RouterFeed
from services.cli.top_requests import REQUEST_HEADINGS, FollowedRequest, longest_wait_s, request_row
from services.cli.trace_view import UNICODE, request_view
from services.core.printable import printable

_BAR_CELLS = 24
_MOST_ROWS = 20
"""Pairs and requests in a snapshot."""


def snapshot(feed: RouterFeed, *, unicode: bool) -> list[str]:
    """Returns the cluster as it is: for a file, or a terminal of any width. `feed` has heard from the router."""
    assert feed.status is not None
    glyphs, requests, now = GLYPHS if unicode else ASCII_GLYPHS, feed.requests, feed.now
    lines = [*heading(feed.target, feed.status, longest_wait_s(requests, now)), ""]
    workers = worker_rows(feed.status, _BAR_CELLS, feed.paces)
    lines += table([WORKER_HEADINGS, *([*row[:3], bar(row.bar, glyphs), *row[4:]] for row in workers)])
    lines.append(legend(glyphs))
    pairs = pair_rows(feed.status, [request.timeline for request in requests])
    if pairs:
        lines += ["", *table([PAIR_HEADINGS, *pairs[:_MOST_ROWS]]), *_more(len(pairs), "pairs")]
    if requests:
        rows = [request_row(request, now) for request in requests[:_MOST_ROWS]]
        lines += ["", *table([REQUEST_HEADINGS, *rows]), *_more(len(requests), "requests")]
    return lines if unicode else [line.replace("→", "->").replace("…", "~") for line in lines]


def request_lines(request: FollowedRequest, explained: dict[str, Any] | None, now: float, width: int) -> list[str]:
    """Returns one request's waterfall, where its time to the first token went, and why its workers were chosen.

    `explained` is an ExplainedRequest as plain data, if there is one.
    """
    elapsed_s = now - request.arrived_s
    recorded = as_recorded(request.message, time.time_ns() - round(elapsed_s * 1e9), round(elapsed_s * 1e6))
    # Until it has succeeded, nothing is known of what workers measured.
    with_parts = request.message.HasField("timings")
    lines = request_view(recorded, UNICODE, width, with_parts=with_parts)
    lines += [
        f"! {stage.name} on {clip(stage.worker_id)}, attempt {stage.attempt}: {clip(stage.outcome)}"
        for stage in request.message.stages
        if has_failed(stage.leg, stage.outcome)
    ]
    for name, text in (("prompt", request.message.prompt), ("output", request.message.output)):
        if text:
            lines += ["", f"{name}: {clip(text, 2000)}"]
    lines = [printable(line) for line in lines]
    if explained is not None:
        lines += ["", *explain.text({"requests": [explained]}).splitlines()]
    return lines


def _more(num: int, what: str) -> list[str]:
    return [f"and {num - _MOST_ROWS} more {what}"] if num > _MOST_ROWS else []
