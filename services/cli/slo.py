"""Runs `baton slo`: how many of the latest requests met the latency objectives, of a cluster or of a trace file.

Owns: where requests and objectives come from, the table and the JSON form. Never: the arithmetic (`attainment`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton.v1 import control_pb2
from services.cli.arguments import CONTROL_TIMEOUT_S, Parser, add_control
from services.cli.attainment import GROUPS, LATENCIES, PERCENTS, EndedRequest, attainment_of, target_ms
from services.cli.client import control, tls_of
from services.cli.tables import clip, table
from services.cli.trace_breakdown import break_down
from services.cli.trace_reader import RecordedRequest, read_requests
from services.core.config import DAY_S
from services.core.errors import ConfigError
from services.core.printable import printable
from services.router.config import RouterConfig
from services.router.telemetry.slo import SUCCEEDED, Objectives
from services.rpc.names import Attr, Span
from services.rpc.plain import plain

MOST_TIMELINES = 4096
"""As many as a router tells of at once (`ControlService.ListTimelines`)."""

_WORDS = {
    "ttft": "first token",
    "tpot": "mean later token",
    "itl": "longest gap",
    "queue": "wait for a worker",
    "e2e": "whole request",
}


@dataclass(frozen=True)
class Observed:
    """Holds what a cluster or a file says of its requests."""

    ended: list[EndedRequest]
    num_live: int
    objectives: Objectives


def main(argv: Sequence[str], prog: str) -> int:
    arguments = _parser(prog).parse_args(argv)
    observed = of_file(arguments.file, arguments.model) if arguments.file else _of_cluster(arguments)
    flags = (f"{name}_ms" for name in LATENCIES)
    given = {flag: value for flag in flags if (value := getattr(arguments, flag)) is not None}
    observed = dataclasses.replace(observed, objectives=dataclasses.replace(observed.objectives, **given))
    source = arguments.file or arguments.target
    if arguments.json:
        print(json.dumps(_document(source, observed)))
    else:
        print("\n".join(map(printable, text(source, observed))))
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        description="Shows how many requests met the latency objectives: of those that a router remembers, or of a "
        "trace file.",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="what --trace-file wrote (default: ask the router)")
    add_control(parser, timeout_s=CONTROL_TIMEOUT_S)
    parser.add_argument("--model", default="", metavar="ID", help="only the requests of this model (default: of all)")
    for name in LATENCIES:
        parser.add_argument(
            f"--{name}-ms",
            type=milliseconds,
            metavar="MS",
            help=f"objective: {_WORDS[name]} (default: the router's; of a file: that of `baton router`)",
        )
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def milliseconds(value: str) -> float:
    """Parses an objective, at most a day; for argparse's `type`."""
    number = float(value)
    if not 0 < number <= DAY_S * 1e3:
        raise ValueError(value)
    return number


def _of_cluster(arguments: argparse.Namespace) -> Observed:
    request = control_pb2.ListTimelinesRequest(most=MOST_TIMELINES)
    with control(arguments.target, arguments.cluster_token_file, tls_of(arguments)) as call:
        answer = plain(call("ListTimelines", request, arguments.timeout))
    timelines = [each for each in answer["timelines"] if arguments.model in ("", each["model"])]
    ended = [of_timeline(each) for each in timelines if each["phase"] == "ended"]
    return Observed(ended, len(timelines) - len(ended), Objectives(**answer["objectives"]))


def of_timeline(timeline: dict[str, Any]) -> EndedRequest:
    """Returns the request of a Timeline as plain data, which has ended."""
    prefill, decode = timeline["prefill_worker"], timeline["decode_worker"]
    return EndedRequest(
        total_ms=timeline.get("total_us", timeline["age_us"]) / 1e3,
        ttft_ms=_ms(timeline, "ttft_us"),
        tpot_ms=_ms(timeline, "tpot_us"),
        longest_itl_ms=_ms(timeline, "longest_itl_us"),
        failure="" if timeline["outcome"] in SUCCEEDED else timeline["outcome"],
        is_split=prefill != decode if prefill and decode else None,
        queue_ms=_waited_ms(
            ((each["end_us"] - each["start_us"]) / 1e3, each["outcome"])
            for each in timeline["stages"]
            if each["name"] == Span.QUEUE and "end_us" in each
        ),
    )


def of_file(path: str, model: str = "") -> Observed:
    """Returns the requests of a trace file. Raises ConfigError if it cannot be read or has none."""
    requests = [each for each in read_requests(path) if not model or _of_root(each, Attr.REQUEST_MODEL) == model]
    if not requests:
        raise ConfigError(f"{path}: no request {f'of the model {model!r} ' if model else ''}in it yet")
    ended = list(_of_trace(requests))
    return Observed(ended, len(requests) - len(ended), default_objectives())


def _of_trace(requests: Sequence[RecordedRequest]) -> Iterator[EndedRequest]:
    for request in requests:
        root = request.root
        if root is None:
            continue
        failure = str(root.attributes.get(Attr.ERROR_TYPE, "internal")).lower() if root.failed else ""
        breakdown = break_down(request)
        ttft_ms, tpot_ms = breakdown.first_token.total_ms, None
        output_tokens = root.attributes.get(Attr.OUTPUT_TOKENS, 0)
        if ttft_ms is not None and output_tokens > 1:
            tpot_ms = max(0.0, root.duration_ms - ttft_ms) / (output_tokens - 1)
        gaps = [run.attributes.get(Attr.INTER_TOKEN_MAX_MS) for run in request.named(Span.DECODE_RUN)]
        gaps.append(breakdown.second_token.total_ms if breakdown.second_token else None)
        prefill, decode = root.attributes.get(Attr.PREFILL_WORKER), root.attributes.get(Attr.DECODE_WORKER)
        yield EndedRequest(
            total_ms=root.duration_ms,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            longest_itl_ms=max((gap for gap in gaps if gap is not None), default=None),
            # The client of a request whose task was cancelled has left.
            failure="cancelled" if failure == "cancellederror" else failure,
            is_split=prefill != decode if prefill and decode else None,
            queue_ms=_waited_ms(
                (each.duration_ms, each.attributes.get(Attr.OUTCOME)) for each in request.named(Span.QUEUE)
            ),
        )


def default_objectives() -> Objectives:
    """Returns the objectives of a router that was given none."""
    config = RouterConfig
    return Objectives(config.slo_ttft_ms, config.slo_tpot_ms, config.slo_itl_ms, config.slo_e2e_ms, config.slo_queue_ms)


def text(source: str, observed: Observed) -> list[str]:
    """Returns the lines for people."""
    live = f"; {observed.num_live} live, not counted" if observed.num_live else ""
    lines = [f"{clip(source, 128)}  {_counted(len(observed.ended))} ended{live}"]
    if not observed.ended:
        return lines
    rows = [["objective", "target", "of", "count", "attained", "near", *(f"p{percent}" for percent in PERCENTS)]]
    for latency, groups in attainment_of(observed.ended, observed.objectives).items():
        for group in GROUPS:
            of = groups[group]
            if group != "all" and not of.num_counted:
                continue
            named = [_WORDS[latency], f"{target_ms(observed.objectives, latency):g}"] if group == "all" else ["", ""]
            figures = [f"{of.percentiles_ms[f'p{each}']:.1f}" if of.percentiles_ms else "-" for each in PERCENTS]
            shares = [_percent(num, of.num_counted) for num in (of.num_met, of.num_near)]
            rows.append([*named, group, str(of.num_counted), *shares, *figures])
    return [*lines, "", *table(rows), "", "in ms; near: in time, with less than a fifth of the target to spare"]


def _document(source: str, observed: Observed) -> dict[str, Any]:
    return {
        "source": source,
        "num_ended": len(observed.ended),
        "num_live": observed.num_live,
        "objectives": {
            latency: {
                "target_ms": target_ms(observed.objectives, latency),
                **{
                    group: {
                        "num_counted": of.num_counted,
                        "num_met": of.num_met,
                        "num_near": of.num_near,
                        "attained": of.attained,
                        "near": of.near,
                        **{f"{name}_ms": value for name, value in of.percentiles_ms.items()},
                    }
                    for group, of in groups.items()
                },
            }
            for latency, groups in attainment_of(observed.ended, observed.objectives).items()
        },
    }


def _waited_ms(waits: Iterable[tuple[float, object]]) -> float | None:
    """Returns the time of all waits for a worker, each with its outcome; None if there was none, or one was in vain."""
    found = list(waits)
    return sum(ms for ms, _ in found) if found and all(outcome != "abandoned" for _, outcome in found) else None


def _of_root(request: RecordedRequest, name: str) -> object:
    return request.root.attributes.get(name) if request.root else None


def _ms(timeline: dict[str, Any], name: str) -> float | None:
    return timeline[name] / 1e3 if name in timeline else None


def _counted(number: int) -> str:
    return "1 request that has" if number == 1 else f"{number} requests that have"


def _percent(num: int, of: int) -> str:
    """Returns the share, rounded down: what is not all is not shown as 100 %."""
    return f"{num * 1000 // of / 10:.1f} %" if of else "-"


# argparse shows the type's name in "invalid ... value".
milliseconds.__name__ = "number of milliseconds"
