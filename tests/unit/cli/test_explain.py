"""Tests what `baton explain` prints of a router's answer: a table for each choice, the reason, and what is left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2, control_pb2_grpc
from services.cli.explain import main, text
from services.core.errors import BatonError
from services.router.policy import WhyComputed, WhyNot, WhySplit, WhyUnsplit
from services.rpc.plain import plain
from tests.support.trusted import CLUSTER_TOKEN

PREFILL, DECODE = control_pb2.PLACED_PHASE_PREFILL, control_pb2.PLACED_PHASE_DECODE
NOT_READY, NO_BLOCKS = control_pb2.LEFT_OUT_REASON_NOT_READY, control_pb2.LEFT_OUT_REASON_NO_BLOCKS


def choice(*scored: tuple[str, float, list[float]], **fields: Any) -> control_pb2.PlacementChoice:
    candidates = [
        control_pb2.PlacementCandidate(worker_id=worker_id, score=score, values=values)
        for worker_id, score, values in scored
    ]
    terms = [
        control_pb2.PlacementTerm(name=name, weight=weight) for name, weight in (("short_queue", 4.0), ("trusted", 0.5))
    ]
    defaults: dict[str, Any] = {
        "phase": PREFILL,
        "leg": 7,
        "attempt": 1,
        "age_us": 1_500_000,
        "outcome": "done",
        "terms": terms,
        "candidates": candidates,
        "num_candidates": len(candidates),
        "verdict": control_pb2.PlacementVerdict(decider=control_pb2.DECIDER_ONLY),
    }
    return control_pb2.PlacementChoice(**(defaults | fields))


def shown(*choices: control_pb2.PlacementChoice, **fields: Any) -> str:
    request = control_pb2.ExplainedRequest(request_id="r", model="tiny", age_us=2_000_000, choices=choices, **fields)
    return text(plain(control_pb2.ExplainResponse(requests=[request])))


def left_out(**reasons: int) -> list[control_pb2.LeftOutWorker]:
    return [control_pb2.LeftOutWorker(worker_id=name, reason=reason) for name, reason in reasons.items()]


VERDICT = control_pb2.PlacementVerdict(
    decider=control_pb2.DECIDER_TERM, term="short_queue", term_difference=1.6, score_difference=1.5, queue_ms=12.25
)


def test_a_choice_is_a_table_with_the_reason_and_the_next_best() -> None:
    explained = choice(
        ("p-1", 4.45, [1.0, 0.9]),
        ("p-0", 2.9, [0.6, 1.0]),
        num_candidates=3,
        verdict=VERDICT,
        left_out=left_out(a=NOT_READY, b=NO_BLOCKS, c=NOT_READY),
        num_left_out=5,
        before=control_pb2.VainAttempt(phase=PREFILL, age_us=1_700_000, left_out=left_out(p=NO_BLOCKS), num_left_out=1),
        waited_us=400_000,
    )
    assert shown(explained).splitlines() == [
        "request r  model tiny  2.0 s ago  ended",
        "",
        "prefill on p-1  leg 7  attempt 1  1.5 s ago  waited 400.0 ms  done",
        "worker  4 x short_queue  0.5 x trusted  score",
        "p-1               1.000          0.900  4.450",
        "p-0               0.600          1.000  2.900",
        "and 1 more with lower scores",
        "decided by  short_queue: 1.600 more for p-1",
        "next best   p-0: a score 1.500 lower, its turn 12.2 ms later",
        "left out    a, c: not ready; b: no room: too few blocks; and 2 more",
        "before      1.7 s ago no worker took the prefill: p: no room: too few blocks",
    ]


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        ({"decider": control_pb2.DECIDER_TIE}, "decided by  nothing: the scores are equal, and the lower id wins"),
        ({"decider": control_pb2.DECIDER_AGED}, "decided by  its age: it had waited so long that it went"),
        ({"decider": 99}, "decided by  99"),
        ({"decider": control_pb2.DECIDER_TERM, "step_ms": -3.0}, "b: the same score, decode steps 3.0 ms shorter"),
        ({"decider": control_pb2.DECIDER_TERM, "queue_ms": -2000.0}, "b: the same score, its turn 2.0 s earlier"),
        ({"decider": control_pb2.DECIDER_TIE, "queue_ms": 0.01}, "b: the same score, its turn at the same time"),
    ],
)
def test_every_reason_is_in_words(verdict: dict[str, Any], line: str) -> None:
    scored = [("a", 1.0, [0.5, 1.0]), ("b", 1.0, [0.5, 1.0])]
    assert line in shown(choice(*scored, phase=DECODE, verdict=control_pb2.PlacementVerdict(**verdict)))


def test_an_only_candidate_is_told_in_one_line() -> None:
    verdict = control_pb2.PlacementVerdict(decider=control_pb2.DECIDER_ONLY)
    _, _, *lines = shown(choice(("a", 1.0, [0.5, 1.0]), phase=DECODE, verdict=verdict)).splitlines()
    (line,) = lines
    assert line.startswith("decode on a  ")
    assert line.endswith("  it was the only candidate")


def test_every_filter_of_the_policy_is_in_words() -> None:
    for why in WhyNot:
        number = control_pb2.LeftOutReason.Value(f"LEFT_OUT_REASON_{why.name}")
        assert f"w: {why.value}" in shown(choice(("a", 1.0, [1.0, 1.0]), left_out=left_out(w=number), num_left_out=1))
    assert len(control_pb2.LeftOutReason.values()) == 1 + len(WhyNot)


def test_a_request_that_waits_says_for_what() -> None:
    waiting = control_pb2.VainAttempt(phase=DECODE, age_us=100, left_out=left_out(d=NO_BLOCKS), num_left_out=1)
    expected = "for a worker: 0.1 ms ago no worker took the decode: d: no room: too few blocks"
    assert shown(waiting=waiting, live=True).endswith(f"\n\nwaits {expected}")
    assert shown(waiting=waiting).endswith(f"\n\nended while it waited {expected}")
    assert "no worker has the role" in shown(waiting=control_pb2.VainAttempt(phase=PREFILL), live=True)
    assert "it was not placed" in shown(live=True)


def test_a_request_that_was_refused_says_what_its_client_was_told() -> None:
    printed = shown(failure="the queue is full (24 requests)\x1b[2J")
    assert printed.endswith("\n\nits client was told: the queue is full (24 requests)\\x1b[2J")
    assert "it was not placed" not in printed


def test_why_a_prompt_was_not_split_is_a_line_with_what_both_ways_cost() -> None:
    costs = control_pb2.SplitCosts(
        queue_ms=1, prefill_ms=2, handoff_ms=12.3, unsplit_queue_ms=3, unsplit_prefill_ms=4, disturbance_ms=5
    )
    unsplit = control_pb2.Unsplit(reason=control_pb2.UNSPLIT_REASON_HANDOFF, prefill="prefill-0", costs=costs)
    printed = shown(choice(("decode-0", 1.0, [1.0, 1.0]), phase=control_pb2.PLACED_PHASE_UNSPLIT, unsplit=unsplit))
    assert (
        "not split   the handoff would take longer than the prompt delays others: the prompt on prefill-0: "
        "queue 1.0 ms + prompt 2.0 ms + handoff 12.3 ms; all of it here: queue 3.0 ms + prompt 4.0 ms + "
        "delay of others 5.0 ms"
    ) in printed.splitlines()
    never = control_pb2.Unsplit(reason=control_pb2.UNSPLIT_REASON_NEVER)
    assert "not split   --split never" in shown(choice(("d", 1.0, [1.0, 1.0]), unsplit=never)).splitlines()


def test_why_a_prompt_was_split_is_a_line_with_what_both_ways_cost() -> None:
    costs = control_pb2.SplitCosts(
        queue_ms=1, prefill_ms=2, handoff_ms=3, unsplit_queue_ms=4, unsplit_prefill_ms=5, disturbance_ms=60
    )
    split = control_pb2.SplitAfterAll(reason=control_pb2.SPLIT_REASON_CHEAPER, decode="decode-0", costs=costs)
    assert (
        "split       it costs less: the prompt here: queue 1.0 ms + prompt 2.0 ms + handoff 3.0 ms; "
        "all of it on decode-0: queue 4.0 ms + prompt 5.0 ms + delay of others 60.0 ms"
    ) in shown(choice(("prefill-0", 1.0, [1.0, 1.0]), split=split)).splitlines()
    for why in WhySplit:
        split = control_pb2.SplitAfterAll(reason=f"SPLIT_REASON_{why.name}")
        assert f"split       {why.value}" in shown(choice(("p", 1.0, [1.0, 1.0]), split=split)).splitlines()


def test_there_are_words_for_each_reason_not_to_split() -> None:
    """A reason has the same name here and in the protocol."""
    for why in WhyUnsplit:
        unsplit = control_pb2.Unsplit(reason=f"UNSPLIT_REASON_{why.name}")
        assert f"not split   {why.value}" in shown(choice(("d", 1.0, [1.0, 1.0]), unsplit=unsplit))


@pytest.mark.parametrize(
    ("came", "words"),
    [
        ({}, "not known yet what came of it"),
        ({"brought_tokens": 992, "brought_ms": 31.0}, "992 brought in 31.0 ms"),
        ({"brought_tokens": 0, "brought_ms": 5.0}, "nothing came of it, and they were computed"),
    ],
)
def test_what_is_brought_is_a_line_with_what_came_of_it(came: dict[str, Any], words: str) -> None:
    prefix = control_pb2.PrefixFromElsewhere(source="b", num_tokens=1008, bring_ms=20.0, compute_ms=500.0, **came)
    assert (f"prefix      1008 tokens from b: expected 20.0 ms, to compute them 500.0 ms: {words}") in shown(
        choice(("a", 1.0, [1.0, 0.0]), prefix=prefix)
    ).splitlines()


def test_why_what_another_worker_has_is_computed_is_a_line() -> None:
    for why in WhyComputed:
        prefix = control_pb2.PrefixFromElsewhere(
            source="b",
            num_tokens=64,
            bring_ms=20.0,
            compute_ms=21.0,
            why_computed=f"PREFIX_COMPUTED_REASON_{why.name}",
        )
        assert (
            f"prefix      64 tokens computed that b has: to bring them expected 20.0 ms, to compute them 21.0 ms: "
            f"{why.value}"
        ) in shown(choice(("a", 1.0, [1.0, 0.0]), prefix=prefix)).splitlines()


def test_choices_that_are_not_kept_are_counted() -> None:
    printed = shown(choice(("a", 1.0, [1.0, 1.0])), choice(("b", 1.0, [1.0, 1.0])), num_forgotten=85)
    assert printed.index("on a") < printed.index("85 choices that followed are no longer kept") < printed.index("on b")


def test_names_command_no_terminal_and_fill_no_screen() -> None:
    evil = "\x1b[2J\u202e" + "w" * 5000
    names = {"term": evil, "decider": control_pb2.DECIDER_TERM}
    explained = choice(
        (evil, 1.0, [1.0, 1.0]),
        (evil, 1.0, [1.0, 1.0]),
        outcome="\x1b]0;title\x07",
        verdict=control_pb2.PlacementVerdict(**names),
        left_out=[control_pb2.LeftOutWorker(worker_id=evil, reason=NOT_READY)] * 3,
        num_left_out=3,
        terms=[control_pb2.PlacementTerm(name=evil, weight=1.0)] * 2,
    )
    request = control_pb2.ExplainedRequest(request_id=evil, model=evil, choices=[explained])
    printed = text(plain(control_pb2.ExplainResponse(requests=[request])))
    assert printed.replace("\n", "").isprintable()
    assert "\\x1b[2J" in printed
    assert max(map(len, printed.splitlines())) < 500


class Router(control_pb2_grpc.ControlServiceServicer):
    timelines: Sequence[control_pb2.Timeline] = ()

    async def ListTimelines(self, request: Any, context: Any) -> control_pb2.ListTimelinesResponse:
        return control_pb2.ListTimelinesResponse(timelines=self.timelines)

    async def Explain(self, request: Any, context: Any) -> control_pb2.ExplainResponse:
        if dict(context.invocation_metadata()).get("authorization") is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        if request.request_id != "r":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"nothing is remembered of {request.request_id}")
        explained = control_pb2.ExplainedRequest(request_id="r", choices=[choice(("a", 1.0, [1.0, 1.0]))])
        return control_pb2.ExplainResponse(requests=[explained, explained])


async def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, flag: str = "--target") -> int:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(Router(), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        return await asyncio.to_thread(main, [*arguments, flag, target], "baton explain")
    finally:
        await server.stop(None)


@pytest.mark.parametrize("flag", ["--target", "--router"])
async def test_it_asks_the_router_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert await run(monkeypatch, "--request", "r", flag=flag) == 0
    assert capsys.readouterr().out.count("\nprefill on a  leg 7") == 2
    assert await run(monkeypatch, "--request", "r", "--json", flag=flag) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [each["choices"][0]["verdict"]["decider"] for each in answer["requests"]] == ["only", "only"]


async def test_an_unknown_request_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BatonError, match=r"^127.0.0.1:\d+: .*nothing is remembered of other"):
        await run(monkeypatch, "--request", "other")


async def test_without_an_id_it_is_the_newest_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [(3, "live-for-long"), (7, "r"), (6, "ended-last")]
    monkeypatch.setattr(Router, "timelines", [control_pb2.Timeline(number=n, request_id=name) for n, name in listed])
    assert await run(monkeypatch) == 0
    assert capsys.readouterr().out.startswith("request r ")
    monkeypatch.setattr(Router, "timelines", [])
    with pytest.raises(BatonError, match="there has been no request yet"):
        await run(monkeypatch)
