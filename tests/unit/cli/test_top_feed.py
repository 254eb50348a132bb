"""Tests what `baton top` keeps of what a router says."""

from __future__ import annotations

from typing import Any

from baton.v1 import control_pb2
from services.cli.top_feed import RouterFeed
from tests.support.scripted_control import live_timeline, split_timeline


def test_of_what_a_router_has_forgotten_nothing_lives() -> None:
    told = [split_timeline(1), live_timeline(2)]

    def call(method: str, request: Any, timeout_s: float) -> Any:
        if method == "GetStatus":
            return control_pb2.GetStatusResponse()
        return control_pb2.ListTimelinesResponse(timelines=told, newest=2, router_incarnation=7)

    feed = RouterFeed(call, "router", 1.0)
    feed.refresh()
    assert [each.timeline["number"] for each in feed.requests] == [2, 1]
    told.clear()  # of those that live, it tells again and again
    feed.refresh()
    assert [each.timeline["number"] for each in feed.requests] == [1]
