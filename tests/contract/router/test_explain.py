"""Tests ControlService.Explain over real grpc.aio: what decided, for requests that live and that have ended."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2, control_pb2_grpc, types_pb2
from services.router.front.operator.explanation_messages import MOST_ANSWERED
from services.rpc.names import Attr, Span
from services.rpc.options import channel_options
from tests.support.cluster import Cluster, code_of, read, request
from tests.support.scripted_worker import TEXT


async def explain(cluster: Cluster, request_id: str) -> list[control_pb2.ExplainedRequest]:
    answer = await cluster.control.Explain(control_pb2.ExplainRequest(request_id=request_id))
    return list(answer.requests)


async def test_both_choices_of_an_answered_request(cluster: Cluster, pair: Any) -> None:
    prefill, decode = pair
    assert (await read(cluster.inference.GenerateStream(request(request_id="r"))))[1] == TEXT
    (found,) = await explain(cluster, "r")
    assert (found.request_id, found.live, found.HasField("waiting")) == ("r", False, False)
    assert found.model
    assert not found.failure
    first, second = found.choices
    assert (first.phase, second.phase) == (control_pb2.PLACED_PHASE_PREFILL, control_pb2.PLACED_PHASE_DECODE)
    for choice, worker in ((first, prefill), (second, decode)):
        (winner,) = choice.candidates
        assert winner.worker_id == worker.worker_id
        assert winner.score == pytest.approx(
            sum(term.weight * value for term, value in zip(choice.terms, winner.values, strict=True))
        )
        assert choice.verdict.decider == control_pb2.DECIDER_ONLY
        assert (choice.num_candidates, choice.attempt, choice.outcome) == (1, 1, "done")
        assert 0 <= choice.age_us <= found.age_us
    assert second.leg > first.leg > 0


async def test_of_two_candidates_it_says_what_decided(cluster: Cluster) -> None:
    for worker_id in ("p2", "p1"):
        await cluster.add("prefill", worker_id=worker_id)
    await cluster.add("decode")
    await read(cluster.inference.GenerateStream(request(request_id="r")))
    (found,) = await explain(cluster, "r")
    choice = found.choices[0]
    winner, other = choice.candidates
    assert {winner.worker_id, other.worker_id} == {"p1", "p2"}
    assert winner.score >= other.score
    differences = {
        term.name: term.weight * (mine - theirs)
        for term, mine, theirs in zip(choice.terms, winner.values, other.values, strict=True)
    }
    verdict = choice.verdict
    if winner.score == other.score:
        assert (verdict.decider, winner.worker_id) == (control_pb2.DECIDER_TIE, "p1")
    else:
        assert verdict.decider == control_pb2.DECIDER_TERM
        assert verdict.term_difference == pytest.approx(max(differences.values()))
        assert differences[verdict.term] == verdict.term_difference
    assert verdict.score_difference == pytest.approx(sum(differences.values()))


async def test_a_live_request_says_what_it_waits_for(cluster: Cluster, pair: Any) -> None:
    _, decode = pair
    decode.num_refusals = 1_000_000
    call = asyncio.create_task(read(cluster.inference.GenerateStream(request(request_id="r"))))
    seen: list[control_pb2.ExplainedRequest] = []

    async def waits() -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):  # it has not arrived yet
            seen[:] = await explain(cluster, "r")
        return bool(seen) and seen[0].HasField("waiting") and bool(seen[0].choices)

    await cluster.until(waits)
    (found,) = seen
    assert found.live
    assert found.waiting.phase == control_pb2.PLACED_PHASE_DECODE
    (left_out,) = found.waiting.left_out
    assert (left_out.worker_id, left_out.reason) == (decode.worker_id, control_pb2.LEFT_OUT_REASON_REFUSED)
    assert found.choices[-1].outcome in ("", "refused")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)

    async def is_over() -> bool:
        seen[:] = await explain(cluster, "r")
        return not seen[0].live

    await cluster.until(is_over)
    assert len(seen[0].choices) <= 16


async def test_a_refused_request_says_what_its_client_was_told(cluster: Cluster, pair: Any) -> None:
    asked = request(request_id="r", stopping=types_pb2.StoppingParams(max_tokens=1 << 30))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(cluster.inference.GenerateStream(asked))
    (found,) = await explain(cluster, "r")
    assert (found.live, list(found.choices), found.HasField("waiting")) == (False, [], False)
    assert found.failure == caught.value.details()


async def test_an_id_used_again_is_answered_newest_first_and_bounded(cluster: Cluster, pair: Any) -> None:
    for _ in range(MOST_ANSWERED + 2):
        await read(cluster.inference.GenerateStream(request(request_id="r")))
    found = await explain(cluster, "r")
    assert len(found) == MOST_ANSWERED
    ages = [each.age_us for each in found]
    assert ages == sorted(ages)


async def test_spans_have_the_terms_of_the_winner_and_of_the_runner_up(cluster: Cluster) -> None:
    for worker_id in ("p2", "p1"):
        await cluster.add("prefill", worker_id=worker_id)
    await cluster.add("decode")
    await read(cluster.inference.GenerateStream(request(request_id="r")))
    (found,) = await explain(cluster, "r")
    spans = {span.name: dict(span.attributes or {}) for span in cluster.spans.get_finished_spans()}
    first, second = found.choices
    for name, choice in ((Span.PREFILL, first), (Span.DECODE, second), (Span.PLACE, second)):
        attributes, (winner, *others) = spans[name], choice.candidates
        decider = control_pb2.Decider.Name(choice.verdict.decider).removeprefix("DECIDER_").lower()
        assert attributes[Attr.PLACEMENT_DECIDED_BY] == (choice.verdict.term or decider)
        assert attributes[Attr.PLACEMENT_NUM_CANDIDATES] == len(choice.candidates)
        assert (attributes[Attr.WORKER], attributes[Attr.PLACEMENT_SCORE]) == (winner.worker_id, winner.score)
        assert attributes[Attr.PLACEMENT_TERMS] == weighted(choice, winner)
        assert attributes.get(Attr.RUNNER_UP) == (others[0].worker_id if others else None)
        assert attributes.get(Attr.RUNNER_UP_SCORE) == (others[0].score if others else None)
        assert attributes.get(Attr.RUNNER_UP_TERMS) == (weighted(choice, others[0]) if others else None)
    assert Attr.RUNNER_UP in spans[Span.PREFILL]
    assert Attr.PLACEMENT_SCORE not in spans[Span.QUEUE]


def weighted(choice: control_pb2.PlacementChoice, candidate: control_pb2.PlacementCandidate) -> tuple[str, ...]:
    pairs = zip(choice.terms, candidate.values, strict=True)
    return tuple(f"{term.name}={term.weight * value:.4g}" for term, value in pairs)


@pytest.mark.parametrize(
    ("request_id", "code"),
    [
        ("nobody", grpc.StatusCode.NOT_FOUND),
        ("", grpc.StatusCode.INVALID_ARGUMENT),
        ("x" * 60_000, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_what_is_unknown_is_refused(cluster: Cluster, request_id: str, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await explain(cluster, request_id)
    assert code_of(refused.value) is code


async def test_the_cluster_token_is_needed(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.router.control_address, options=channel_options()) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Explain(control_pb2.ExplainRequest(request_id="r"))
    assert code_of(refused.value) is grpc.StatusCode.UNAUTHENTICATED
