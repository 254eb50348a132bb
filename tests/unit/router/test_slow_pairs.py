"""Tests that a decode worker is chosen for its prefill worker: a pair whose handoffs are slow is used less."""

from __future__ import annotations

from services.router.coordinator.events import DecodeAdmitted, FinishReason, ImportReady, SendLeg
from services.router.policy import Role
from services.router.policy.handoff_time import MEMORY_S, MIN_HANDOFFS
from tests.support.router_bench import Bench, started, tokens

TAKES_S = {("p-0", "d-0"): 0.4, ("p-0", "d-1"): 0.01}
"""What handoffs take: one pair is slow. Between others they take as long as between the quick ones."""


def cluster() -> Bench:
    """Returns two decode workers, of which the first wins ties."""
    bench = Bench()
    for worker_id, role in (("p-0", Role.PREFILL), ("p-1", Role.PREFILL), ("d-0", Role.DECODE), ("d-1", Role.DECODE)):
        bench.join(worker_id, role)
    return bench


def bound(bench: Bench, request_id: str, source: str) -> tuple[SendLeg, SendLeg]:
    """Runs a request's prompt on `source` until a decode worker is asked. Returns both legs."""
    other = "p-1" if source == "p-0" else "p-0"
    bench.load(other, queued_prefill_tokens=4000)
    bench.load(source, queued_prefill_tokens=0)
    bench.submit(request_id, num_tokens=40, max_tokens=4)
    prefill = bench.take_leg(Role.PREFILL)
    assert prefill.worker_id == source
    bench.say(source, started(prefill))
    return prefill, bench.take_leg(Role.DECODE)


def serve(bench: Bench, request_id: str, source: str) -> str:
    """Serves a request. Returns which worker decoded it."""
    prefill, decode = bound(bench, request_id, source)
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg))
    bench.say(source, tokens(prefill, 1))
    bench.clock.advance(TAKES_S.get((source, decode.worker_id), 0.01))
    rest = tokens(decode, 2, 3, 4, at=1, finish=FinishReason.LENGTH)
    bench.say(decode.worker_id, ImportReady(decode.leg), tokens(decode, 1), rest)
    return decode.worker_id


def test_a_pair_whose_handoffs_are_slow_is_passed_over_once_that_is_known() -> None:
    bench = cluster()
    served = [serve(bench, f"r{number}", "p-0") for number in range(2 * MIN_HANDOFFS)]
    assert served == ["d-0"] * MIN_HANDOFFS + ["d-1"] * MIN_HANDOFFS


def test_the_worker_is_slow_for_that_source_alone() -> None:
    bench = cluster()
    for number in range(MIN_HANDOFFS + 1):
        serve(bench, f"r{number}", "p-0")
    assert serve(bench, "other", "p-1") == "d-0"


def test_a_slow_pair_is_tried_again_now_and_then() -> None:
    bench = cluster()
    for number in range(MIN_HANDOFFS + 1):
        serve(bench, f"r{number}", "p-0")
    bench.clock.advance(MEMORY_S + 1)
    for worker_id in ("p-0", "p-1", "d-0", "d-1"):
        bench.load(worker_id)
    assert serve(bench, "again", "p-0") == "d-0"
    assert serve(bench, "once", "p-0") == "d-1", "it is as slow as before"


def test_a_worker_of_a_new_incarnation_is_not_judged_by_the_old_one() -> None:
    bench = cluster()
    for number in range(MIN_HANDOFFS):
        serve(bench, f"r{number}", "p-0")
    bench.lose("p-0", crashed=False)
    bench.join("p-0", Role.PREFILL, incarnation=2)
    assert serve(bench, "new", "p-0") == "d-0"


def test_a_slow_pair_is_used_where_the_quick_one_has_much_more_to_do() -> None:
    bench = cluster()
    for number in range(MIN_HANDOFFS):
        serve(bench, f"r{number}", "p-0")
    bench.load("d-1", num_running=60, blocks_free=100, blocks_active=900)
    _, decode = bound(bench, "one more", "p-0")
    assert decode.worker_id == "d-0"
