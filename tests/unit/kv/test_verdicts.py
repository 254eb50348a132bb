"""Tests that verdicts come to one epoch, whoever hears of them in what order."""

from __future__ import annotations

from services.core.hashing import salt_in
from services.kv.verdicts import Verdicts


def test_the_order_in_which_verdicts_are_heard_of_is_of_no_account() -> None:
    one, other = Verdicts(), Verdicts()
    one.add(7)
    assert one.merge({8: 2}) == [8]
    assert other.merge({8: 2, 7: 1}) == [8, 7]
    assert one.epoch == other.epoch != ""


def test_each_verdict_begins_another_epoch() -> None:
    verdicts, seen = Verdicts(), [""]
    for incarnation in (7, 8, 7, 7):
        verdicts.add(incarnation)
        seen.append(verdicts.epoch)
    assert len(set(seen)) == 5


def test_what_is_known_is_no_news() -> None:
    verdicts = Verdicts()
    verdicts.merge({7: 2})
    epoch = verdicts.epoch
    assert verdicts.merge({7: 1}) == verdicts.merge({7: 2}) == []
    assert verdicts.epoch == epoch


def test_salts_are_as_they_are_before_the_first_verdict() -> None:
    assert [salt_in("", salt) for salt in ("", "s")] == ["", "s"]
    assert len({salt_in(epoch, salt) for epoch in ("", "a", "b") for salt in ("", "s", "t")}) == 9
