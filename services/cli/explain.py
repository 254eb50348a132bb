"""Runs `baton explain`: why a request was placed where it was, what the next-best worker would have cost, and what it
waits for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from baton.v1 import control_pb2
from services.cli.arguments import CONTROL_TIMEOUT_S, Parser, add_control
from services.cli.client import control, plain
from services.cli.tables import clip, table
from services.core.printable import printable
from services.router.policy import WhyNot, WhyWhole

_MOST_LINE_CHARS = 400
_REASONS = {why.name.lower(): why.value for why in WhyNot}
_UNSPLIT = {why.name.lower(): why.value for why in WhyWhole}
_PHASES = {"prefill": "prefill", "decode": "decode", "whole": "whole sequence"}


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Shows why a recent request's workers were chosen, or what it waits for.")
    parser.add_argument("--request", required=True, metavar="ID", help="the request's id, as its client gave it")
    add_control(parser, timeout_s=CONTROL_TIMEOUT_S)
    parser.add_argument(
        "--router", dest="target", default=argparse.SUPPRESS, metavar="HOST:PORT", help="the same as --target"
    )
    parser.add_argument("--json", action="store_true", help="all that the router remembers of it, as JSON")
    arguments = parser.parse_args(argv)
    with control(arguments.target, arguments.cluster_token_file) as call:
        request = control_pb2.ExplainRequest(request_id=arguments.request)
        answer = plain(call("Explain", request, arguments.timeout))
    print(json.dumps(answer) if arguments.json else text(answer))
    return 0


def text(answer: dict[str, Any]) -> str:
    """Returns the answer as text for people. `answer` is an ExplainResponse as plain data."""
    blocks = ["\n".join(map(printable, _request(request))) for request in answer["requests"]]
    return "\n\n\n".join(blocks)


def _request(request: dict[str, Any]) -> Iterator[str]:
    state = "live" if request["live"] else "ended"
    yield f"request {clip(request['request_id'], 128)}  model {clip(request['model'])}  {_ago(request)}  {state}"
    for number, choice in enumerate(request["choices"]):
        yield ""
        yield from _choice(choice)
        if not number and request["num_forgotten"]:
            yield ""
            yield f"{request['num_forgotten']} choices that followed are no longer kept"
    if "waiting" in request:
        yield ""
        yield f"{'waits' if request['live'] else 'ended while it waited'} for a worker: {_vain(request['waiting'])}"
    elif not request["choices"] and not request["failure"]:
        yield "it was not placed, and no attempt to place it is known: others are before it, or it ended first"
    if request["failure"]:
        yield ""
        yield f"its client was told: {clip(request['failure'], 500)}"


def _choice(choice: dict[str, Any]) -> Iterator[str]:
    candidates, terms, verdict = choice["candidates"], choice["terms"], choice["verdict"]
    winner = clip(candidates[0]["worker_id"]) if candidates else "-"
    yield (
        f"{_PHASES.get(choice['phase'], choice['phase'])} on {winner}  leg {choice['leg']}  attempt {choice['attempt']}"
        f"  {_ago(choice)}  waited {_ms(choice['waited_us'] / 1000)}  {choice['outcome'] or 'runs'}"
    )
    heading = ["worker", *(f"{term['weight']:g} x {clip(term['name'])}" for term in terms), "score"]
    yield from table([heading, *(_row(each) for each in candidates)])
    num_more = choice["num_candidates"] - len(candidates)
    if num_more > 0:
        yield f"and {num_more} more with lower scores"
    if "unsplit" in choice:
        yield f"not split   {_unsplit(choice['unsplit'])}"
    yield f"decided by  {_decided(verdict, winner)}"
    if verdict["decider"] in ("term", "tie") and len(candidates) > 1:
        yield f"next best   {_cost(verdict, clip(candidates[1]['worker_id']))}"
    if choice["num_left_out"]:
        yield f"left out    {_left_out(choice)}"
    if "before" in choice:
        yield f"before      {_vain(choice['before'])}"


def _unsplit(unsplit: dict[str, Any]) -> str:
    reason = str(unsplit["reason"])
    words = _UNSPLIT.get(reason, reason)
    if "costs" not in unsplit:
        return words
    costs = {name: _ms(value) for name, value in unsplit["costs"].items()}
    return (
        f"{words}: on {clip(unsplit['prefill'])} queue {costs['queue_ms']} + prompt {costs['prefill_ms']} + handoff "
        f"{costs['handoff_ms']}, here queue {costs['whole_queue_ms']} + prompt {costs['whole_prefill_ms']} + delay of "
        f"others {costs['disturbance_ms']}"
    )


def _row(candidate: dict[str, Any]) -> list[str]:
    values = [f"{value:.3f}" for value in candidate["values"]]
    return [clip(candidate["worker_id"]), *values, f"{candidate['score']:.3f}"]


def _decided(verdict: dict[str, Any], winner: str) -> str:
    match verdict["decider"]:
        case "term":
            return f"{clip(verdict['term'])}: {verdict['term_difference']:.3f} more for {winner}"
        case "tie":
            return "nothing: the scores are equal, and the lower id wins"
        case "only":
            return "nothing: it was the only candidate"
        case "aged":
            return (
                "its age: it had waited so long that it went to the worker nearest to having room, whatever its score"
            )
    return str(verdict["decider"])


def _cost(verdict: dict[str, Any], runner_up: str) -> str:
    lower = verdict["score_difference"]
    costs = [f"{runner_up}: {f'a score {lower:.3f} lower' if lower else 'the same score'}"]
    if "queue_ms" in verdict:
        costs.append(f"its turn {_difference(verdict['queue_ms'], 'later', 'earlier', 'at the same time')}")
    if "step_ms" in verdict:
        costs.append(f"decode steps {_difference(verdict['step_ms'], 'longer', 'shorter', 'as long')}")
    return ", ".join(costs)


def _difference(milliseconds: float, more: str, less: str, same: str) -> str:
    amount = _ms(abs(milliseconds))
    return same if amount == _ms(0.0) else f"{amount} {more if milliseconds > 0 else less}"


def _vain(attempt: dict[str, Any]) -> str:
    phase = _PHASES.get(attempt["phase"], attempt["phase"])
    return f"{_ago(attempt)} no worker took the {phase}: {_left_out(attempt) or 'no worker has the role'}"


def _left_out(holder: dict[str, Any]) -> str:
    """Returns who was left out and why, workers with the same reason together."""
    names: dict[str, list[str]] = {}
    for each in holder["left_out"]:
        reason = str(each["reason"])
        names.setdefault(_REASONS.get(reason, reason), []).append(clip(each["worker_id"]))
    parts = [f"{', '.join(workers)}: {reason}" for reason, workers in names.items()]
    num_more = holder["num_left_out"] - len(holder["left_out"])
    return clip("; ".join([*parts, *([f"and {num_more} more"] if num_more > 0 else [])]), _MOST_LINE_CHARS)


def _ago(holder: dict[str, Any]) -> str:
    return f"{_ms(holder['age_us'] / 1000)} ago"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
