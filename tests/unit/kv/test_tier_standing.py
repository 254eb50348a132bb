"""Tests when a tier that failed is used again."""

from services.kv.tier_standing import TierStanding


def test_pauses_double_and_end_with_a_success() -> None:
    standing = TierStanding()
    assert standing.usable(0.0)
    assert standing.failed("no", 0.0), "the first failure is news"
    assert not standing.usable(4.9)
    assert standing.usable(5.0)
    assert not standing.failed("no", 5.0), "the next one is none"
    assert not standing.usable(14.9)
    assert standing.succeeded(15.0)
    assert not standing.succeeded(15.0), "it was back already"
    assert standing.failed("no", 20.0)
    assert standing.usable(25.0), "pauses begin anew"


def test_what_ends_during_a_pause_changes_nothing() -> None:
    standing = TierStanding()
    standing.failed("no", 0.0)
    assert not standing.failed("an older one", 1.0)
    assert not standing.succeeded(2.0)
    assert standing.usable(5.0)
    assert standing.num_failures == 2


def test_pauses_are_bounded() -> None:
    standing, now_s = TierStanding(), 0.0
    for _ in range(20):
        standing.failed("no", now_s)
        assert standing.usable(now_s + 300.0)
        now_s += 300.0
