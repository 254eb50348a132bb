"""Tests who counts for a latency objective, and the figures that `baton slo` shows of it."""

from __future__ import annotations

import asyncio

import pytest

from services.cli.attainment import LATENCIES, EndedRequest, attainment_of
from services.cli.slo import of_timeline
from services.core import errors
from services.router.telemetry.slo import Objectives, grade_failed, grade_outcome
from services.router.telemetry.tracing import error_outcome
from services.rpc.plain import plain
from services.rpc.status import CODES
from tests.support.scripted_control import split_timeline

OBJECTIVES = Objectives(ttft_ms=500.0, tpot_ms=50.0, itl_ms=200.0, e2e_ms=5000.0, queue_ms=100.0)


def error_of(kind: type[errors.BatonError]) -> errors.BatonError:
    return kind("field", "message") if issubclass(kind, errors.InvalidRequest) else kind("message")


@pytest.mark.parametrize("kind", [errors.BatonError, *CODES])
def test_an_outcome_is_graded_as_its_error_is(kind: type[errors.BatonError]) -> None:
    error = error_of(kind)
    for elapsed_s in (0.0, 0.5, 0.6):
        assert grade_outcome(error_outcome(error), elapsed_s, 0.5) is grade_failed(error, elapsed_s, 0.5)
    assert error_outcome(asyncio.CancelledError()) == "cancelled"


def test_attainment_by_objective_and_by_group() -> None:
    requests = [
        EndedRequest(1000, 100, 10, 30, is_split=True),
        EndedRequest(4500, 450, 60, 300, is_split=True),
        EndedRequest(6000, 700, 40, 160, is_split=False),
        EndedRequest(200, 200, is_split=None),  # one token
    ]
    found = attainment_of(requests, OBJECTIVES)
    ttft = found["ttft"]["all"]
    assert (ttft.num_counted, ttft.num_met, ttft.num_near) == (4, 3, 1)
    assert (ttft.attained, ttft.near) == (0.75, 0.25)
    assert ttft.percentiles_ms == {"p50": 200, "p95": 700, "p99": 700}
    assert (found["ttft"]["split"].num_counted, found["ttft"]["unsplit"].num_counted) == (2, 1)
    assert found["ttft"]["unsplit"].num_met == 0
    tpot, itl, e2e = (found[name]["all"] for name in ("tpot", "itl", "e2e"))
    assert (tpot.num_counted, tpot.num_met, tpot.num_near) == (3, 2, 0)
    assert (itl.num_counted, itl.num_met, itl.num_near) == (3, 2, 0)
    assert (e2e.num_counted, e2e.num_met, e2e.num_near) == (4, 3, 1)


def test_the_edge_of_an_objective() -> None:
    found = attainment_of([EndedRequest(1, ttft) for ttft in (400.0, 400.1, 500.0, 500.1)], OBJECTIVES)["ttft"]["all"]
    assert (found.num_counted, found.num_met, found.num_near) == (4, 3, 2)


def test_failures_of_the_cluster_are_misses_however_soon() -> None:
    found = attainment_of([EndedRequest(1, failure="no_worker")], OBJECTIVES)
    for latency in LATENCIES:
        assert (found[latency]["all"].num_counted, found[latency]["all"].num_met) == (1, 0)
        assert found[latency]["all"].percentiles_ms == {}


def test_what_could_never_be_served_does_not_count() -> None:
    found = attainment_of([EndedRequest(9000, failure="context_length_exceeded")], OBJECTIVES)
    assert [found[latency]["all"].num_counted for latency in LATENCIES] == [0] * len(LATENCIES)
    assert found["ttft"]["all"].attained is None


def test_what_its_client_ended_counts_where_its_time_was_up() -> None:
    early = EndedRequest(300, failure="cancelled")
    late = EndedRequest(600, failure="deadline_exceeded")
    streaming = EndedRequest(600, ttft_ms=100, tpot_ms=30, longest_itl_ms=250, failure="cancelled")
    found = attainment_of([early, late, streaming], OBJECTIVES)
    # Early: nobody knows. Late: no token in time. Streaming: its first token was in time, a later one was not.
    assert (found["ttft"]["all"].num_counted, found["ttft"]["all"].num_met) == (2, 1)
    assert (found["itl"]["all"].num_counted, found["itl"]["all"].num_met) == (1, 0)
    assert found["tpot"]["all"].num_counted == found["e2e"]["all"].num_counted == 0


def test_a_wait_counts_whatever_became_of_the_request() -> None:
    requests = [
        EndedRequest(1000, 100, queue_ms=80.1),
        EndedRequest(1000, failure="internal", queue_ms=30),  # it failed on its worker
        EndedRequest(1000, failure="no_worker"),  # it waited in vain
        EndedRequest(50, failure="cancelled"),  # nobody knows
        EndedRequest(10, 1),  # an echo, which needs no worker
    ]
    found = attainment_of(requests, OBJECTIVES)["queue"]["all"]
    assert (found.num_counted, found.num_met, found.num_near) == (3, 2, 1)
    assert found.percentiles_ms == {"p50": 30, "p95": 80.1, "p99": 80.1}


def test_a_wait_in_vain_has_no_length() -> None:
    message = split_timeline(1)
    assert of_timeline(plain(message)).queue_ms == 4.0
    message.stages.add(name="queue", start_us=7_000, end_us=9_000, attempt=2, outcome="done")
    assert of_timeline(plain(message)).queue_ms == 6.0, "all waits together"
    message.stages.add(name="queue", start_us=9_000, end_us=10_000, attempt=3, outcome="abandoned")
    assert of_timeline(plain(message)).queue_ms is None


def test_percentiles_are_by_nearest_rank() -> None:
    requests = [EndedRequest(1, float(ttft)) for ttft in range(1, 201)]
    assert attainment_of(requests, OBJECTIVES)["ttft"]["all"].percentiles_ms == {"p50": 100, "p95": 190, "p99": 198}
