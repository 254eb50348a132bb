"""Tests that a sequence which runs unsplit leaves the room that handoffs on their way need."""

from __future__ import annotations

import pytest

from services.router.policy import HandoffsInFlight, Job, Role, Split, WhyNot
from services.router.policy.handoff_room import beside_handoffs
from tests.support.router_bench import Bench, started
from tests.support.worker_views import decode

JOB = Job(num_tokens=160, total_tokens=200)  # 10 blocks, and one to grow into

CASES: dict[str, tuple[list[int], list[int], list[int]]] = {
    # blocks available at each worker, tokens of the handoffs on their way, workers that are left to the job
    "no handoff": ([30, 11, 0], [], [0, 1, 2]),
    "room for both": ([30], [16 * 18], [0]),
    "room for one": ([29], [16 * 18], []),
    "the other worker": ([30, 14], [400], [1]),
    "enough room in sum, and for the handoff nowhere": ([20, 20], [400], []),
    "the longest first": ([30, 26, 11], [16 * 10, 16 * 25], [1, 2]),
    "two on one worker": ([40, 11], [16 * 13, 16 * 13], [0, 1]),
    "no worker": ([], [64], []),
}


@pytest.mark.parametrize("case", CASES)
def test_who_has_room_beside_the_handoffs(case: str) -> None:
    available, handoffs, expected = CASES[case]
    workers = [decode(f"d{number}", busy=64 - blocks) for number, blocks in enumerate(available)]
    found = beside_handoffs(JOB, workers, HandoffsInFlight(handoffs), 0)
    assert sorted(worker.worker_id for worker in found) == [f"d{number}" for number in expected]


@pytest.mark.parametrize(("max_num_seqs", "has_room"), [(3, True), (2, False)])
def test_places_in_steps_are_kept_as_blocks_are(max_num_seqs: int, has_room: bool) -> None:
    worker = decode("d", predicted_sequences=1, max_num_seqs=max_num_seqs)
    assert bool(beside_handoffs(JOB, [worker], HandoffsInFlight([16]), 0)) == has_room


@pytest.mark.parametrize(("output_tokens", "has_room"), [(32, True), (33, False)])
def test_sequences_grow_before_a_handoff_comes(output_tokens: int, has_room: bool) -> None:
    """Of 31 blocks 3 are for the handoff, 15 for 15 sequences to grow by 16 tokens each, and 13 for the job of 192."""
    worker = decode("d", busy=33, predicted_sequences=14, max_num_seqs=64)
    assert bool(beside_handoffs(JOB, [worker], HandoffsInFlight([32]), output_tokens)) == has_room


def two_decoders() -> Bench:
    """Returns one prefill and two decode workers that have measured what prompts cost."""
    bench = Bench(split=Split.AUTO)
    for worker_id, role in (("p", Role.PREFILL), ("d1", Role.DECODE), ("d2", Role.DECODE)):
        bench.join(worker_id, role)
        bench.load(worker_id, ms_per_prefill_token=0.5, ms_per_decode_step=20.0, ms_per_decode_sequence=1.0)
    return bench


def test_an_unsplit_sequence_does_not_take_the_one_place_for_a_handoff() -> None:
    """Only d1 has room for the handoff, and both together have room for the sequence too."""
    bench = two_decoders()
    bench.submit("handed over", num_tokens=400)  # 25 blocks and one
    prefill = bench.take_leg(Role.PREFILL)
    bench.load("p", queued_prefill_tokens=90_000, num_waiting=1)
    bench.load("d1", blocks_free=30, blocks_active=34, num_running=1)
    bench.load("d2", blocks_free=15, blocks_active=49, num_running=1)
    bench.submit("unsplit", num_tokens=200)  # 13 blocks and one
    leg = bench.take_leg(Role.DECODE)
    assert (leg.spec.request_id, leg.worker_id) == ("unsplit", "d2")
    bench.submit("another", num_tokens=200)
    assert not bench.take_legs(Role.DECODE), "d1 is for the handoff, and what d2 was sent counts before it shows"
    bench.say("p", started(prefill))
    leg = bench.take_leg(Role.DECODE)
    assert (leg.spec.request_id, leg.worker_id) == ("handed over", "d1")


def test_a_handoff_that_was_offered_to_a_worker_is_not_counted_twice() -> None:
    bench = two_decoders()
    bench.submit("handed over", num_tokens=400)
    prefill = bench.take_leg(Role.PREFILL)
    bench.load("p", queued_prefill_tokens=90_000, num_waiting=1)
    bench.load("d1", blocks_free=40, blocks_active=24, num_running=1)
    bench.load("d2", blocks_free=0, blocks_active=64, num_running=1)
    bench.say("p", started(prefill))
    assert bench.take_leg(Role.DECODE).worker_id == "d1"
    bench.submit("unsplit", num_tokens=200)  # 14 of the 15 that are left
    assert bench.take_leg(Role.DECODE).worker_id == "d1"


def test_what_cannot_be_split_starts_beside_handoffs_as_ever() -> None:
    """No prefill worker holds so long a prompt: it has no other way."""
    bench = Bench(split=Split.AUTO, model_context_tokens=2048)
    bench.join("p", Role.PREFILL, num_blocks=32)
    bench.join("d", Role.DECODE)
    bench.submit("handed over", num_tokens=400)
    bench.take_leg(Role.PREFILL)
    bench.load("d", blocks_free=40, blocks_active=24, num_running=1)
    bench.submit("long", num_tokens=600)
    assert bench.take_leg(Role.DECODE).spec.request_id == "long"


def test_it_is_explained_for_whom_a_workers_room_is() -> None:
    bench = two_decoders()
    bench.submit("handed over", num_tokens=400)
    bench.take_leg(Role.PREFILL)
    bench.load("p", queued_prefill_tokens=90_000, num_waiting=1)
    bench.load("d1", blocks_free=30, blocks_active=34, num_running=1)
    bench.load("d2", blocks_free=15, blocks_active=49, num_running=1)
    bench.submit("unsplit", num_tokens=200)
    choice = bench.take_leg(Role.DECODE).choice
    assert choice is not None
    assert choice.left_out.named == (("d1", WhyNot.RESERVED),)


def test_a_worker_without_any_room_keeps_none_for_handoffs() -> None:
    bench = two_decoders()
    bench.submit("handed over", num_tokens=400)
    bench.take_leg(Role.PREFILL)
    bench.load("p", queued_prefill_tokens=90_000, num_waiting=1)
    bench.load("d1", blocks_free=0, blocks_active=64, num_running=1)
    bench.load("d2", blocks_free=60, blocks_active=4, num_running=1)
    bench.submit("unsplit", num_tokens=200)
    choice = bench.take_leg(Role.DECODE).choice
    assert choice is not None
    assert choice.left_out.named == (("d1", WhyNot.NO_BLOCKS),)
