"""Draws requests as text, in 100 columns unless told otherwise: a list, and one request's waterfall with its breakdown.

Owns: layout and wording. Never: reading, arithmetic or printing.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence

from services.cli.tables import clip, size, table
from services.cli.trace_breakdown import Breakdown, FirstToken, SecondToken, break_down
from services.cli.trace_reader import RecordedRequest, SpanRecord
from services.rpc.names import Attr, Event, Span

WIDTH = 100
_NAME, _WHERE, _NUMBER = 22, 12, 10
_BESIDE_BAR = _NAME + _WHERE + 2 * _NUMBER + 3
_LEAST_BAR = 12
_PART_BAR = 40


@dataclasses.dataclass(frozen=True)
class Ink:
    """Names the characters of a bar: work, and work hidden behind other work."""

    solid: str
    hidden: str


UNICODE = Ink("█", "░")
ASCII = Ink("#", ".")


def request_list(requests: Sequence[RecordedRequest]) -> list[str]:
    """Returns one line for each request, the latest last, below the headings."""
    rows = [("request", "started", "total ms", "ttft ms", "prompt", "output", "result")]
    for request in requests:
        ttft = break_down(request).first_token.total_ms
        prompt, output = (_root(request, name) for name in (Attr.INPUT_TOKENS, Attr.OUTPUT_TOKENS))
        total = request.root.duration_ms if request.root else None
        figures = (_ms(total), _ms(ttft), _known(prompt), _known(output))
        rows.append((clip(request.request_id), _clock(request.start_ns), *figures, _clip(_result(request), 20)))
    return table(rows)


def request_view(
    request: RecordedRequest, ink: Ink = UNICODE, width: int = WIDTH, *, with_parts: bool = True
) -> list[str]:
    """Returns the header, the waterfall, and unless told otherwise where the time to the first and to the second token
    went."""
    breakdown, bar = break_down(request), max(_LEAST_BAR, width - _BESIDE_BAR)
    lines = [*_header(request), "", *_waterfall(request, ink, bar)]
    if with_parts:
        lines += ["", *_first_token(breakdown.first_token, ink)]
    if with_parts and breakdown.second_token is not None:
        lines += ["", *_second_token(breakdown.second_token, ink)]
    return [*lines, *_footer(request, breakdown)]


def _header(request: RecordedRequest) -> list[str]:
    prompt, output, cached = (
        _root(request, name) for name in (Attr.INPUT_TOKENS, Attr.OUTPUT_TOKENS, Attr.CACHE_READ_INPUT_TOKENS)
    )
    facts = [request.request_id, _root(request, Attr.REQUEST_MODEL), _result(request)]
    if prompt is not None:
        facts.append(f"{prompt} prompt tokens" + (f" ({cached} cached)" if cached else ""))
    if output is not None:
        facts.append(f"{output} output tokens")
    lines = [_clip("  ".join(str(fact) for fact in facts if fact), WIDTH)]
    if request.root is not None and request.root.failed:
        lines.append(_clip(f"failed: {request.root.message}", WIDTH))
    day = datetime.datetime.fromtimestamp(request.start_ns / 1e9).astimezone().strftime("%Y-%m-%d")
    return [*lines, f"trace {request.trace_id}  {day} {_clock(request.start_ns)}"]


def _waterfall(request: RecordedRequest, ink: Ink, width: int) -> list[str]:
    """Returns a line for each span, with bars of `width` cells."""
    total_ms = (request.end_ns - request.start_ns) / 1e6
    scale = f"0{f'{_ms(total_ms)} ms':>{width - 1}}"
    head = f"{'span':<{_NAME}} {'where':<{_WHERE}}{'start ms':>{_NUMBER}}{'ms':>{_NUMBER}}  {scale}"
    lines = [head]
    for depth, span in request.tree():
        name = _clip("  " * depth + span.name + (" !" if span.failed else ""), _NAME)
        where = _clip(str(span.attributes.get(Attr.WORKER) or span.instance or span.service), _WHERE - 1)
        start_ms = (span.start_ns - request.start_ns) / 1e6
        numbers = f"{_ms(start_ms):>{_NUMBER}}{_ms(span.duration_ms):>{_NUMBER}}"
        bar = _bar(span, start_ms, total_ms, ink, width)
        lines.append(f"{name:<{_NAME}} {where:<{_WHERE}}{numbers}  {bar}".rstrip())
    return lines


def _bar(span: SpanRecord, start_ms: float, total_ms: float, ink: Ink, width: int) -> str:
    """Returns a bar of at least one cell. Of a transfer, the part that ran beside prefill is drawn as hidden."""
    cells = width / max(total_ms, 1e-6)
    begin = min(int(start_ms * cells), width - 1)
    length = max(1, min(round((start_ms + span.duration_ms) * cells), width) - begin)
    hidden = 0
    if span.name == Span.KV_TRANSFER:
        exposed_ms = span.attributes.get(Attr.TRANSFER_EXPOSED_MS, span.duration_ms)
        hidden = min(round(length * (1 - exposed_ms / max(span.duration_ms, 1e-6))), length - 1)
    return " " * begin + (ink.hidden * hidden).ljust(length, ink.solid)


def _first_token(first: FirstToken, ink: Ink) -> list[str]:
    title = "no first token" if first.total_ms is None else f"first token after {_ms(first.total_ms)} ms"
    parts = [
        ("queue", first.queue_ms),
        ("tokenise", first.tokenize_ms),
        ("prefill wait", first.prefill_wait_ms),
        ("prefill compute", first.prefill_compute_ms),
        ("rest", first.rest_ms),
    ]
    return [title, *_parts(parts, first.total_ms, ink)]


def _second_token(second: SecondToken, ink: Ink) -> list[str]:
    title = "second token" if second.total_ms is None else f"second token {_ms(second.total_ms)} ms later"
    parts = [("exposed transfer", second.transfer_exposed_ms), ("decode wait", second.decode_wait_ms)]
    if second.handoff_wait_ms:
        parts.insert(0, ("wait for a worker", second.handoff_wait_ms))
    parts += [("first step", second.first_step_ms), ("rest", second.rest_ms)]
    lines = [title, *_parts(parts, second.total_ms, ink)]
    if second.transfer_overlapped_ms is not None:
        lines.append(
            f"  {'overlapped transfer':<20}{_ms(second.transfer_overlapped_ms):>10} ms  (beside prefill: costs nothing)"
        )
    return lines


def _parts(parts: Sequence[tuple[str, float | None]], total_ms: float | None, ink: Ink) -> list[str]:
    lines = []
    for name, value in parts:
        if value is None and total_ms is None:
            continue
        line = f"  {name:<20}{_ms(value):>10} ms"
        if value is not None and total_ms:
            share = min(1.0, value / total_ms)
            line += f"{share:>6.0%}  {ink.solid * round(share * _PART_BAR)}"
        lines.append(line.rstrip())
    return lines


def _footer(request: RecordedRequest, breakdown: Breakdown) -> list[str]:
    lines = []
    moved = breakdown.transfer
    if moved is not None and moved.bytes is not None:
        rest = f"; {moved.blocks_not_moved} more were there" if moved.blocks_not_moved else ""
        lines.append(
            f"KV moved: {size(moved.bytes)} in {_known(moved.blocks)} blocks by {_known(moved.transport)}{rest}"
        )
    for run in request.named(Span.DECODE_RUN):
        if Attr.NUM_STEPS not in run.attributes:
            continue
        p50, p99, worst = (
            run.attributes.get(name)
            for name in (Attr.INTER_TOKEN_P50_MS, Attr.INTER_TOKEN_P99_MS, Attr.INTER_TOKEN_MAX_MS)
        )
        steps, batch = run.attributes.get(Attr.NUM_STEPS), run.attributes.get(Attr.MEAN_BATCH_SIZE)
        lines.append(
            f"decode: {_known(steps)} steps, mean batch {_ms(batch)}; between tokens p50 {_ms(p50)}, "
            f"p99 {_ms(p99)}, max {_ms(worst)} ms"
        )
    retries = [event for event in request.root.events if event.name == Event.RETRY] if request.root else []
    if retries:
        lines.append(f"placed again {len(retries)} time{'s' if len(retries) > 1 else ''}")
    return ["", *lines] if lines else []


def _result(request: RecordedRequest) -> str:
    if request.root is None:
        return "unfinished"
    if request.root.failed:
        return str(request.root.attributes.get(Attr.ERROR_TYPE, "error"))
    return ",".join(request.root.attributes.get(Attr.FINISH_REASONS, ())) or "ok"


def _root(request: RecordedRequest, name: str) -> object:
    return request.root.attributes.get(name) if request.root else None


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _known(value: object) -> str:
    return "-" if value is None else str(value)


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 2] + ".."


def _clock(ns: int) -> str:
    return datetime.datetime.fromtimestamp(ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
