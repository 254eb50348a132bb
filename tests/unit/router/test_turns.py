"""Tests when placement is due, that one pass per turn is enough, and that what is kept between
passes is what is there."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from services.router.coordinator.book import Alarms
from services.router.coordinator.events import DecodeAdmitted, DecodeRefused, RequestSpec
from services.router.coordinator.request import Phase
from services.router.coordinator.workers import REPORT_LAG_S
from services.router.policy import (
    BringTimes,
    Cluster,
    Fingerprint,
    HandoffsInFlight,
    Job,
    KnownCache,
    Load,
    Role,
    Source,
    WorkerView,
)
from services.router.policy.filter import can_decode, can_take_over, prefill_obstacle
from services.router.policy.handoff_time import HandoffTime
from tests.support import worker_views
from tests.support.router_bench import BUSY, Bench, is_leg, started


def test_inputs_place_nothing_and_one_pass_places_all(bench: Bench) -> None:
    coordinator = bench.coordinator
    for number in range(3):
        coordinator.submit(RequestSpec(f"r{number}", tuple(range(20)), 8), bench.now)
    assert coordinator.placement_is_due
    assert not [action for action in coordinator.take_actions() if is_leg(action, Role.PREFILL)]
    coordinator.place(bench.now)
    assert not coordinator.placement_is_due
    assert len([action for action in coordinator.take_actions() if is_leg(action, Role.PREFILL)]) == 3


def test_a_snapshot_that_shows_no_more_room_is_no_reason_to_place(bench: Bench) -> None:
    bench.load("p", blocks_free=0, blocks_active=64)
    bench.submit()
    assert not bench.take_legs(Role.PREFILL)
    coordinator, busy = bench.coordinator, bench.loads["p"]
    for number, (free, running, due) in enumerate([(0, 0, False), (0, 4, False), (1, 4, True), (0, 4, False)]):
        load = Load(busy.sequence_number + 1 + number, blocks_active=64 - free, blocks_free=free, num_running=running)
        coordinator.worker_events("p", 1, (), load, bench.now)
        assert coordinator.placement_is_due == due
        coordinator.place(bench.now)
    coordinator.tick(bench.now)
    assert coordinator.placement_is_due, "time alone makes some of what waits claim what it waits for"


def test_a_refused_handoff_is_tried_again_by_any_newer_snapshot(bench: Bench) -> None:
    _, decode = bench.handed_over()
    bench.say("d", DecodeRefused(decode.leg))
    bench.clock.advance(0.05)
    bench.load("d")
    again = bench.take_leg(Role.DECODE)
    assert again.leg > decode.leg


def test_a_snapshot_without_more_room_is_no_reason_to_place_a_handoff_until_it_is_aged(bench: Bench) -> None:
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.load("d", **BUSY)
    bench.say("p", started(prefill))
    assert bench.phase() is Phase.PARKED
    coordinator, busy = bench.coordinator, bench.loads["d"]
    for waited_s, due in ((0.0, False), (0.05, False), (coordinator.config.overtake_limit_s, True)):
        bench.clock.advance(waited_s)
        busy = replace(busy, sequence_number=busy.sequence_number + 1)
        coordinator.worker_events("d", 1, (), busy, bench.now)
        assert coordinator.placement_is_due == due
        coordinator.place(bench.now)


def test_an_admission_makes_room_among_the_handoffs_in_flight(bench: Bench) -> None:
    bench.load("d", blocks_free=3, blocks_active=61, num_running=1)
    bench.submit("first", num_tokens=20)
    first = bench.take_leg(Role.PREFILL)
    bench.submit("second", num_tokens=20)
    assert not bench.take_legs(Role.PREFILL), "room for one only"
    bench.say("p", started(first))
    bench.say("d", DecodeAdmitted(bench.take_leg(Role.DECODE).leg))
    assert bench.take_leg(Role.PREFILL).spec.request_id == "second"


def test_what_fits_whom_is_found_once_and_is_what_it_would_be_each_time() -> None:
    """It holds for clusters of all shapes, whatever was asked before and however their loads change meanwhile."""
    random_ = random.Random(7)
    for _ in range(60):
        views = {f"w{number}": _view(random_, f"w{number}") for number in range(random_.randint(1, 6))}
        cluster = Cluster(views.values())
        for _ in range(30):
            changed = random_.choice(sorted(views))
            views[changed] = _view(random_, changed, like=views[changed] if random_.random() < 0.7 else None)
            cluster.put(views[changed])
            claimed = frozenset(random_.sample(sorted(views), random_.randint(0, 1)))
            left = [view for view in views.values() if view.worker_id not in claimed]
            prompt = random_.randint(1, 130)
            fingerprint = random_.choice([None, Fingerprint("a"), Fingerprint("b")])
            model = random_.choice("mn")
            job = Job(prompt, prompt + random_.randint(1, 60), frozenset(), fingerprint, model=model)
            part = cluster.without(claimed)
            assert part.able(job, None) == [view for view in left if can_decode(job, view)]
            takers = {}
            for view in views.values():
                source = Source(view.worker_id, view.host_id, view.fingerprint)
                takers[view.worker_id] = [other for other in left if can_take_over(job, source, other)]
                assert part.able(job, source) == takers[view.worker_id]
            able = [view for view in left if view.roles.can_prefill and prefill_obstacle(job, view) is None]
            runs = [view for view in able if takers[view.worker_id]]
            assert part.fit(job).can_hand_over == bool(runs)
            tried = [
                view for view in runs if any(view.worker_id not in other.untried for other in takers[view.worker_id])
            ]
            starts = part.fit(job).starts
            assert [start.worker_id for start in starts] == [view.worker_id for view in tried or runs]
            for start in starts:
                room = sum(view.load.available_blocks for view in takers[start.worker_id])
                assert start.room.num_blocks == room
        cluster.check()


@pytest.mark.parametrize(
    "fact", [field.name for field in fields(WorkerView) if field.init and field.name not in ("worker_id", "load")]
)
def test_a_change_of_what_decides_whom_a_job_fits_is_never_missed(fact: str) -> None:
    """Each fact of a view changes alone, after the fits of the job were found."""
    job = Job(20, 40, frozenset(), None)
    prefill, decode = worker_views.prefill("p"), worker_views.decode("d")
    others: dict[str, object] = {
        "model": "other",
        "roles": Role.PREFILL,
        "ready": False,
        "host_id": "elsewhere",
        "fingerprint": Fingerprint("other"),
        "block_size": 1024,
        "num_blocks": 1,
        "max_model_len": 8,
        "max_num_seqs": 1,
        "on_trial": True,
        "barred": frozenset({"p"}),
        "untried": frozenset({"p"}),
        "predicted_blocks": 1,
        "predicted_tokens": 1,
        "cancelled_tokens": 1,
        "predicted_sequences": 1,
        "ramp": 0.5,
        "handoff_times": {"p": HandoffTime()},
        "bring_times": BringTimes(0, lambda source_id: None),
        "cache": KnownCache(64, 0.0),
        "capacity": 2.0,
        "num_legs": 1,
        "newest_leg": 7,
        "hardware": "cuda",
        "ejected": True,
    }
    cluster = Cluster([prefill, decode])
    for part in (cluster.everyone, cluster.without(frozenset({"x"}))):
        assert part.fit(job).starts
    changed = replace(decode, **{fact: others[fact]})  # type: ignore[arg-type]
    assert changed != decode
    cluster.put(changed)
    cluster.check()
    fresh = Cluster([prefill, changed]).everyone.fit(job)
    assert (cluster.everyone.fit(job).decoders, len(cluster.everyone.fit(job).starts)) == (
        fresh.decoders,
        len(fresh.starts),
    )


def test_a_prediction_that_ends_with_a_snapshot_is_news(bench: Bench) -> None:
    """The snapshot itself shows no more room, but the prompt it speaks of is no longer added to it."""
    bench.submit("first", num_tokens=20)
    assert bench.take_legs(Role.PREFILL)
    coordinator = bench.coordinator
    bench.clock.advance(REPORT_LAG_S)
    load = replace(bench.loads["p"], sequence_number=bench.loads["p"].sequence_number + 1)
    coordinator.worker_events("p", 1, (), load, bench.now)
    assert coordinator.placement_is_due


def _view(random_: random.Random, worker_id: str, like: WorkerView | None = None) -> WorkerView:
    """Returns a random view; `like` is the same worker with another load."""
    others = [f"w{number}" for number in range(6)]
    return WorkerView(
        worker_id=worker_id,
        model=like.model if like else random_.choice("mmn"),
        roles=like.roles if like else random_.choice([Role.PREFILL, Role.DECODE, Role.MIXED]),
        ready=like.ready if like else random_.random() < 0.8,
        host_id="h",
        fingerprint=like.fingerprint if like else Fingerprint(random_.choice("aab")),
        block_size=like.block_size if like else random_.choice([4, 16]),
        num_blocks=like.num_blocks if like else random_.choice([4, 8, 16]),
        max_model_len=like.max_model_len if like else random_.choice([64, 128]),
        max_num_seqs=8,
        load=Load(blocks_free=random_.randint(0, 16)),
        on_trial=like.on_trial if like else random_.random() < 0.1,
        barred=like.barred if like else frozenset(random_.sample(others, random_.randint(0, 2))),
        untried=like.untried if like else frozenset(random_.sample(others, random_.randint(0, 2))),
    )


def test_handoffs_in_flight_are_added_up_for_any_block_size() -> None:
    lengths, handoffs = [1, 16, 17, 100], HandoffsInFlight([1, 16])
    assert handoffs.num_blocks(16) == 2 + 2
    for length in lengths[2:]:
        handoffs.add(length)
    assert [handoffs.num_blocks(size) for size in (16, 4)] == [2 + 2 + 3 + 8, 2 + 5 + 6 + 26]
    for length in lengths:
        handoffs.remove(length)
    assert not handoffs
    assert handoffs.num_blocks(16) == 0


def test_alarms_ring_once_and_only_of_what_is_still_there() -> None:
    live = {1: "", 2: "", 3: ""}
    alarms: Alarms[int] = Alarms(live)
    for at_s, key in ((3.0, 1), (1.0, 2), (2.0, 3), (2.5, 3)):
        alarms.set(at_s, key)
    assert alarms.due(0.9) == []
    del live[2]
    assert alarms.due(2.5) == [3]
    assert alarms.due(2.5) == []
    assert alarms.due(3.0) == [1]


def test_alarms_of_what_is_over_are_not_kept() -> None:
    live: dict[int, str] = {}
    alarms: Alarms[int] = Alarms(live)
    for key in range(10_000):
        live.clear()
        live[key] = ""
        alarms.set(1e9, key)
    assert len(alarms) < 100
