"""Tests that the profile computed from timings is the one that has made them, and what is done with noise."""

from __future__ import annotations

import dataclasses

import pytest

from services.core.errors import BatonError
from services.sim.cluster import SimPlan, simulate
from services.sim.fitting import StepTimings, fitted
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest

KNOWN = WorkerProfile("known", 1.0, 1.0, 1.0, num_blocks=77, max_num_batched_tokens=512)
TRUE = WorkerProfile(
    "true",
    ms_per_prefill_token=0.5,
    ms_per_prefill_step=4.0,
    ms_per_decode_step=8.0,
    ms_per_decode_sequence=0.6,
    ms_per_context_token=0.0005,
    ms_per_attended_token=0.0001,
)
HANDING_OVER = dataclasses.replace(TRUE, ms_per_prompt=5.0)
REQUEST_MS = 6.0


def computed_ms(size: int) -> float:
    chunks = [min(512, size - start) for start in range(0, size, 512)]
    return sum(TRUE.prefill_ms(count, count * (512 * number + count / 2)) for number, count in enumerate(chunks))


def timings(noise: float = 0.0) -> StepTimings:
    sizes = (8, 64, 256, 512, 1536)
    return StepTimings(
        {size: [computed_ms(size), computed_ms(size) + noise, computed_ms(size) - noise] for size in sizes},
        {
            (number, length): [TRUE.decode_ms(number, number * length)] * 5
            for number, length in ((1, 60), (4, 60), (16, 60), (4, 1060))
        },
        around_ms=[REQUEST_MS, REQUEST_MS + noise, REQUEST_MS - noise],
        second_ms={8: [14.0], 64: [13.0]},
        saturated_ms={size: [1.1 * TRUE.prefill_ms(size, size * size / 2) + 3.0] for size in (64, 512)},
        beside_ms=[12.0] * 9,
        beside_streams=4,
    )


def test_what_made_the_timings_is_found() -> None:
    profile = fitted(KNOWN, timings(noise=3.0))
    assert profile.ms_per_context_token == pytest.approx(0.0005, rel=0.01)
    assert profile.ms_per_attended_token == pytest.approx(0.0001, rel=0.05)
    for number in (1, 2, 4, 10, 16):
        assert profile.decode_ms(number, number * 300) == pytest.approx(TRUE.decode_ms(number, number * 300), rel=0.01)
    for size in (64, 200, 512):
        assert profile.prefill_ms(size, size * size / 2) == pytest.approx(
            TRUE.prefill_ms(size, size * size / 2), rel=0.02
        )
    assert profile.ms_per_request == pytest.approx(REQUEST_MS)
    assert profile.transfer_latency_ms == pytest.approx(14.0 - TRUE.decode_ms(1, 60))
    assert profile.prefill_beside_factor == pytest.approx(1.1, rel=0.02)
    assert profile.decode_beside_factor == pytest.approx(12.0 / 9.8, rel=0.02)
    assert profile.ms_per_prompt == pytest.approx(3.0, abs=0.3)
    assert (profile.name, profile.num_blocks) == ("known", 77)


def test_without_streams_beside_only_the_handoffs_show() -> None:
    alone = dataclasses.replace(timings(), beside_ms=[], beside_streams=0)
    profile = fitted(KNOWN, alone)
    assert (profile.prefill_beside_factor, profile.decode_beside_factor) == (1.0, 1.0)
    assert profile.ms_per_prompt > 3.0
    nothing = dataclasses.replace(timings(), saturated_ms={})
    assert fitted(KNOWN, nothing).ms_per_prompt == 0


def test_a_few_long_gaps_count_as_they_do_in_the_time_per_output_token() -> None:
    """Takes streams of which one step in four is interrupted."""
    interrupted = dataclasses.replace(timings(), decode_ms={(1, 60): [8.0, 8.0, 8.0, 16.0], (2, 60): [11.0]})
    assert fitted(KNOWN, interrupted).decode_points == ((1, 10.0), (2, 11.0))


def test_a_completed_prompt_keeps_its_worker_from_the_next() -> None:
    trace = [TracedRequest(0.0, 512, 1), TracedRequest(0.01, 512, 1), TracedRequest(9.0, 512, 1)]
    first, second, late = simulate(SimPlan(1, 1, 0, profile=HANDING_OVER), trace).requests
    assert first.ttft_s is not None
    assert second.ttft_s is not None
    assert second.at_s + second.ttft_s - first.ttft_s == pytest.approx(TRUE.step_s(512, 0, 0, 512 * 256) + 0.005)
    assert late.ttft_s == pytest.approx(first.ttft_s), "it was done long ago"


def test_a_step_of_more_never_costs_less() -> None:
    noisy = dataclasses.replace(timings(), decode_ms={(1, 60): [9.0], (2, 60): [8.0], (4, 60): [10.0]})
    assert fitted(KNOWN, noisy).decode_points == ((1, 8.0), (2, 8.0), (4, 10.0))


@pytest.mark.parametrize("missing", [{"decode_ms": {(1, 60): [9.0]}}, {"prefill_ms": {8: [9.0], 64: []}}])
def test_too_few_answers_are_named(missing: dict[str, object]) -> None:
    with pytest.raises(BatonError, match="too few answers"):
        fitted(KNOWN, dataclasses.replace(timings(), **missing))  # type: ignore[arg-type]


def test_a_prompt_that_stays_on_its_worker_keeps_it_from_nothing() -> None:
    """Lets a mixed worker complete two prompts, one right after the other."""
    trace = [TracedRequest(0.0, 512, 1), TracedRequest(0.01, 512, 1)]
    both = [simulate(SimPlan(0, 0, 1, profile=each), trace).requests for each in (TRUE, HANDING_OVER)]
    assert [served.ttft_s for served in both[0]] == [served.ttft_s for served in both[1]]


def test_a_worker_is_slower_while_another_of_its_host_computes() -> None:
    """Lets one prompt run alone, and then beside a long stream."""
    trace = [TracedRequest(0.0, 512, 1), TracedRequest(5.0, 10, 900), TracedRequest(8.0, 512, 1)]
    profile = dataclasses.replace(TRUE, prefill_beside_factor=2.0, decode_beside_factor=1.5)
    alone, stream, beside = simulate(SimPlan(1, 1, 0, profile=profile), trace).requests
    assert alone.ttft_s is not None
    assert beside.ttft_s is not None
    assert beside.ttft_s / alone.ttft_s == pytest.approx(2.0, rel=0.02)
    undisturbed = simulate(SimPlan(1, 1, 0, profile=TRUE), trace).requests[1]
    assert stream.total_s is not None
    assert undisturbed.total_s is not None
    prefill_s = TRUE.step_s(512, 0, 0, 512 * 512 / 2)
    assert stream.total_s - undisturbed.total_s == pytest.approx(2 * prefill_s / 3, rel=0.1), "a third of that time"
