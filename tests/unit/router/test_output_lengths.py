"""Tests what is expected of outputs' lengths, and that what is kept of them is bounded."""

from __future__ import annotations

import random

import pytest

from services.router.coordinator.output_lengths import OutputLengths
from services.router.policy import Role
from tests.support.router_bench import BUSY, Bench


def test_nothing_is_expected_before_the_first_output() -> None:
    assert OutputLengths().median_like("a", 10) is None


def test_the_median_is_that_of_the_newest_outputs() -> None:
    lengths, rng = OutputLengths(), random.Random(1)
    for _ in range(1000):
        lengths.observe("a", 100, rng.randint(500, 600))
    for length in range(1, 65):
        lengths.observe("a", 100, length)
    assert lengths.median_like("a", 100) == 33


def test_callers_and_prompt_lengths_are_told_apart() -> None:
    lengths = OutputLengths()
    for _ in range(10):
        lengths.observe("a", 100, 10)
        lengths.observe("a", 1000, 20)
        lengths.observe("b", 100, 30)
    assert lengths.median_like("a", 120) == 10
    assert lengths.median_like("a", 600) == 20
    assert lengths.median_like("b", 64) == 30


def test_who_has_had_few_outputs_is_judged_by_others() -> None:
    lengths = OutputLengths()
    for _ in range(10):
        lengths.observe("a", 100, 10)
        lengths.observe("a", 1000, 20)
    for _ in range(3):
        lengths.observe("b", 100, 500)
    assert lengths.median_like("b", 100) == 10, "by prompts as long"
    assert lengths.median_like("", 1000) == 20
    assert lengths.median_like("b", 9) == 20, "by all"


def test_callers_are_forgotten_those_first_that_were_served_last_long_ago() -> None:
    lengths = OutputLengths()
    for number in range(5000):
        lengths.observe("regular", 100, 7)
        lengths.observe(f"caller {number}", 100, 900)
    assert lengths.num_keys <= 1024
    assert lengths.median_like("regular", 100) == 7


# What it is used for


KINDS = {"talk": 10, "chat": 20, "essay": 40}
"""Tokens of prompts whose outputs are alike."""


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.join("d", Role.DECODE, max_num_seqs=1)
    for kind, length in (("chat", 200), ("talk", 220), ("essay", 800)):
        for _ in range(20):
            bench.serve(KINDS[kind], length)
    bench.load("d", **BUSY)
    return bench


def started_first(bench: Bench) -> str:
    bench.load("d", num_running=0, blocks_active=0, blocks_free=64, num_waiting=0)
    [command] = bench.take_legs(Role.DECODE)
    return str(command.spec.request_id)


def test_the_shorter_expected_output_goes_first_among_equals(bench: Bench) -> None:
    bench.submit("long", max_tokens=900, num_tokens=KINDS["essay"])
    bench.submit("short", max_tokens=900, num_tokens=KINDS["chat"])
    assert started_first(bench) == "short"


def test_a_priority_counts_more_than_a_length(bench: Bench) -> None:
    bench.submit("short", max_tokens=900, num_tokens=KINDS["chat"])
    bench.submit("long", max_tokens=900, num_tokens=KINDS["essay"], priority=1)
    assert started_first(bench) == "long"


def test_about_as_long_outputs_go_in_order_of_arrival(bench: Bench) -> None:
    bench.submit("first", max_tokens=900, num_tokens=KINDS["talk"])
    bench.submit("second", max_tokens=900, num_tokens=KINDS["chat"])
    assert started_first(bench) == "first"


def test_an_output_is_not_expected_beyond_its_own_bounds(bench: Bench) -> None:
    bench.submit("first", max_tokens=900, num_tokens=KINDS["chat"])
    bench.submit("bounded", max_tokens=10, num_tokens=KINDS["essay"])
    assert started_first(bench) == "bounded"
