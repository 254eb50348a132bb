"""Tests from whom a prefix is brought, and from where on that pays, by tables."""

from __future__ import annotations

import math
import random

import pytest

from services.router.policy.known_cache import (
    MARGIN,
    MOST_AT_ONCE,
    BringTime,
    PrefixOffer,
    WhyComputed,
    choose_source,
    prefix_break_even,
)

CHEAP = PrefixOffer("cheap", 1000, bring_ms=50.0)
TOKEN_MS = 0.5
"""To compute the 1000 tokens takes 500 ms."""
COSTS_MORE = ("cheap", WhyComputed.COSTS_MORE)


@pytest.mark.parametrize(
    ("offers", "token_ms", "chosen"),
    [
        ([], TOKEN_MS, (None, None)),
        ([CHEAP], TOKEN_MS, "cheap"),
        ([CHEAP], 0.0, COSTS_MORE),  # nobody knows what computing costs
        ([CHEAP], MARGIN * 0.05, COSTS_MORE),  # as long as computing, with the margin
        ([CHEAP], MARGIN * 0.05 + 0.001, "cheap"),
        ([CHEAP, PrefixOffer("longer", 1600, bring_ms=80.0)], TOKEN_MS, "longer"),
        ([CHEAP, PrefixOffer("a little longer", 1016, bring_ms=100.0)], TOKEN_MS, "cheap"),
        ([CHEAP, PrefixOffer("busy", 1000, bring_ms=30.0, num_lending=1)], TOKEN_MS, "cheap"),
        ([CHEAP, PrefixOffer("a", 1000, bring_ms=50.0)], TOKEN_MS, "a"),
        ([PrefixOffer("full", 1000, bring_ms=1.0, num_lending=MOST_AT_ONCE)], TOKEN_MS, ("full", WhyComputed.BUSY)),
        ([PrefixOffer("full", 1000, 1.0, MOST_AT_ONCE), CHEAP], TOKEN_MS, "cheap"),
    ],
)
def test_who_is_asked(
    offers: list[PrefixOffer], token_ms: float, chosen: str | tuple[str | None, WhyComputed | None]
) -> None:
    found = choose_source(offers, token_ms)
    told = (found.worker_id, found.why_computed) if found is not None else (None, None)
    assert told == (chosen if isinstance(chosen, tuple) else (chosen, None))
    if found is not None and found.why_computed is None:
        assert found.compute_ms == found.num_tokens * token_ms > MARGIN * found.bring_ms


def test_a_herd_is_spread_over_the_sources_and_the_rest_computes() -> None:
    lending = {"a": 0, "b": 0}
    chosen = []
    for _ in range(10):
        found = choose_source([PrefixOffer(name, 1000, 50.0, number) for name, number in lending.items()], TOKEN_MS)
        assert found is not None
        is_asked = found.why_computed is None
        chosen.append(found.worker_id if is_asked else None)
        if is_asked:
            lending[found.worker_id] += 1
    assert chosen == ["a", "b"] * MOST_AT_ONCE + [None] * 2


def test_times_are_learnt() -> None:
    time = BringTime(token_bytes=100_000)
    assert (time.fixed_ms, time.token_ms) == (pytest.approx(10.0), pytest.approx(0.1))
    noise = random.Random(1)
    for _ in range(100):
        tokens = noise.randrange(100, 3000)
        time.observe(tokens, (40.0 + 0.02 * tokens) * noise.uniform(0.98, 1.02))
    assert time.num_seen == 100
    assert time.fixed_ms == pytest.approx(40.0, rel=0.1)
    assert time.token_ms == pytest.approx(0.02, rel=0.1)
    assert prefix_break_even(time, 0.5) == pytest.approx(1.25 * 40.0 / (0.5 - 1.25 * 0.02), rel=0.1)


SEEN = ([(1000, 0.0)] * 50, [(16, 1e6)] * 50, [(2000, 5.0), (100, 500.0)] * 20, [(64, 30.0)] * 50)


@pytest.mark.parametrize("seen", SEEN)
def test_no_part_of_a_time_is_ever_negative(seen: list[tuple[int, float]]) -> None:
    time = BringTime(token_bytes=0)
    for num_tokens, ms in seen:
        time.observe(num_tokens, ms)
        assert time.fixed_ms >= 0
        assert time.token_ms >= 0
        assert math.isfinite(time.ms(1 << 20))


@pytest.mark.parametrize(("token_ms", "tokens"), [(0.0, math.inf), (0.125, math.inf), (0.225, 125.0)])
def test_from_where_on_it_pays(token_ms: float, tokens: float) -> None:
    assert prefix_break_even(BringTime(token_bytes=100_000), token_ms) == pytest.approx(tokens)
