"""Tests the decode worker's answer to a handoff, as a table."""

from dataclasses import replace

import pytest

from services.kv.handoff_admission import AdmissionPolicy, EngineRoom

BUSY = EngineRoom(num_available=40, num_blocks=100, num_sequences=3, max_num_seqs=8, num_preempted=0)
IDLE = replace(BUSY, num_sequences=0)


@pytest.mark.parametrize(
    ("room", "needed", "admitted"),
    [
        (BUSY, 35, True),  # 35 + watermark 5 = 40
        (BUSY, 36, False),
        (IDLE, 40, True),  # an idle worker ignores the watermark
        (IDLE, 41, False),
        (replace(BUSY, num_sequences=8), 1, False),  # batch full
        (replace(BUSY, num_preempted=1), 1, False),  # victims first
        (replace(IDLE, num_preempted=1), 1, False),
    ],
)
def test_room(room: EngineRoom, needed: int, admitted: bool) -> None:
    refusal = AdmissionPolicy().decide(b"k", needed, 0.0, room, 0, now=10.0)
    assert (refusal is None) == admitted


def test_handoffs_that_are_being_imported_have_places_in_the_batch() -> None:
    assert AdmissionPolicy().decide(b"k", 1, 0.0, BUSY, 4, now=10.0) is None
    refusal = AdmissionPolicy().decide(b"k", 1, 0.0, BUSY, 5, now=10.0)
    assert refusal is not None
    assert refusal.reason == "batch is full"
    assert AdmissionPolicy().decide(b"k", 40, 0.0, IDLE, 1, now=10.0) is not None, "no longer idle: the watermark holds"


def test_refusal_says_how_many_blocks_are_missing() -> None:
    refusal = AdmissionPolicy().decide(b"k", 50, 0.0, BUSY, 0, now=10.0)
    assert refusal is not None
    assert (refusal.needed_blocks, refusal.missing_blocks) == (50, 15)


def test_an_aged_refusal_holds_younger_ones_back_until_it_fits() -> None:
    policy = AdmissionPolicy()
    assert policy.decide(b"old", 90, 1.5, BUSY, 0, now=10.0) is not None
    young = policy.decide(b"young", 1, 0.1, BUSY, 0, now=10.1)
    assert young is not None
    assert "older" in young.reason
    assert policy.decide(b"old", 90, 2.0, replace(BUSY, num_available=100), 0, now=10.5) is None
    assert policy.decide(b"young", 1, 0.6, BUSY, 0, now=10.6) is None


def test_an_older_one_passes_an_aged_one() -> None:
    policy = AdmissionPolicy()
    assert policy.decide(b"old", 90, 1.5, BUSY, 0, now=10.0) is not None
    assert policy.decide(b"older", 1, 3.0, BUSY, 0, now=10.1) is None


def test_an_aged_one_that_is_not_retried_is_forgotten() -> None:
    policy = AdmissionPolicy()
    assert policy.decide(b"old", 90, 1.5, BUSY, 0, now=10.0) is not None
    assert policy.decide(b"young", 1, 0.1, BUSY, 0, now=11.9) is not None
    assert policy.decide(b"young", 1, 0.3, BUSY, 0, now=12.1) is None


def test_a_young_refusal_holds_nobody_back() -> None:
    policy = AdmissionPolicy()
    assert policy.decide(b"a", 90, 0.5, BUSY, 0, now=10.0) is not None
    assert policy.decide(b"b", 1, 0.1, BUSY, 0, now=10.1) is None
