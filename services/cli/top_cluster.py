"""Words what `baton top` shows of a cluster: a heading, its workers with their blocks, and its pairs. Pure.

Owns: rows and columns. Never: colours, drawing on a terminal, or asking. All text is printable: names come from
workers and clients.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from services.cli.tables import clip
from services.cli.top_requests import ms
from services.cli.worker_words import CLASSES, role_of
from services.core.printable import printable

GLYPHS = dict(zip(CLASSES, "▞▓█▒·", strict=True))
ASCII_GLYPHS = dict(zip(CLASSES, "ilac.", strict=True))
WORKER_HEADINGS = (
    "worker",
    "role",
    "state",
    "blocks",
    "in use",
    "run",
    "wait",
    "prefill ms",
    "decode ms",
    "tokens/s",
    "age",
    "reason",
)
PAIR_HEADINGS = ("prefill", "decode", "state", "by", "handoffs", "exposed ms", "MB/s", "reason")
_ROLES = {("prefill",): 0, ("decode",): 1, ("store",): 3}
_MOST_REASON_CHARS = 160
_MOST_PAIR_REQUESTS = 64
"""Newest handoffs that a pair's figures are of."""


class WorkerRow(NamedTuple):
    worker_id: str
    role: str
    state: str
    bar: tuple[int, ...]
    """Cells of each of CLASSES; empty if nothing is known."""
    in_use: str
    """Blocks that no other sequence can have, of all."""
    running: str
    waiting: str
    prefill_ms: str
    """Newest steps with tokens of prompts, on average."""
    decode_ms: str
    """Newest steps that only decoded, on average."""
    tokens_per_s: str
    """Computed since the last look, of prompts and of answers."""
    age: str
    reason: str


class PairRow(NamedTuple):
    prefill: str
    decode: str
    state: str
    transport: str
    num_handoffs: str
    """Handoffs of the requests that are known; the figures are medians of the newest."""
    exposed_ms: str
    megabytes_per_s: str
    reason: str


def heading(target: str, status: dict[str, Any], wait_s: float = 0.0) -> list[str]:
    """Returns lines about the router, its models and its requests. `wait_s`: how long the oldest queued or
    parked request has waited."""
    names = [clip(model["model_id"]) for model in status["models"]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    counts = [f"{name} {status['num_' + name]}" for name in ("queued", "prefilling", "parked", "decoding")]
    waits = f"  oldest wait {_span(wait_s)}" if wait_s else ""
    num_ready = sum(worker["state"] == "ready" for worker in status["workers"])
    lines = [
        f"router {target}  pid {status['router_pid']}  {'ready' if status['ready'] else 'not ready'}"
        f"  model {', '.join(names[:3]) or '-'}{more}",
        f"requests  {'  '.join(counts)}{waits}  workers {num_ready}/{len(status['workers'])} ready",
    ]
    return [printable(clip(line, 400)) for line in lines]


def worker_rows(status: dict[str, Any], width: int, paces: Mapping[str, float | None]) -> list[WorkerRow]:
    """Returns a row for each worker: prefill workers, then decode workers, mixed ones, stores. Bars have `width`
    cells, and `paces` are tokens a second by worker id."""
    return [_worker_row(worker, width, paces) for worker in sorted(status["workers"], key=_by_role)]


def _by_role(worker: dict[str, Any]) -> tuple[int, str]:
    description = worker.get("worker", {})
    return _ROLES.get(tuple(description.get("roles", ())), 2), str(description.get("worker_id", ""))


def _worker_row(status: dict[str, Any], width: int, paces: Mapping[str, float | None]) -> WorkerRow:
    worker, load = status.get("worker", {}), status.get("load")
    roles = [str(role) for role in worker.get("roles", ())]
    identity = (
        _name(worker.get("worker_id", "-")),
        _name(role_of(roles)),
        _name(status["state"]),
    )
    reason = printable(clip(status["reason"], _MOST_REASON_CHARS))
    if load is None:
        return WorkerRow(*identity, (), "-", "-", "-", "-", "-", "-", "-", reason)
    counts = [max(0, load[f"blocks_{name}"]) for name in CLASSES]
    return WorkerRow(
        *identity,
        cells(counts, width),
        f"{sum(counts[:3])}/{sum(counts)}",
        str(load["num_running"]),
        str(load["num_waiting"]),
        _step_ms(load, "prefill_step"),
        _step_ms(load, "decode_step"),
        ms(paces.get(worker.get("worker_id", ""))),
        _span(status["load_age_ms"] / 1e3),
        reason,
    )


def _step_ms(load: dict[str, Any], kind: str) -> str:
    return ms(load[kind]["ms"] if kind in load else None)


def cells(counts: Sequence[int], width: int) -> tuple[int, ...]:
    """Returns how many of `width` cells each count gets: one if it is not 0, and its share of the others; in all
    `width`."""
    total = sum(counts)
    if not total or width < len(counts):
        return ()
    rest = width - sum(count > 0 for count in counts)
    found = [1 + count * rest // total if count else 0 for count in counts]
    found[found.index(max(found))] += width - sum(found)  # what rounding has left shows least at the longest
    return tuple(found)


def bar(lengths: Sequence[int], glyphs: dict[str, str]) -> str:
    """Returns the bar as text, by whose characters the classes can be told apart without colours."""
    return "".join(glyphs[name] * length for name, length in zip(CLASSES, lengths, strict=False))


def legend(glyphs: dict[str, str]) -> str:
    return "  ".join(f"{glyphs[name]} {name}" for name in CLASSES)


def pair_rows(status: dict[str, Any], timelines: Sequence[dict[str, Any]]) -> list[PairRow]:
    """Returns a row for each pair, those that are not proven first. `timelines`: the newest first."""
    handoffs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for timeline in timelines:
        timings = timeline.get("timings", {})
        if "transfer_bytes" in timings:
            handoffs.setdefault((timeline["prefill_worker"], timeline["decode_worker"]), []).append(timings)
    rows = [_pair_row(pair, handoffs.get((pair["prefill"], pair["decode"]), [])) for pair in status["pairs"]]
    return sorted(rows, key=lambda row: (row.state == "proven", row.prefill, row.decode))


def _pair_row(pair: dict[str, Any], handoffs: Sequence[dict[str, Any]]) -> PairRow:
    newest = handoffs[:_MOST_PAIR_REQUESTS]
    exposed = [each["transfer_exposed_ms"] for each in newest if "transfer_exposed_ms" in each]
    # Of bytes in a millisecond, a thousand are a megabyte in a second.
    speeds = [each["transfer_bytes"] / each["transfer_ms"] / 1e3 for each in newest if each.get("transfer_ms", 0) > 0]
    return PairRow(
        _name(pair["prefill"]),
        _name(pair["decode"]),
        _name(pair["state"]),
        _name(newest[0]["transport"] if newest and "transport" in newest[0] else pair.get("transport", "-")),
        str(len(handoffs)),
        ms(statistics.median(exposed)) if exposed else "-",
        f"{statistics.median(speeds):.0f}" if speeds else "-",
        printable(clip(pair["reason"], _MOST_REASON_CHARS)),
    )


def _name(text: object) -> str:
    return printable(clip(str(text)))


def _span(seconds: float) -> str:
    return (
        f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.0f} min"
    )
