"""Draws one request of a trace file: `python scripts/render_trace.py TRACE.jsonl OUT.svg [--request ID]`, a waterfall.

Owns: the picture. Reading and arithmetic are `baton trace`'s. The drawing brings its own panel and follows the reader's
colour scheme, so it can be read on a light and on a dark page; it has no script, no font and no link.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from services.cli.trace_breakdown import break_down
from services.cli.trace_reader import RecordedRequest, SpanRecord, read_requests
from services.rpc.names import Attr, Event, Span

WIDTH, ROW, TOP = 960, 26, 100
LEFT, RIGHT = 240, 848
"""Between them lies the time axis, px; durations stand right of it."""
FOOT = 66
LEAST_PX = 2.5

KINDS = {
    Span.PREFILL_WAIT: "prefill",
    Span.PREFILL_COMPUTE: "prefill",
    Span.KV_TRANSFER: "transfer",
    Span.DECODE_WAIT: "decode",
    Span.DECODE_RUN: "decode",
}
"""All others are the router's."""
LEGEND = {"router": "router", "prefill": "prefill worker", "transfer": "KV transfer", "decode": "decode worker"}
STYLE = """
text { font: 13px ui-sans-serif, -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #24292f }
.panel { fill: #fbfcfd; stroke: #d0d7de }
.grid { stroke: #e3e7eb }
.axis, .small { fill: #59636e; font-size: 11.5px }
.title { font-size: 15px; font-weight: 600 }
.name { font-size: 12.5px }
.end { text-anchor: end }
.mid { text-anchor: middle }
.router { fill: #8c959f }
.prefill { fill: #2f6fde }
.decode { fill: #1f9d57 }
.transfer { fill: #e07b00 }
.chunk { stroke: #fbfcfd; stroke-width: 1.5 }
.mark { stroke: #c2255c; stroke-width: 1.5; stroke-dasharray: 4 3 }
.marked { fill: #c2255c; font-size: 11.5px; font-weight: 600 }
.stripe { stroke: #e07b00; stroke-width: 3.2 }
.back { fill: #fbe3c3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.panel { fill: #12171e; stroke: #30363d }
.grid { stroke: #262c34 }
.axis, .small { fill: #9aa4af }
.router { fill: #7d8590 }
.prefill { fill: #4d8dff }
.decode { fill: #35b96f }
.transfer { fill: #f29a2e }
.chunk { stroke: #12171e }
.mark { stroke: #ff6b9d }
.marked { fill: #ff6b9d }
.stripe { stroke: #f29a2e }
.back { fill: #4a3313 }
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws one request of a trace file.")
    parser.add_argument("trace", type=Path, help="what --trace-file wrote")
    parser.add_argument("out", type=Path, help="the SVG file to write")
    parser.add_argument("--request", help="request or trace id (default: the latest)")
    args = parser.parse_args()
    requests = [one for one in read_requests(str(args.trace)) if args.request in (None, one.request_id, one.trace_id)]
    if not requests:
        print(f"{args.trace} has no such request", file=sys.stderr)
        return 1
    args.out.write_text(picture(requests[-1]), encoding="utf-8")
    return 0


def picture(request: RecordedRequest) -> str:
    rows = request.tree()
    height = TOP + ROW * len(rows) + FOOT
    scale = _Scale(request)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(_summary(request), {chr(34): "&quot;"})}">',
        f"<style>{STYLE}</style>",
        '<defs><pattern id="beside" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect class="back" width="7" height="7"/><line class="stripe" y2="7"/></pattern></defs>',
        f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="20" y="30">{escape(_title(request))}</text>',
        *_legend(),
        *_grid(scale, len(rows)),
    ]
    for index, (depth, span) in enumerate(rows):
        parts += _row(scale, TOP + ROW * index, depth, span)
    parts += [*_first_token(request, scale, len(rows)), *_foot(request, height)]
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    def __init__(self, request: RecordedRequest) -> None:
        self._start_ns = request.start_ns
        self.total_ms = max((request.end_ns - request.start_ns) / 1e6, 1e-3)

    def x(self, at_ns: int) -> float:
        return self.at((at_ns - self._start_ns) / 1e6)

    def at(self, ms: float) -> float:
        return LEFT + (RIGHT - LEFT) * ms / self.total_ms

    def ticks(self) -> Iterator[float]:
        """Yields round milliseconds, at most nine of them."""
        step = next(
            unit * 10.0**power
            for power in range(-3, 9)
            for unit in (1, 2, 5)
            if self.total_ms / (unit * 10.0**power) <= 8
        )
        return (index * step for index in range(int(self.total_ms / step) + 1))


def _title(request: RecordedRequest) -> str:
    about = request.root.attributes if request.root else {}
    model = about.get(Attr.REQUEST_MODEL, "")
    return f"One request: {about.get(Attr.INPUT_TOKENS, 0)} tokens in, {about.get(Attr.OUTPUT_TOKENS, 0)} out ({model})"


def _summary(request: RecordedRequest) -> str:
    return f"{_title(request)}; spans: " + ", ".join(f"{span.name} {_ms(span.duration_ms)}" for span in request.spans)


def _legend() -> Iterator[str]:
    x = 20.0
    for kind, label in LEGEND.items():
        yield f'<rect class="{kind}" x="{x:.0f}" y="44" width="11" height="11" rx="2"/>'
        yield f'<text class="small" x="{x + 17:.0f}" y="54">{label}</text>'
        x += 17 + 6.6 * len(label) + 22


def _grid(scale: _Scale, num_rows: int) -> Iterator[str]:
    for ms in scale.ticks():
        x = scale.at(ms)
        yield f'<line class="grid" x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{TOP + ROW * num_rows}"/>'
        label = f"{ms:g} ms" if ms < 1000 else f"{ms / 1000:g} s"
        yield f'<text class="axis mid" x="{x:.1f}" y="{TOP - 12}">{label}</text>'


def _row(scale: _Scale, y: float, depth: int, span: SpanRecord) -> Iterator[str]:
    kind, left = KINDS.get(span.name, "router"), scale.x(span.start_ns)
    width = max(LEAST_PX, scale.x(span.end_ns) - left)
    where = str(span.attributes.get(Attr.WORKER) or span.instance) if kind != "router" else ""
    # A parent is drawn thin: its children say what the time was spent on.
    height = 7 if span.name in (Span.REQUEST, Span.PREFILL, Span.DECODE) else 15
    bar = f'x="{left:.1f}" y="{y + (ROW - height) / 2:.1f}" height="{height}" rx="2"'
    yield f"<g><title>{escape(f'{span.name}: {_ms(span.duration_ms)}')}</title>"
    yield f'<text class="name" x="{20 + 14 * depth}" y="{y + 18}">{escape(span.name)}</text>'
    yield f'<text class="small end" x="{LEFT - 14}" y="{y + 18}">{escape(where)}</text>'
    if span.name == Span.KV_TRANSFER:
        exposed = span.attributes.get(Attr.TRANSFER_EXPOSED_MS, span.duration_ms) / max(span.duration_ms, 1e-6)
        shown = min(width, max(LEAST_PX, width * exposed))
        yield f'<rect fill="url(#beside)" {bar} width="{width:.1f}"/>'
        bar = bar.replace(f'x="{left:.1f}"', f'x="{left + width - shown:.1f}"', 1)
        yield f'<rect class="transfer" {bar} width="{shown:.1f}"/>'
    else:
        yield f'<rect class="{kind}" {bar} width="{width:.1f}"/>'
    for event in span.events:
        if event.name == Event.CHUNK and event.at_ns < span.end_ns:
            x = scale.x(event.at_ns)
            yield f'<line class="chunk" x1="{x:.1f}" y1="{y + 6}" x2="{x:.1f}" y2="{y + 21}"/>'
    yield f'<text class="small end" x="{WIDTH - 20}" y="{y + 18}">{_ms(span.duration_ms)}</text></g>'


def _first_token(request: RecordedRequest, scale: _Scale, num_rows: int) -> Iterator[str]:
    at_ms = break_down(request).first_token.total_ms
    if at_ms is not None:
        x, bottom = scale.at(at_ms), TOP + ROW * num_rows
        yield f'<line class="mark" x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom + 4}"/>'
        anchor = "end" if x > (LEFT + RIGHT) / 2 else "start"
        at = f'style="text-anchor: {anchor}" x="{x:.1f}" y="{bottom + 17}"'
        yield f'<text class="marked" {at}>first token {_ms(at_ms)}</text>'


def _foot(request: RecordedRequest, height: int) -> Iterator[str]:
    """Yields what the picture is for, in words: the transfer is there, and almost none of it is waited for."""
    told = break_down(request)
    if told.transfer is None or told.second_token is None or told.second_token.transfer_exposed_ms is None:
        return
    moved = f"{(told.transfer.bytes or 0) / 2**20:.1f} MiB of KV moved by {told.transfer.transport or 'unknown'}: "
    overlapped = f"{_ms(told.second_token.transfer_overlapped_ms or 0.0)} beside the prefill (hatched)"
    text = f"{moved}{overlapped}, {_ms(told.second_token.transfer_exposed_ms)} exposed"
    yield f'<text class="small" x="20" y="{height - 16}">{escape(text)}</text>'


def _ms(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
