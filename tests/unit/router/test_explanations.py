"""Tests what is remembered of recent requests' placements: found by id while they live and after, and bounded."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.policy import Job, LeftOutWorkers, PlacedPhase, PlacementChoice, Ranking, explain_choice
from services.router.policy.explanation import MOST_CHOICES, ExplainedRequest, Explanations
from services.router.policy.terms import TERMS
from tests.support.worker_views import prefill


def choice(worker_id: str = "p") -> PlacementChoice:
    job, worker, terms = Job(1, 2), prefill(worker_id), ((1.0, TERMS["dedicated"]),)
    return explain_choice(
        PlacedPhase.PREFILL, job, None, worker, Ranking(), terms, 1.0, waited_s=0.0, left_out=LeftOutWorkers()
    )


def served(explanations: Explanations, label: str, *, num_choices: int = 1, ends: bool = True) -> ExplainedRequest:
    request = explanations.begin("its own", label, 0.0)
    for leg in range(1, num_choices + 1):
        explanations.placed(request, leg, leg, choice())
    if ends:
        explanations.end(request)
    return request


def legs(request: ExplainedRequest) -> list[int]:
    return [each.leg for each in request.choices]


def test_a_request_is_found_while_it_lives_and_after() -> None:
    explanations = Explanations()
    request = explanations.begin("its own", "r", 0.0)
    assert explanations.find("r") == [request]
    explanations.placed(request, 7, 1, choice())
    explanations.leg_ended(request, 7, "done")
    explanations.leg_ended(request, 8, "of a leg without a record")
    explanations.end(request)
    explanations.end(request)
    assert explanations.find("r") == [request]
    assert [(each.leg, each.outcome) for each in request.choices] == [(7, "done")]
    assert explanations.find("other") == []


def test_of_equal_ids_the_newest_is_first() -> None:
    explanations = Explanations()
    requests = [served(explanations, "r") for _ in range(3)]
    assert explanations.find("r") == requests[::-1]


def test_a_request_keeps_its_first_choice_and_the_newest() -> None:
    request = served(Explanations(), "r", num_choices=100)
    assert legs(request) == [1, *range(100 - MOST_CHOICES + 2, 101)]
    assert request.num_forgotten == 100 - MOST_CHOICES


def test_the_oldest_that_has_ended_is_forgotten_first_and_none_that_lives() -> None:
    explanations = Explanations(most_requests=3)
    live = served(explanations, "live", ends=False)
    ended = [served(explanations, f"r{number}") for number in range(5)]
    assert [explanations.find(f"r{number}") for number in range(5)] == [[], [], *([each] for each in ended[2:])]
    assert explanations.find("live") == [live]


@pytest.mark.parametrize("num_live", [0, 50])
def test_memory_is_bounded(num_live: int) -> None:
    """What lives is bounded too: each such request keeps its newest choice alone."""
    explanations = Explanations(most_bytes=20_000)
    live = [served(explanations, f"live{number}", num_choices=3, ends=False) for number in range(num_live)]
    for number in range(1000):
        served(explanations, f"r{number}", num_choices=2)
    for request in live:
        explanations.placed(request, 9, 9, choice())
    kept = [each for requests in explanations._by_label.values() for each in requests]
    assert explanations.num_bytes == sum(each.num_bytes for each in kept)
    if num_live:
        assert kept == live
        assert all(legs(each) == [9] for each in live)
        assert explanations.num_bytes == num_live * live[0].num_bytes
    else:
        assert len(kept) > 3
        assert explanations.num_bytes <= 20_000
    for request in live:
        explanations.end(request)
    assert explanations.num_bytes <= 20_000
    assert not explanations.find("live0")


def test_a_flood_of_refusals_is_bounded_and_leaves_the_others() -> None:
    explanations = Explanations()
    answered = served(explanations, "answered")
    explanations.refused("its own", "first refused", 1.0, "full")
    for number in range(600):
        explanations.refused("its own", str(number), 1.0, "x" * 10_000)
    assert explanations.find("answered") == [answered]
    assert explanations.find("first refused") == []
    (newest,) = explanations.find("599")
    assert (newest.is_live, newest.choices, newest.failure) == (False, [], "x" * 500)
    assert len(explanations._by_label) == 513


def test_why_it_failed_is_remembered() -> None:
    explanations = Explanations()
    request = explanations.begin("its own", "r", 0.0)
    explanations.end(request, "no worker")
    explanations.end(request, "told twice")
    assert request.failure == "no worker"


def test_what_is_forgotten_leaves_nothing() -> None:
    explanations: Any = Explanations(most_requests=0)
    for _ in range(10):
        served(explanations, "r", num_choices=20)
    assert (explanations._by_label, len(explanations._ended), explanations.num_bytes) == ({}, 0, 0)
