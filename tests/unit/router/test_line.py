"""Tests the order of the queue: nobody holds up those whom other workers could serve, and nobody starves.

Blocks hold 16 tokens. The small decode worker `a` holds 128 tokens, the big one `b` 1024; `p` prefills for both.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.errors import Overloaded
from services.router.coordinator import placement
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    FinishReason,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    SendLeg,
)
from services.router.coordinator.request import Phase
from services.router.policy import Load, Role
from tests.support.router_bench import Bench, started, tokens

BIG = {"num_tokens": 500, "max_tokens": 20}
SHORT = {"num_tokens": 20, "max_tokens": 8}


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.join("p", Role.PREFILL, num_blocks=64)
    bench.join("a", Role.DECODE, num_blocks=8)
    bench.join("b", Role.DECODE, num_blocks=64)
    return bench


def serve(bench: Bench, prefill: SendLeg) -> None:
    """Takes a request whose prefill was just sent to its end."""
    bench.say("p", started(prefill), tokens(prefill, 1))
    decode = bench.take_leg(Role.DECODE)
    finish(bench, prefill, decode)


def finish(bench: Bench, prefill: SendLeg, decode: SendLeg) -> None:
    worker_id = decode.worker_id
    bench.say(worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg))
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    bench.say(worker_id, tokens(decode, 1, 2, finish=FinishReason.LENGTH))


@pytest.mark.parametrize(("num_big", "age_s"), [(1, 1.5), (1, 0.0), (17, 0.0), (40, 0.0), (40, 1.5), (3, 29.0)])
def test_what_no_ready_worker_can_hold_holds_up_nobody(bench: Bench, num_big: int, age_s: float) -> None:
    """The worker restarts, and the others are served meanwhile, however old they are."""
    bench.lose("b")
    for number in range(num_big):
        bench.submit(f"big{number}", **BIG)
    bench.wait(age_s)
    assert not bench.take_legs(Role.PREFILL)
    for number in range(20):
        bench.submit(f"r{number}", **SHORT)
        serve(bench, bench.take_leg(Role.PREFILL))
        bench.wait(0.05)
    assert len(bench.finished) == 20
    bench.join("b", Role.DECODE, num_blocks=64, incarnation=2)
    assert [command.spec.request_id for command in bench.take_legs(Role.PREFILL)][:1] == ["big0"]


@pytest.mark.parametrize("priority", [0, 1])
def test_it_keeps_nobody_out_of_a_full_queue(priority: int) -> None:
    """The youngest of it makes room, unless it came with a higher priority; what could be served too stays."""
    bench = Bench(max_queue=3)
    for worker_id, num_blocks in (("a", 8), ("b", 64)):
        bench.join(worker_id, Role.DECODE, num_blocks=num_blocks)
    busy(bench, "a", 0)
    bench.lose("b")
    for number in range(2):
        bench.submit(f"big{number}", priority=priority, **BIG)
    bench.submit("first", **SHORT)
    with pytest.raises(Overloaded, match="the queue is full"):
        bench.submit("big2", priority=priority - 1, **BIG)
    if priority:
        with pytest.raises(Overloaded, match="the queue is full"):
            bench.submit("second", **SHORT)
        return
    bench.submit("second", **SHORT)
    assert bench.failed.keys() == {"big1"}
    bench.submit("third", **SHORT)
    assert bench.failed.keys() == {"big1", "big0"}
    with pytest.raises(Overloaded, match="the queue is full"):
        bench.submit("fourth", **SHORT)


def test_it_does_not_count_in_forecasts_either(bench: Bench) -> None:
    """A deadline is not refused for the sake of work that nobody can begin."""
    bench.load("p", ms_per_prefill_token=10)
    bench.lose("b")
    for number in range(5):
        bench.submit(f"big{number}", **BIG)
    bench.submit("r", **SHORT, deadline_s=bench.now + 2.0)
    bench.wait(0.1)
    assert "r" not in bench.failed
    assert bench.take_leg(Role.PREFILL).spec.request_id == "r"


def test_a_queue_of_hundreds_of_them_costs_no_placement(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.lose("b")
    for number in range(300):
        bench.submit(f"big{number}", **BIG)
    bench.wait(1.5)
    calls: list[str] = []
    for name in ("place_prefill", "place_decode", "nearest_start", "nearest_to_room"):
        real = getattr(placement.policy, name)

        def counted(*args: object, name: str = name, real: object = real) -> object:
            calls.append(name)
            return real(*args)  # type: ignore[operator]

        monkeypatch.setattr(placement.policy, name, counted)
    bench.submit("r", **SHORT)
    assert calls == ["place_prefill"], "the one that could start"


def busy(bench: Bench, worker_id: str, free: int) -> None:
    num_blocks = bench.infos[worker_id].num_blocks
    bench.load(worker_id, blocks_free=free, blocks_active=num_blocks - free, num_running=1)


def hold_the_line(bench: Bench) -> None:
    """A handoff is on its way to `a`: with none in flight, the head of the queue is let through in any case."""
    busy(bench, "b", free=0)
    bench.submit("other", **SHORT)
    bench.say("p", started(bench.take_leg(Role.PREFILL)))
    assert bench.take_leg(Role.DECODE).worker_id == "a"


def test_an_aged_request_claims_the_worker_it_waits_for_and_no_other(bench: Bench) -> None:
    """While short ones come without end, they are served by `a`, none takes what becomes free on `b`, and the big one
    is begun as soon as its room is there."""
    hold_the_line(bench)
    bench.submit("big", **BIG)
    for number in range(16):  # they keep the line full
        bench.submit(f"x{number}", **SHORT)
    for prefill in bench.take_legs(Role.PREFILL):
        assert prefill.spec.request_id != "big"
        bench.cancel(prefill.spec.request_id)
    bench.wait(1.1)
    num_served = 0
    for number, free in enumerate([0, 8, 16, 24, 31]):
        busy(bench, "b", free=free)
        bench.submit(f"r{number}", **SHORT)
        for prefill in bench.take_legs(Role.PREFILL):
            assert prefill.spec.request_id != "big"
            bench.say("p", started(prefill), tokens(prefill, 1))
            decode = bench.take_leg(Role.DECODE)
            assert decode.worker_id == "a", "what becomes free on b is kept"
            finish(bench, prefill, decode)
            num_served += 1
        bench.wait(0.3)
    assert num_served >= 5
    bench.take_legs(Role.PREFILL)
    busy(bench, "b", free=33)
    assert bench.take_legs(Role.PREFILL)[0].spec.request_id == "big"


def test_it_also_claims_the_prefill_worker_once_it_could_be_taken_over(bench: Bench) -> None:
    """Else short prompts could keep the prefill worker full for ever. Before, they may have it."""
    busy(bench, "b", free=40)
    busy(bench, "p", free=4)
    bench.submit("big", **BIG)
    bench.submit("young", **SHORT)
    assert bench.take_leg(Role.PREFILL).spec.request_id == "young", "it is passed while it is young"
    bench.cancel("young")
    bench.wait(1.1)
    bench.submit("late", **SHORT)
    assert not bench.take_legs(Role.PREFILL), "p is claimed: what becomes free there is the big one's"
    busy(bench, "p", free=33)
    assert bench.take_legs(Role.PREFILL)[0].spec.request_id == "big"


def test_other_prefill_workers_are_not_claimed(bench: Bench) -> None:
    bench.join("q", Role.PREFILL, num_blocks=16)
    busy(bench, "b", free=40)
    busy(bench, "p", free=4)
    bench.submit("big", **BIG)
    bench.wait(1.1)
    bench.submit("late", **SHORT)
    assert bench.take_leg(Role.PREFILL).worker_id == "q"


def test_an_unsplit_sequence_that_waits_for_its_decode_worker_claims_it(bench: Bench) -> None:
    """There are no prefill workers. It is not sent before there is room, since it would wait among others there."""
    bench.lose("p")
    busy(bench, "b", free=0)
    bench.submit("big", **BIG)
    bench.wait(1.1)
    busy(bench, "b", free=10)
    bench.submit("r", **SHORT)
    assert bench.take_leg(Role.DECODE).worker_id == "a"
    assert bench.coordinator.phases()[Phase.QUEUED] == 1
    busy(bench, "b", free=33)
    command = bench.take_leg(Role.DECODE)
    assert (command.worker_id, command.spec.request_id) == ("b", "big")


def test_aged_requests_claim_one_worker_each_in_order(bench: Bench) -> None:
    bench.join("c", Role.DECODE, num_blocks=64)
    busy(bench, "c", free=0)
    hold_the_line(bench)
    busy(bench, "b", free=10)
    busy(bench, "c", free=20)
    for name in ("big0", "big1", "big2"):
        bench.submit(name, **BIG)
    bench.wait(1.1)
    bench.submit("r", **SHORT)
    serve(bench, bench.take_leg(Role.PREFILL))
    busy(bench, "c", free=40)
    prefill = bench.take_legs(Role.PREFILL)[0]
    assert prefill.spec.request_id == "big0", "one claims b, and the one before it begins"
    bench.say("p", started(prefill))
    assert bench.take_leg(Role.DECODE).worker_id == "c"


def test_a_handoff_that_only_the_claimed_worker_can_take_goes_there(bench: Bench) -> None:
    """What is prefilled holds blocks that the claimant may wait for, so it never waits for the claimant in turn."""
    middle = {"num_tokens": 200, "max_tokens": 20}
    bench.submit("middle", **middle)
    prefill = bench.take_leg(Role.PREFILL)
    busy(bench, "b", free=20)
    bench.submit("big", **BIG, priority=1)
    bench.wait(1.1)
    bench.say("p", started(prefill))
    assert bench.take_leg(Role.DECODE).worker_id == "b"


def test_a_claimant_does_not_wait_for_a_handoff_that_waits_for_it(bench: Bench) -> None:
    """The handoff could go to `c` as well, but that one is full for a long time; meanwhile it holds the blocks that the
    claimant of `p` and `b` needs to begin."""
    bench.join("c", Role.DECODE, num_blocks=64)
    bench.submit("middle", num_tokens=400, max_tokens=20)
    prefill = bench.take_leg(Role.PREFILL)
    busy(bench, "p", free=30)
    busy(bench, "b", free=0)
    busy(bench, "c", free=0)
    bench.submit("big", **BIG, priority=1)
    bench.wait(1.1)
    bench.say("p", started(prefill), tokens(prefill, 1))
    busy(bench, "b", free=40)
    bench.wait(0.1)
    decode = bench.take_leg(Role.DECODE)
    assert decode.worker_id == "b"
    busy(bench, "b", free=40)
    finish(bench, prefill, decode)
    busy(bench, "p", free=56)
    assert bench.take_leg(Role.PREFILL).spec.request_id == "big"


def test_a_handoff_leaves_a_claimed_worker_alone_if_another_has_room(bench: Bench) -> None:
    """A handoff from the source that the claimant waits for does so too: then it need not wait either."""
    bench.join("c", Role.DECODE, num_blocks=64)
    bench.submit("middle", num_tokens=400, max_tokens=20)
    prefill = bench.take_leg(Role.PREFILL)
    busy(bench, "p", free=30)
    busy(bench, "b", free=40)
    busy(bench, "c", free=28)
    bench.submit("big", **BIG, priority=1)
    bench.wait(1.1)
    bench.say("p", started(prefill), tokens(prefill, 1))
    assert bench.take_leg(Role.DECODE).worker_id == "c"


@pytest.mark.parametrize("ends", ["it is cancelled", "it starts"])
def test_a_handoff_need_not_wait_once_the_claim_before_it_is_over(bench: Bench, ends: str) -> None:
    """It is placed in the same turn, and not by the next tick."""
    bench.join("c", Role.DECODE, num_blocks=64)
    bench.submit("middle", num_tokens=400, max_tokens=20)
    prefill = bench.take_leg(Role.PREFILL)
    busy(bench, "p", free=64)
    busy(bench, "b", free=28)
    busy(bench, "c", free=0)
    bench.submit("big", **BIG, priority=1)
    bench.wait(1.1)
    bench.say("p", started(prefill), tokens(prefill, 1))
    assert not bench.take_legs(Role.DECODE), "b is claimed, and c is able but full"
    if ends == "it is cancelled":
        bench.cancel("big")
    else:
        busy(bench, "b", free=64)
    assert bench.take_leg(Role.DECODE).worker_id == "b"


def test_a_worker_that_is_asked_to_take_an_aged_handoff_is_asked_nothing_else(bench: Bench) -> None:
    """Until it has answered: it keeps room for that one, and would refuse the others."""
    bench.lose("a")
    for name, spec in (("old", BIG), ("young", SHORT)):
        bench.submit(name, **spec)
    old, young = bench.take_legs(Role.PREFILL)
    busy(bench, "b", free=0)
    bench.say("p", started(old), tokens(old, 1), started(young), tokens(young, 1))
    bench.wait(1.1)
    asked = bench.take_leg(Role.DECODE)
    assert asked.spec.request_id == "old"
    busy(bench, "b", free=0)
    assert not bench.take_legs(Role.DECODE), "both are aged, and would be offered whatever room there is"
    bench.say("b", DecodeAdmitted(asked.leg))
    assert bench.take_leg(Role.DECODE).spec.request_id == "young"


def test_a_refusal_does_not_outlive_the_process_that_refused(bench: Bench) -> None:
    """A restarted worker is known by its incarnation, and its snapshots count from 1 again: it is
    asked as soon as it is there, not when it has counted
    as far as the old one had."""
    bench.lose("b")
    for _ in range(200):
        busy(bench, "a", free=8)
    bench.submit("r", **SHORT)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill), tokens(prefill, 1))
    decode = bench.take_leg(Role.DECODE)
    bench.say("a", DecodeRefused(decode.leg))
    bench.lose("a")
    bench.join("a", Role.DECODE, num_blocks=8, incarnation=2)
    bench.wait(1.0)
    bench.load("a")
    assert bench.take_leg(Role.DECODE).worker_id == "a"


def test_the_queue_is_bounded_in_time_all_the_same(bench: Bench) -> None:
    busy(bench, "b", free=0)
    busy(bench, "p", free=0)
    bench.submit("big", **BIG)
    for _ in range(125):
        bench.wait(1.0)
    assert isinstance(bench.failed["big"], Overloaded)
    bench.assert_idle()


def test_load_is_what_the_bench_says() -> None:
    """This is what the tests above depend on: an idle snapshot differs from a busy one."""
    assert Load(blocks_free=8).idle
    assert not replace(Load(blocks_free=0), blocks_active=8).idle


def test_a_stream_that_is_replayed_comes_before_its_equals() -> None:
    """Its client waits for the next token, however long its output is expected to be."""
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.decoding("begun", min_tokens=500, max_tokens=500)
    bench.lose("d")
    bench.submit("new", max_tokens=8)
    assert not bench.take_legs(Role.PREFILL)
    bench.join("d", Role.DECODE, incarnation=2)
    sent = [command.spec.request_id for command in bench.take_legs(Role.PREFILL)]
    assert sent == ["begun", "new"]
