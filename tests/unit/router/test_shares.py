"""Tests what tenants are served beside each other: by whom the queue goes on, and what that costs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import Overloaded
from services.router.coordinator.events import ExpectedRequest, FinishReason
from services.router.coordinator.request import Phase
from services.router.policy import Role, Shares
from services.router.policy.shares import CREDIT, OUTPUT_COST, PROMPT_COST, RECENT_S
from tests.support.router_bench import BUSY, Bench, started, tokens

LONGEST = 4096
WEIGHTS = st.lists(st.floats(0.25, 8.0), min_size=2, max_size=5)
REQUESTS = st.lists(st.tuples(st.integers(1, LONGEST), st.integers(1, 512)), min_size=1, max_size=60)


@given(WEIGHTS, st.lists(st.floats(0.0, 1e6), min_size=5, max_size=5), REQUESTS, st.integers(1, 8))
def test_what_waiting_tenants_are_served_differs_by_a_bound(
    weights: list[float], served: list[float], requests: list[tuple[int, int]], num_running: int
) -> None:
    """Has all of them wait from some moment on. Outputs are charged as they come, and `num_running` requests run at
    once. VTC's bound is the cost of what runs at once; here the credit is added to it."""
    shares = Shares()
    tenants = [shares.enter(f"t{number}", weight, 0.0) for number, weight in enumerate(weights)]
    for tenant, before in zip(tenants, served, strict=False):
        tenant.served = before
    shares.newest_start = max(tenant.served for tenant in tenants)
    for tenant in tenants:
        tenant.begins_to_wait()
    begun = {tenant: tenant.served for tenant in tenants}
    spread = max(begun.values()) - min(begun.values())
    assert spread <= CREDIT / min(weights) + 1e-6
    running: list[tuple[object, int]] = []
    for prompt, output in requests * 4:
        tenant = min(tenants, key=lambda tenant: tenant.served)
        tenant.begins()
        tenant.charge_prompt(prompt)
        running.append((tenant, output))
        if len(running) == num_running:
            done, num_tokens = running.pop(0)
            next(tenant for tenant in tenants if tenant is done).charge_output(num_tokens)
    most = (PROMPT_COST * LONGEST + num_running * OUTPUT_COST * 512) / min(weights)
    for one, other in itertools.permutations(tenants, 2):
        mine, others = one.served - begun[one], other.served - begun[other]
        assert mine - others <= CREDIT / min(weights) + 2 * most + 1e-3


def test_a_tenant_that_comes_back_has_saved_up_no_more_than_its_credit() -> None:
    shares = Shares()
    flood, idle = shares.enter("flood", 1.0, 0.0), shares.enter("idle", 2.0, 0.0)
    for _ in range(100):
        flood.begins()
        flood.charge_prompt(10_000)
    idle.begins_to_wait()
    assert idle.served == shares.newest_start - CREDIT / 2
    assert idle.is_behind
    assert not flood.is_behind


def test_tenants_without_requests_are_forgotten() -> None:
    shares = Shares()
    for number in range(10_000):
        shares.leave(shares.enter(f"t{number}", 0.1, number / 100))
        shares.forget_idle(number / 100)
    shares.check()
    assert len(shares) <= RECENT_S * 100 + 1
    shares.forget_idle(1000.0)
    assert not len(shares)
    assert shares.weight == 0


def test_a_tenant_alone_is_neither_behind_nor_over_its_share() -> None:
    """Caches give back more than its next prompt costs."""
    shares = Shares()
    alone = shares.enter("", 1.0, 0.0)
    for num_tokens, num_cached in ((1000, 990), (10, 0)):
        alone.begins()
        alone.charge_prompt(num_tokens)
        alone.hold(num_tokens)
        alone.charge_prompt(-num_cached)
    assert not alone.is_behind
    assert not alone.headroom


# In the queue


@pytest.fixture
def bench() -> Bench:
    """Has one worker with room for one sequence at a time."""
    bench = Bench(max_queue=8)
    bench.join("m", Role.DECODE, max_num_seqs=1)
    bench.load("m", **BUSY)
    return bench


def serve(bench: Bench) -> str:
    """Lets the worker have room for one. Returns the request that it gets, which is over at once."""
    bench.load("m", num_running=0, blocks_active=0, blocks_free=64, num_waiting=0)
    command = bench.take_leg(Role.DECODE)
    bench.load("m", **BUSY)
    bench.say("m", tokens(command, 1, finish=FinishReason.STOP))
    return str(command.spec.request_id)


def test_a_newcomer_does_not_wait_for_a_flood_whatever_its_priority(bench: Bench) -> None:
    for number in range(6):
        bench.submit(f"flood{number}", tenant="flood", priority=100)
    assert serve(bench) == "flood0"
    bench.submit("light", tenant="light", priority=-100)
    assert serve(bench) == "light"
    assert serve(bench) == "flood1"


def test_tenants_that_wait_are_served_by_their_weights() -> None:
    bench = Bench()
    bench.join("m", Role.DECODE, max_num_seqs=1)
    bench.load("m", **BUSY)
    for number in range(30):
        bench.submit(f"a{number}", tenant="a", weight=3.0)
        bench.submit(f"b{number}", tenant="b")
    first = [serve(bench)[0] for _ in range(20)]
    assert first.count("a") == 15


def test_a_tenant_has_its_own_order_and_turns(bench: Bench) -> None:
    """Its priorities, and who has waited long, count among its own."""
    bench.submit("a-low", tenant="a", priority=-1)
    bench.submit("b-low", tenant="b", priority=-1)
    bench.submit("a-high", tenant="a", priority=1)
    bench.submit("b-high", tenant="b", priority=1)
    assert [serve(bench) for _ in range(2)] == ["a-high", "b-high"]
    for number in range(3):
        bench.submit(f"a{number}", tenant="a")
    bench.wait(10.0)
    bench.submit("c", tenant="c", priority=-100)
    assert serve(bench) == "c"
    assert {serve(bench) for _ in range(2)} == {"a0", "b-low"}, "one of each"


def test_what_was_cached_is_not_charged_and_replays_are_not() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.submit(num_tokens=100, tenant="a")
    share = bench.share("a")
    prefill = bench.take_leg(Role.PREFILL)
    assert share.served == 100
    bench.say("p", started(prefill, cached_tokens=96))
    assert share.served == 4
    bench.lose("p")
    bench.join("p", Role.PREFILL, incarnation=2)
    bench.wait(3.0)
    assert bench.take_legs(Role.PREFILL) or bench.take_legs(Role.DECODE), "its prompt is computed again"
    assert share.served == 4


# A full queue


def test_a_flood_loses_its_places_to_others_and_takes_none_of_theirs(bench: Bench) -> None:
    for number in range(8):
        bench.submit(f"flood{number}", tenant="flood", priority=100)
    for number in range(4):
        bench.submit(f"light{number}", tenant="light", priority=-100)
    assert list(bench.failed) == ["flood7", "flood6", "flood5", "flood4"]
    for tenant in ("flood", "light"):
        with pytest.raises(Overloaded, match="the queue is full"):
            bench.submit("more", tenant=tenant, priority=-100)
    bench.submit("heavy", tenant="heavy", weight=100.0)
    assert len(bench.failed) == 5


def test_who_has_nothing_to_lose_keeps_nobody_out(bench: Bench) -> None:
    """Has one request of a tenant of small weight, which is the most for a weight, and is not pushed out."""
    bench.submit("small", tenant="small", weight=0.01)
    for number in range(7):
        bench.submit(f"flood{number}", tenant="flood")
    bench.coordinator.arrived(bench.coordinator.expect(ExpectedRequest(10, 0.0, tenant="light"), bench.now))
    bench.submit("light", tenant="light")
    assert list(bench.failed) == ["flood6"]


def test_prompts_that_are_being_tokenised_keep_nobody_out(bench: Bench) -> None:
    flood = ExpectedRequest(10, 0.0, max_tokens=8, tenant="flood")
    places = [bench.coordinator.expect(flood, bench.now) for _ in range(8)]
    with pytest.raises(Overloaded):
        bench.coordinator.expect(flood, bench.now)
    with pytest.raises(Overloaded):
        bench.submit("flood", tenant="flood")
    mine = bench.coordinator.expect(ExpectedRequest(10, 0.0, max_tokens=8, tenant="light"), bench.now)
    bench.coordinator.arrived(mine)
    for number in range(4):
        bench.submit(f"light{number}", tenant="light")
    for place in places:
        bench.coordinator.arrived(place)
        if bench.coordinator.phases()[Phase.QUEUED] + bench.coordinator.num_expected >= 8:
            with pytest.raises(Overloaded):
                bench.submit("flood", tenant="flood")
    bench.coordinator.check()


def test_a_deadline_counts_what_comes_before_and_not_a_floods_backlog() -> None:
    bench = Bench(max_queue=64)
    bench.join("m", Role.DECODE, max_num_seqs=1)
    bench.load("m", **BUSY, ms_per_prefill_token=1.0, ms_per_decode_step=1.0)
    for number in range(40):
        bench.submit(f"flood{number}", num_tokens=500, tenant="flood")
    with pytest.raises(Overloaded):
        bench.submit("late", num_tokens=100, tenant="flood", deadline_s=bench.now + 3.0)
    bench.submit("light", num_tokens=100, tenant="light", deadline_s=bench.now + 3.0)
    bench.wait(0.1)
    assert "light" not in bench.failed


def test_a_newcomers_deadline_counts_nobody_who_was_served_more() -> None:
    bench = Bench(max_queue=64)
    bench.join("m", Role.DECODE, max_num_seqs=1)
    bench.load("m", **BUSY, ms_per_prefill_token=1.0, ms_per_decode_step=1.0)
    for number in range(62):
        bench.submit(f"{number}", num_tokens=500, tenant=f"t{number % 31}")
    for _ in range(32):
        serve(bench)  # one of each, and a second: thirty have their next turn in this round
    bench.submit("light", num_tokens=100, tenant="light", deadline_s=bench.now + 3.0)
    bench.wait(0.1)
    assert serve(bench) == "light"
