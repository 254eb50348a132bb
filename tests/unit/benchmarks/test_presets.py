"""Tests the comparison of presets: percentiles of what occurred several times, tables, traces made small."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import pytest

from benchmarks.figure import Figure
from benchmarks.preset_times import PresetTimes, figures, lines, markdown, quantile
from benchmarks.presets_real import stream, thinned
from benchmarks.presets_simulated import at_rate, pool_blocks, runner, saturation, times_of
from services.sim.cluster import SimPlan
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest

PROFILE = WorkerProfile("made up", ms_per_prefill_token=0.2, ms_per_decode_step=10.0, ms_per_decode_sequence=0.5)
TIMES = PresetTimes({10.0: 1, 20.0: 1}, {5.0: 98, 7.0: 1, 900.0: 1}, 25.0)


def request(at_s: float, *block_ids: int) -> TracedRequest:
    return TracedRequest(at_s, 600 * max(1, len(block_ids)), 40, block_ids)


def test_a_quantile_is_that_of_the_values_one_by_one() -> None:
    chance = random.Random(3)
    values = chance.choices(range(50), k=777)
    ordered = sorted(values)
    for percent in (0.5, 1, 37, 50, 99, 99.9, 100):
        rank = next(rank for rank in itertools.count(1) if rank * 100 >= percent * len(values))
        assert quantile(Counter(map(float, values)), percent) == ordered[rank - 1]
    assert quantile(Counter(map(float, values)), 0) == ordered[0]
    with pytest.raises(ValueError, match="no samples"):
        quantile({}, 50)


def test_figures_have_a_sample_for_each_round_and_say_what_failed() -> None:
    worse = dataclasses.replace(TIMES, ttft_ms={40.0: 1}, num_failed=2)
    found = {each.name: each.samples for each in figures("t", {"hybrid": [TIMES, worse]}) if isinstance(each, Figure)}
    assert found["t, hybrid: TTFT p95"] == (20.0, 40.0)
    assert found["t, hybrid: ITL p99"] == (7.0, 7.0)
    assert found["t, hybrid: requests that failed, which have no times"] == (0.0, 2.0)
    assert not any("failed" in each.name for each in figures("t", {"hybrid": [TIMES]}) if isinstance(each, Figure))


def test_a_line_is_of_all_rounds_together() -> None:
    other = dataclasses.replace(TIMES, ttft_ms={30.0: 2})
    ttft, itl = lines("presets-real-azure", {"sticky": [TIMES, other]}, "measured")
    assert (ttft.chart, itl.chart) == ("presets-real-azure-ttft-measured", "presets-real-azure-itl-measured")
    assert ttft.name == "sticky"
    assert ttft.points[0] == (10.0, 0.0)
    assert {percent: ms for ms, percent in ttft.points}[50.0] == 20.0
    assert ttft.points[-1] == (30.0, 100.0)


def test_a_table_has_simulated_and_measured_in_one_cell() -> None:
    slower = dataclasses.replace(TIMES, ttft_ms={1200.0: 1})
    table = markdown({"sticky": [TIMES]}, {"sticky": [TIMES, slower]}).splitlines()
    assert table[0].startswith("| preset | prompt tokens found in caches, % | TTFT p50, ms |")
    cells = table[2].split(" | ")
    assert cells[:3] == ["| `sticky`", "25.0 / 25.0 (25.0–25.0)", "10.0 / 605 (10.0–1,200)"]
    assert " / " not in markdown({"sticky": [TIMES]})


def test_one_conversation_in_so_many_keeps_what_its_prompts_share() -> None:
    trace = [request(2.0 * number, number % 6, 100 + number) for number in range(24)]
    kept = thinned(trace[1:], 3)
    assert [each.block_ids[0] for each in kept] == [1, 4, 1, 4, 1, 4, 1, 4]
    assert kept[0].at_s == 0.0
    assert kept[1].at_s == 6.0


def test_prompts_that_name_no_blocks_are_conversations_of_their_own() -> None:
    assert [each.at_s for each in thinned([request(float(number)) for number in range(7)], 3)] == [0.0, 3.0, 6.0]


def test_a_small_trace_shares_whole_blocks_of_a_pool() -> None:
    small = stream("mooncake", [TracedRequest(0.0, 6400, 80, tuple(range(13)))])
    assert [(each.prompt_tokens, each.output_tokens, each.block_tokens) for each in small] == [(200, 10, 16)]
    assert pool_blocks(small, 0.5, 16) == 6


def test_a_rate_is_what_it_says_and_less_than_what_saturates_is_served() -> None:
    run = runner(SimPlan(2, 2, profile=PROFILE))
    trace = [request(float(number)) for number in range(200)]
    assert at_rate(trace, 4.0)[-1].at_s == pytest.approx(199 / (4.0 * 199 / 200))
    most = saturation(run, trace)
    assert 8.0 < most <= 2 / 0.12  # two workers, 120 ms a prompt
    assert quantile(times_of(run("least_loaded", at_rate(trace, most / 2))).ttft_ms, 95) < 200


def test_a_preset_that_looks_at_prompts_finds_more_in_caches() -> None:
    run = runner(SimPlan(3, 1, profile=PROFILE))
    chance = random.Random(5)
    trace = [request(0.4 * number, *[chance.randrange(5)] * 4, 1000 + number) for number in range(60)]
    found = {preset: times_of(run(preset, trace)) for preset in ("round_robin", "prefix_aware")}
    assert found["prefix_aware"].hit_percent > found["round_robin"].hit_percent + 5
    assert all(sum(times.ttft_ms.values()) == 60 and sum(times.itl_ms.values()) == 60 * 39 for times in found.values())
