"""Tests what a tenant's limits let in, what they reserve, and what is settled at the end."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import InvalidRequest, QuotaExceeded
from services.router.tenants.tenant import Quota, Tenant, TenantLimits, allowed_output, demand_together


def tenant(**limits: Any) -> Tenant:
    return Tenant("acme", limits=TenantLimits(**limits))


def test_without_limits_everything_enters() -> None:
    quota = Quota(tenant(), 0.0)
    for _ in range(1000):
        quota.enter(0.0)
        quota.reserve(10**9, 0.0)
    assert quota.num_live == 1000


def test_requests_at_once() -> None:
    quota = Quota(tenant(concurrent_requests=2), 0.0)
    quota.enter(0.0)
    quota.enter(0.0)
    with pytest.raises(QuotaExceeded) as refused:
        quota.enter(0.0)
    assert (refused.value.subject, refused.value.limit) == ("acme", "concurrent_requests")
    quota.leave(0, 0, 0.0)
    quota.enter(0.0)


def test_requests_by_the_second() -> None:
    quota = Quota(tenant(requests_per_s=2.0, burst_requests=3), 0.0)
    for _ in range(3):
        quota.enter(0.0)
    with pytest.raises(QuotaExceeded, match=r"limit 2, requested 1, left 0; try again in 0\.5 s") as refused:
        quota.enter(0.0)
    assert refused.value.retry_after_s == pytest.approx(0.5)
    assert quota.num_live == 3, "who is refused has no place"
    quota.enter(0.5)


def test_tokens_are_reserved_and_settled() -> None:
    quota = Quota(tenant(tokens_per_min=600, burst_tokens=600), 0.0)
    quota.enter(0.0)
    quota.reserve(400, 0.0)
    quota.enter(0.0)
    with pytest.raises(QuotaExceeded, match="limit 600, requested 400, left 200") as refused:
        quota.reserve(400, 0.0)
    assert (refused.value.limit, refused.value.retry_after_s) == ("tokens_per_min", pytest.approx(20.0))
    quota.leave(0, 0, 0.0)
    quota.leave(400, 100, 0.0)
    quota.enter(0.0)
    quota.reserve(500, 0.0)


def test_without_a_token_left_a_request_does_not_enter() -> None:
    quota = Quota(tenant(tokens_per_min=60, burst_tokens=60), 0.0)
    quota.enter(0.0)
    quota.reserve(60, 0.0)
    with pytest.raises(QuotaExceeded) as refused:
        quota.enter(0.0)
    assert refused.value.limit == "tokens_per_min"
    quota.enter(1.0)


def test_other_limits_keep_what_is_used() -> None:
    quota = Quota(tenant(tokens_per_min=60, burst_tokens=60, requests_per_s=1.0, burst_requests=1), 0.0)
    quota.enter(0.0)
    quota.reserve(60, 0.0)
    quota.change(TenantLimits(tokens_per_min=600, burst_tokens=600), 0.0)
    with pytest.raises(QuotaExceeded):
        quota.reserve(10, 0.0)
    quota.reserve(10, 1.0)
    quota.change(TenantLimits(), 1.0)
    quota.enter(1.0)
    quota.reserve(10**6, 1.0)
    assert quota.num_live == 2


CASES = [
    ({}, 10, None, 1, None),
    ({}, 10, 7, 1, 7),
    ({"max_output_tokens": 20}, 10, None, 1, 20),
    ({"max_output_tokens": 20}, 10, 20, 1, 20),
    ({"max_output_tokens": 2000}, 10, None, 1, 90),
    ({"tokens_per_min": 50, "burst_tokens": 50}, 10, None, 1, 40),
    ({"tokens_per_min": 50, "burst_tokens": 50}, 10, None, 4, 10),
    ({"tokens_per_min": 50, "burst_tokens": 50, "max_output_tokens": 5}, 10, None, 4, 5),
    ({"max_input_tokens": 10}, 10, None, 1, None),
]


@pytest.mark.parametrize(("limits", "prompt", "asked", "answers", "expected"), CASES)
def test_the_output_that_limits_leave(
    limits: dict[str, int], prompt: int, asked: int | None, answers: int, expected: int | None
) -> None:
    found = allowed_output(tenant(**limits), prompt, asked, num_answers=answers, room=100 - prompt)
    assert found == expected


@pytest.mark.parametrize(
    ("limits", "prompt", "asked", "answers", "field"),
    [
        ({"max_input_tokens": 9}, 10, None, 1, "prompt"),
        ({"max_output_tokens": 20}, 10, 21, 1, "stopping.max_tokens"),
        ({"tokens_per_min": 50, "burst_tokens": 50}, 10, 41, 1, "stopping.max_tokens"),
        ({"tokens_per_min": 50, "burst_tokens": 50}, 10, 20, 3, "stopping.max_tokens"),
        ({"tokens_per_min": 50, "burst_tokens": 50}, 50, None, 1, "prompt"),
        ({"tokens_per_min": 50, "burst_tokens": 50}, 40, None, 11, "prompt"),
    ],
)
def test_what_is_never_allowed_is_no_matter_of_waiting(
    limits: dict[str, int], prompt: int, asked: int | None, answers: int, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        allowed_output(tenant(**limits), prompt, asked, num_answers=answers, room=1000)
    assert refused.value.field == field


def test_more_prompts_in_a_call_than_are_ever_let_in() -> None:
    demand_together(tenant(), 10**6)
    for limits in ({"concurrent_requests": 2}, {"requests_per_s": 9.0, "burst_requests": 2}):
        demand_together(tenant(**limits), 2)
        with pytest.raises(InvalidRequest, match="has 3 prompts; tenant acme may have 2 together"):
            demand_together(tenant(**limits), 3)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 200), st.floats(0, 1)), max_size=60))
def test_used_tokens_are_within_the_limit(requests: list[tuple[float, int, float]]) -> None:
    quota, now, used = Quota(tenant(tokens_per_min=600, burst_tokens=200), 0.0), 0.0, 0
    waits: list[float | None] = []
    for pause_s, num_tokens, share in requests:
        now += pause_s
        try:
            quota.enter(now)
        except QuotaExceeded:
            continue
        reserved = num_used = 0
        try:
            quota.reserve(num_tokens, now)
            reserved, num_used = num_tokens, int(num_tokens * share)
        except QuotaExceeded as refused:
            waits.append(refused.retry_after_s)
        finally:
            quota.leave(reserved, num_used, now)
        used += num_used
    assert quota.num_live == 0
    assert all(wait_s is not None and 0 < wait_s <= 20.0 for wait_s in waits)
    assert used <= 200 + now * 10 + 1e-3


def test_who_only_asks_takes_nothing() -> None:
    quota = Quota(tenant(requests_per_s=1.0, burst_requests=2), 0.0)
    for _ in range(5):
        quota.demand(0.0)
    quota.enter(0.0)
    with pytest.raises(QuotaExceeded) as refused:
        quota.enter(0.0, 2)
    assert refused.value.retry_after_s == pytest.approx(1.0)
    quota.demand(0.0)
    quota.enter(1.0, 2)


@pytest.mark.parametrize("num_routers", [1, 2, 5])
@pytest.mark.parametrize(
    "limits",
    [
        {"concurrent_requests": 4},
        {"requests_per_s": 1.0, "burst_requests": 4},
        {"tokens_per_min": 1000, "burst_tokens": 1000},
    ],
)
def test_a_call_that_may_come_in_comes_in_at_each_router_when_nothing_else_is_there(
    limits: dict[str, Any], num_routers: int
) -> None:
    """It does however small a router's part is, and what it takes beyond that is owed."""
    quota = Quota(tenant(**limits), 0.0, num_routers)
    for at_s in (0.0, 600.0, 1200.0):
        quota.enter(at_s, 4)
        assert quota.num_live == 4
        reserved = quota.reserve(1000, at_s)
        with pytest.raises(QuotaExceeded):
            quota.enter(at_s, 4)
        quota.leave(reserved, reserved, at_s, num_requests=4)
    assert quota.num_live == 0


def test_a_limit_that_comes_later_is_not_refilled_by_what_was_never_taken_from_it() -> None:
    quota = Quota(tenant(), 0.0)
    quota.enter(0.0)
    assert quota.reserve(5000, 0.0) == 0
    quota.change(TenantLimits(tokens_per_min=60, burst_tokens=1000), 0.0)
    quota.enter(0.0)
    assert quota.reserve(1000, 0.0) == 1000
    quota.leave(0, 10, 0.0)
    with pytest.raises(QuotaExceeded):
        quota.reserve(1, 0.0)


@pytest.mark.parametrize("num_routers", [1, 2, 3, 7, 64])
def test_the_parts_of_all_routers_are_the_limit(num_routers: int) -> None:
    """Over a minute, under more requests than are let in, it is exceeded by 5 % at most."""
    asked = tenant(tokens_per_min=60_000, burst_tokens=6_000, requests_per_s=50.0, burst_requests=50)
    quotas, used = [Quota(asked, 0.0, num_routers) for _ in range(num_routers)], []
    chance = random.Random(num_routers)
    for tick in range(9000):
        now = tick * 0.01
        for quota in quotas:
            with contextlib.suppress(QuotaExceeded):
                quota.enter(now)
                num_tokens = chance.choice((10, 200, 3_000 // num_routers))
                try:
                    quota.reserve(num_tokens, now)
                    used.append((now, num_tokens))
                finally:
                    quota.leave(0, 0, now)
    minute = [(at, num) for at, num in used if 30.0 <= at < 90.0]
    assert sum(num for _, num in minute) <= 1.05 * 60_000
    assert sum(num for _, num in minute) >= 0.8 * 60_000
    assert len(minute) <= 1.05 * 50 * 60


def test_requests_at_once_are_divided_too_and_each_router_has_one() -> None:
    for most, num_routers, part in ((10, 2, 5), (5, 2, 2), (1, 3, 1)):
        quota = Quota(tenant(concurrent_requests=most), 0.0, num_routers)
        for _ in range(part):
            quota.enter(0.0)
        with pytest.raises(QuotaExceeded, match=f"may have {part}"):
            quota.enter(0.0)


def test_another_number_of_routers_changes_the_part_at_once_and_grants_nothing() -> None:
    quota = Quota(tenant(tokens_per_min=600, burst_tokens=600), 0.0)
    quota.divide(2, 0.0)
    quota.reserve(300, 0.0)
    with pytest.raises(QuotaExceeded, match=r"limit 600 \(over 2 routers\), requested 10, left 0; try again in 2 s"):
        quota.reserve(10, 0.0)
    quota.divide(1, 0.0)
    with pytest.raises(QuotaExceeded):
        quota.reserve(10, 0.0)
    quota.reserve(10, 1.0)


def test_a_request_beyond_a_parts_burst_waits_for_a_full_part() -> None:
    quota = Quota(tenant(tokens_per_min=600, burst_tokens=600), 0.0, 2)
    quota.reserve(600, 0.0)
    with pytest.raises(QuotaExceeded):
        quota.reserve(600, 119.0)
    quota.reserve(600, 120.1)
