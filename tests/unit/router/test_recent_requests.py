"""Tests the router's memory of recent requests: it is bounded, and in the order of arrival."""

from __future__ import annotations

from services.router.telemetry.recent_requests import RecentRequest, RecentRequests


def ended(arrived_s: float, total_s: float = 1.0) -> RecentRequest:
    return RecentRequest(arrived_s, 10, 5, None, 0, 0.5, total_s, failed=False)


def test_the_oldest_are_forgotten_first() -> None:
    memory = RecentRequests(most=3)
    for arrived_s in (1.0, 3.0, 2.0, 5.0):
        memory.add(ended(arrived_s))
    assert [each.arrived_s for each in memory.since(0.0)] == [2.0, 3.0, 5.0]
    assert [each.arrived_s for each in memory.since(3.0)] == [3.0, 5.0]
