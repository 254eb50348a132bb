"""Tests that what a stream began with binds its replays, and ready workers that cannot pair are said once."""

from __future__ import annotations

import pytest

from services.core.errors import NoWorker
from services.router.coordinator.events import DecodeAdmitted, GroupsChanged, ImportReady
from services.router.coordinator.request import Phase
from services.router.policy import Fingerprint, Role
from tests.support.router_bench import Bench, started, tokens

OLD = Fingerprint("11111111aaaa", "float32 weights")
NEW = Fingerprint("22222222bbbb", "float32 weights")
INT8 = Fingerprint(OLD.kv, "int8 weights")


@pytest.fixture
def bench() -> Bench:
    """Returns a bench with a pair of old workers, in the middle of a change to new ones."""
    bench = Bench(no_worker_timeout_s=5.0)
    bench.join("p-old", Role.PREFILL, fingerprint=OLD)
    bench.join("d-old", Role.DECODE, fingerprint=OLD)
    return bench


def join_new(bench: Bench) -> None:
    bench.join("p-new", Role.PREFILL, fingerprint=NEW)
    bench.join("d-new", Role.DECODE, fingerprint=NEW)


def lose_old(bench: Bench) -> None:
    bench.lose("p-old", crashed=False)
    bench.lose("d-old", crashed=False)


def test_a_stream_waits_for_its_like_and_fails_by_name_without_it(bench: Bench) -> None:
    bench.decoding()
    join_new(bench)
    lose_old(bench)
    for _ in range(49):
        bench.wait(0.1)
    assert bench.phase() is Phase.QUEUED
    assert not bench.take_legs(Role.PREFILL)[1:], "only the first, of before the change"
    bench.wait(0.2)
    error = bench.failed["r"]
    assert isinstance(error, NoWorker)
    assert "began on workers of fingerprint 11111111 (torch; float32 weights)" in str(error)
    assert "22222222" in str(error)
    bench.assert_idle()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.MIXED])
def test_its_like_takes_it(bench: Bench, role: Role) -> None:
    bench.decoding()
    join_new(bench)
    lose_old(bench)
    bench.wait(1.0)
    bench.join("w", role, fingerprint=OLD)
    bench.join("d-old", Role.DECODE, incarnation=2, fingerprint=OLD)
    replay = bench.take_leg(Role.PREFILL)
    assert (replay.worker_id, replay.output_base) == ("w", 1)


def test_a_request_waits_for_its_model_beside_workers_of_another(bench: Bench) -> None:
    bench.submit("r", model="big")
    assert bench.phase() is Phase.QUEUED, "the pair that is there has another model"
    bench.join("p-big", Role.PREFILL, fingerprint=OLD, model_id="big")
    assert bench.phase() is Phase.QUEUED, "and so has the only one that could take the KV over, were it by layout alone"
    bench.join("d-big", Role.DECODE, fingerprint=OLD, model_id="big")
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p-big", started(prefill))
    assert (prefill.worker_id, bench.take_leg(Role.DECODE).worker_id) == ("p-big", "d-big")


def test_before_the_first_token_nothing_is_bound(bench: Bench) -> None:
    """A lease, even one that a decode worker has admitted, has streamed nothing yet."""
    _, decode = bench.handed_over()
    bench.say("d-old", DecodeAdmitted(decode.leg))
    join_new(bench)
    lose_old(bench)
    again = bench.take_leg(Role.PREFILL)
    assert again.worker_id == "p-new"
    # From its first token on it is the new ones'.
    bench.say("p-new", started(again), tokens(again, 100))
    bench.join("p-old", Role.PREFILL, incarnation=2, fingerprint=OLD)
    bench.join("d-old", Role.DECODE, incarnation=2, fingerprint=OLD)
    bench.take_leg(Role.DECODE)
    bench.lose("p-new", crashed=False)
    bench.lose("d-new", crashed=False)
    bench.wait(1.0)
    assert bench.phase() is Phase.QUEUED
    assert not bench.take_legs(Role.PREFILL)


def test_an_unsplit_sequence_on_a_decode_worker_binds_too() -> None:
    bench = Bench(no_worker_timeout_s=5.0)
    bench.join("d1", Role.DECODE, fingerprint=OLD)
    bench.submit()
    leg = bench.take_leg(Role.DECODE)
    bench.say("d1", DecodeAdmitted(leg.leg), tokens(leg, 100))
    bench.join("d2", Role.DECODE, fingerprint=INT8)
    bench.lose("d1")
    assert not bench.take_legs(Role.DECODE), "the same weights in another scheme"
    bench.join("d3", Role.DECODE, fingerprint=OLD)
    bench.wait(1.0)
    assert bench.take_leg(Role.DECODE).worker_id == "d3"


def test_a_handoff_goes_to_its_kind_of_kv_however_that_is_computed(bench: Bench) -> None:
    bench.lose("d-old")
    bench.submit()
    bench.join("d-int8", Role.DECODE, fingerprint=INT8)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p-old", started(prefill), tokens(prefill, 100))
    decode = bench.take_leg(Role.DECODE)
    assert decode.worker_id == "d-int8"
    # It is gone; the prompt is computed again where it was, and handed over to the like of the one that decoded.
    bench.say("d-int8", DecodeAdmitted(decode.leg))
    bench.lose("p-old", crashed=False)
    bench.lose("d-int8")
    bench.join("d-int8", Role.DECODE, incarnation=2, fingerprint=INT8)
    bench.wait(1.0)
    assert not bench.take_legs(Role.DECODE), "it did not begin on int8"
    bench.join("p-old", Role.PREFILL, incarnation=2, fingerprint=OLD)
    bench.wait(1.0)
    assert bench.take_leg(Role.PREFILL).worker_id == "p-old"


def test_groups_are_said_once_per_change(bench: Bench) -> None:
    bench.wait(0.1)
    assert not bench.take_all(GroupsChanged), "all pair"
    bench.join("d-new", Role.DECODE, fingerprint=NEW)
    bench.wait(0.1)
    bench.wait(0.1)
    bench.join("d-int8", Role.DECODE, fingerprint=INT8)
    for _ in range(3):
        bench.wait(0.1)
    bench.lose("d-new")
    for _ in range(3):
        bench.wait(0.1)
    assert [change.groups for change in bench.take_all(GroupsChanged)] == [
        ((OLD.kv, "torch", ("d-old", "p-old")), (NEW.kv, "torch", ("d-new",))),
        ((OLD.kv, "torch", ("d-int8", "d-old", "p-old")), (NEW.kv, "torch", ("d-new",))),
        ((OLD.kv, "torch", ("d-int8", "d-old", "p-old")),),
    ]


@pytest.mark.parametrize("age_s", [0.0, 4.0])
def test_those_that_wait_for_their_like_hold_up_nobody(age_s: float) -> None:
    """They are more than a pass over the queue goes past, and come before new requests: these are neither held up nor
    refused for the sake of work that nobody can go on with."""
    bench = Bench(max_overtaken=2, overtake_limit_s=1.0)
    bench.join("p-old", Role.PREFILL, fingerprint=OLD)
    bench.join("d-old", Role.DECODE, fingerprint=OLD)
    for number in range(4):
        prefill, decode = bench.handed_over(f"old{number}", num_tokens=150)
        bench.say("d-old", DecodeAdmitted(decode.leg))
        bench.say("p-old", tokens(prefill, 100))
        bench.say("d-old", ImportReady(decode.leg), tokens(decode, 100))
    join_new(bench)
    lose_old(bench)
    bench.load("p-new", ms_per_prefill_token=10.0)
    bench.wait(age_s)
    bench.submit("new", deadline_s=bench.now + 2.0)
    bench.wait(0.1)
    assert not bench.failed
    assert bench.take_leg(Role.PREFILL).worker_id == "p-new"
