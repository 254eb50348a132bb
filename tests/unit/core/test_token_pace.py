"""Tests the pace of workers, from their counts at two looks."""

from __future__ import annotations

from services.core.token_pace import TokenPaces


def test_a_pace_is_of_the_time_between_two_looks() -> None:
    paces = TokenPaces()
    assert paces.look("decode-0", 1000, 10.0) is None, "nothing is known of the time before"
    assert paces.look("prefill-0", 0, 10.0) is None
    assert paces.look("decode-0", 1064, 12.0) == 32.0
    assert paces.look("decode-0", 1064, 13.0) == 0.0
    assert paces.look("prefill-0", 512, 12.0) == 256.0


def test_a_worker_that_counts_anew_has_no_pace_yet() -> None:
    paces = TokenPaces()
    paces.look("decode-0", 1000, 10.0)
    assert paces.look("decode-0", 20, 11.0) is None
    assert paces.look("decode-0", 60, 12.0) == 40.0
    assert paces.look("decode-0", 60, 12.0) is None, "no time has passed"


def test_a_worker_that_is_gone_is_forgotten() -> None:
    paces = TokenPaces()
    paces.look("decode-0", 1000, 10.0)
    paces.look("decode-1", 1000, 10.0)
    paces.keep({"decode-1"})
    assert paces.look("decode-0", 2000, 11.0) is None
    assert paces.look("decode-1", 2000, 11.0) == 1000.0
