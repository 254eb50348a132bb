"""Runs `baton explain`: why a request was placed where it was, what the next-best worker would have cost, and what it
waits for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from baton.v1 import control_pb2
from services.cli.arguments import CONTROL_TIMEOUT_S, Parser, add_control
from services.cli.client import control, tls_of
from services.cli.tables import clip, table
from services.core.errors import BatonError
from services.core.printable import printable
from services.router.policy import WhyComputed, WhyNot, WhySplit, WhyUnsplit
from services.rpc.plain import plain

_MOST_LINE_CHARS = 400
_REASONS = {why.name.lower(): why.value for why in WhyNot}
_UNSPLIT = {why.name.lower(): why.value for why in WhyUnsplit}
_SPLIT = {why.name.lower(): why.value for why in WhySplit}
_COMPUTED = {why.name.lower(): why.value for why in WhyComputed}
_PHASES = {"prefill": "prefill", "decode": "decode", "unsplit": "unsplit sequence", "park": "parked handoff"}


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Shows why a recent request's workers were chosen, or what it waits for.")
    parser.add_argument(
        "--request",
        metavar="ID",
        help="the request's id, as its client gave it, or as baton generate, x-request-id over HTTP and baton top "
        "show it (default: the newest request)",
    )
    add_control(parser, timeout_s=CONTROL_TIMEOUT_S)
    parser.add_argument(
        "--router", dest="target", default=argparse.SUPPRESS, metavar="HOST:PORT", help="the same as --target"
    )
    parser.add_argument("--json", action="store_true", help="all that the router remembers of it, as JSON")
    arguments = parser.parse_args(argv)
    with control(arguments.target, arguments.cluster_token_file, tls_of(arguments)) as call:
        if arguments.request is None:
            listed = call("ListTimelines", control_pb2.ListTimelinesRequest(), arguments.timeout).timelines
            if not listed:
                raise BatonError(f"{arguments.target}: there has been no request yet")
            arguments.request = max(listed, key=lambda each: each.number).request_id
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
    candidates, is_only = choice["candidates"], choice["verdict"]["decider"] == "only"
    winner = clip(candidates[0]["worker_id"]) if candidates else "-"
    yield (
        f"{_PHASES.get(choice['phase'], choice['phase'])} on {winner}  leg {choice['leg']}  attempt {choice['attempt']}"
        f"  {_ago(choice)}  waited {_ms(choice['waited_us'] / 1000)}  {choice['outcome'] or 'runs'}"
        + ("  it was the only candidate" if is_only else "")
    )
    if not is_only:
        yield from _comparison(choice)
    if "unsplit" in choice:
        yield f"not split   {_unsplit(choice['unsplit'])}"
    if "split" in choice:
        yield f"split       {_split(choice['split'])}"
    if "prefix" in choice:
        yield f"prefix      {_prefix(choice['prefix'])}"
    if choice["num_left_out"]:
        yield f"left out    {_left_out(choice)}"
    if "before" in choice:
        yield f"before      {_vain(choice['before'])}"


def _comparison(choice: dict[str, Any]) -> Iterator[str]:
    """Yields the candidates' scores, and what decided between them."""
    candidates, terms, verdict = choice["candidates"], choice["terms"], choice["verdict"]
    winner = clip(candidates[0]["worker_id"]) if candidates else "-"
    heading = ["worker", *(f"{term['weight']:g} x {clip(term['name'])}" for term in terms), "score"]
    yield from table([heading, *(_row(each) for each in candidates)])
    num_more = choice["num_candidates"] - len(candidates)
    if num_more > 0:
        yield f"and {num_more} more with lower scores"
    yield f"decided by  {_decided(verdict, winner)}"
    if verdict["decider"] in ("term", "tie") and len(candidates) > 1:
        yield f"next best   {_cost(verdict, clip(candidates[1]['worker_id']))}"


def _prefix(prefix: dict[str, Any]) -> str:
    tokens, source = prefix["num_tokens"], clip(prefix["source"])
    costs = f"expected {_ms(prefix['bring_ms'])}, to compute them {_ms(prefix['compute_ms'])}"
    if "why_computed" in prefix:
        why = str(prefix["why_computed"])
        return f"{tokens} tokens computed that {source} has: to bring them {costs}: {_COMPUTED.get(why, why)}"
    if "brought_tokens" not in prefix:
        came = "not known yet what came of it"
    elif prefix["brought_tokens"]:
        came = f"{prefix['brought_tokens']} brought in {_ms(prefix['brought_ms'])}"
    else:
        came = "nothing came of it, and they were computed"
    return f"{tokens} tokens from {source}: {costs}: {came}"


def _unsplit(unsplit: dict[str, Any]) -> str:
    reason = str(unsplit["reason"])
    words = _UNSPLIT.get(reason, reason)
    if "costs" not in unsplit:
        return words
    return f"{words}: {_split_costs(unsplit['costs'], 'the prompt on ' + clip(unsplit['prefill']), 'all of it here')}"


def _split(split: dict[str, Any]) -> str:
    reason = str(split["reason"])
    words = _SPLIT.get(reason, reason)
    if "costs" not in split:
        return words
    return f"{words}: {_split_costs(split['costs'], 'the prompt here', 'all of it on ' + clip(split['decode']))}"


def _split_costs(milliseconds: dict[str, float], apart: str, unsplit: str) -> str:
    costs = {name: _ms(value) for name, value in milliseconds.items()}
    return (
        f"{apart}: queue {costs['queue_ms']} + prompt {costs['prefill_ms']} + handoff {costs['handoff_ms']}; "
        f"{unsplit}: queue {costs['unsplit_queue_ms']} + prompt {costs['unsplit_prefill_ms']} + "
        f"delay of others {costs['disturbance_ms']}"
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
