"""Tests that a choice counts what a worker could bring of a prompt as what it costs: not as nothing, nor in full."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.v1 import control_pb2
from services.router.coordinator.events import SendLeg
from services.router.policy import (
    PRESETS,
    BringTimes,
    Cluster,
    Fingerprint,
    HandoffsInFlight,
    Job,
    KnownCache,
    Load,
    PrefixIndex,
    Role,
    WorkerView,
    place_prefill,
    sharing,
)
from services.router.policy.known_cache import MARGIN, MOST_AT_ONCE
from services.router.policy.terms import Question, prefix_cached
from tests.support.router_bench import Bench
from tests.support.worker_views import mixed, view

HASHES = tuple(range(1, 51))
JOB = Job(num_tokens=801, total_tokens=809, block_hashes={16: HASHES})
KV = 10_000
"""Bytes of a token's KV."""
COMPUTES = Load(1, blocks_free=64, ms_per_prefill_token=1.0, ms_per_decode_step=20.0)
FAST = 1e9
"""Bytes per second, so that 800 tokens take 18 ms to bring and 800 ms to compute."""


class Peers:
    """Makes workers whose caches share an index."""

    def __init__(self, bytes_per_s: float = FAST) -> None:
        self._index = PrefixIndex()
        self._times = BringTimes(KV, lambda source_id: bytes_per_s)

    def made(self, worker_id: str, num_blocks: int = 0, roles: Role = Role.MIXED, **changes: object) -> WorkerView:
        """Returns a worker that has told of the prompt's first blocks."""
        cache = KnownCache(64, 0.0, self._index)
        cache.tell(whole=True, stored=HASHES[:num_blocks], removed=())
        return replace(
            view(worker_id, roles, load=COMPUTES, cache=cache, bring_times=self._times),
            **changes,  # type: ignore[arg-type]
        )


def share(worker: WorkerView, *lenders: WorkerView) -> float:
    return prefix_cached([worker], Question(JOB, None, 0.0, lenders))[0] * JOB.num_tokens


def test_what_a_peer_has_counts_less_what_it_takes_to_bring() -> None:
    peers = Peers()
    lacking, holder = peers.made("a"), peers.made("b", 50)
    assert share(lacking) == 0
    assert share(lacking, lacking, holder) == pytest.approx(800 - MARGIN * 18)
    assert share(holder, lacking, holder) == pytest.approx(800), "who has it is better still"
    assert share(peers.made("c", 20), holder) == pytest.approx(800 - MARGIN * (10 + 480 / 100))


def test_what_takes_longer_to_bring_than_to_compute_does_not_count() -> None:
    peers = Peers(bytes_per_s=1e6)
    assert share(peers.made("a"), peers.made("b", 50)) == 0


def test_a_store_lends_though_it_is_no_candidate() -> None:
    peers = Peers()
    cluster = Cluster([peers.made("a"), peers.made("s", 50, Role.STORE)])
    config = PRESETS["prefix_aware"]
    assert share(peers.made("a"), *cluster.everyone.lenders(config)) > 700


@pytest.mark.parametrize(
    "fact", [{"fingerprint": Fingerprint("other")}, {"barred": frozenset("b")}, {"bring_times": None}]
)
def test_nothing_is_brought_from_one_that_is_no_source_for_the_worker(fact: dict[str, object]) -> None:
    peers = Peers()
    assert share(peers.made("a", 0, **fact), peers.made("b", 50)) == 0


def test_a_worker_that_does_not_lend_is_no_lender() -> None:
    peers = Peers()
    assert share(peers.made("a"), peers.made("b", 50, bring_times=None)) == 0


def test_nothing_is_brought_where_costs_are_not_known_or_the_lender_is_away() -> None:
    peers = Peers()
    assert share(peers.made("a", load=Load(1, blocks_free=64)), peers.made("b", 50)) == 0
    assert share(peers.made("a"), peers.made("b", 50, ready=False)) == 0


def test_what_is_only_expected_at_a_peer_cannot_be_brought_yet() -> None:
    peers = Peers()
    given = peers.made("b")
    assert given.cache is not None
    given.cache.expect(HASHES, "")
    assert share(peers.made("a"), given) == 0
    assert share(given, given) == pytest.approx(800), "there it will be found"


def test_a_worker_without_a_cache_is_no_lender() -> None:
    assert share(Peers().made("a"), mixed("b")) == 0


@pytest.mark.parametrize(("shares", "chosen"), [("auto", "idle"), ("never", "holder")])
def test_a_prompt_goes_past_a_queue_to_where_its_beginning_can_be_brought(shares: str, chosen: str) -> None:
    peers = Peers()
    busy = replace(COMPUTES, queued_prefill_tokens=4000, num_running=2)
    cluster = Cluster([peers.made("holder", 50, load=busy), peers.made("idle")])
    config = sharing(PRESETS["prefix_aware"], shares)
    assert place_prefill(JOB, cluster.everyone, HandoffsInFlight(), 0.0, config) == chosen


def test_a_prompt_stays_where_its_beginning_is_if_that_is_free() -> None:
    peers = Peers()
    cluster = Cluster([peers.made("holder", 50), peers.made("another")])
    config = PRESETS["prefix_aware"]
    assert place_prefill(JOB, cluster.everyone, HandoffsInFlight(), 0.0, config) == "holder"


def test_no_lender_is_looked_for_where_no_term_looks_at_prompts() -> None:
    cluster = Cluster([Peers().made("holder", 50)])
    for part in (cluster.everyone, cluster.without(frozenset({"holder"}))):
        assert list(part.lenders(PRESETS["prefix_aware"])) == list(cluster.views.values()), "claimed or not"
    assert not cluster.everyone.lenders(PRESETS["round_robin"])


@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE])
def test_a_leg_goes_where_it_can_bring_and_is_told_from_whom(role: Role) -> None:
    bench = Bench(policy=PRESETS["prefix_aware"])
    for worker_id in ("holder", "idle"):
        bench.join(worker_id, role, token_bytes=KV, description=control_pb2.WorkerDescription())
        bench.load(worker_id, ms_per_prefill_token=1.0, ms_per_decode_step=20.0)
    bench.coordinator.cache_changed("holder", 1, whole=True, stored=HASHES, removed=())
    bench.load("holder", queued_prefill_tokens=4000, num_running=2)
    bench.submit(num_tokens=801, block_hashes={16: HASHES})
    (leg,) = [action for action in bench.actions if isinstance(action, SendLeg)]
    assert leg.worker_id == "idle"
    assert leg.prefix_source is not None
    assert leg.prefix_source.worker_id == "holder"


def test_brings_that_were_cancelled_are_no_lending_any_more() -> None:
    bench = Bench(policy=PRESETS["prefix_aware"])
    for worker_id in ("holder", "idle"):
        bench.join(worker_id, Role.MIXED, num_blocks=6400, token_bytes=KV, description=control_pb2.WorkerDescription())
        bench.load(worker_id, ms_per_prefill_token=1.0, ms_per_decode_step=20.0, blocks_free=6400)
    bench.coordinator.cache_changed("holder", 1, whole=True, stored=HASHES, removed=())
    bench.load("holder", queued_prefill_tokens=4000, num_running=2)
    for number in range(2 * MOST_AT_ONCE):
        bench.submit(f"r{number}", num_tokens=801, block_hashes={16: HASHES})
    sources = [action.prefix_source for action in bench.actions if isinstance(action, SendLeg)]
    assert None in sources, "the holder lends to as many as it may"
    for number in range(2 * MOST_AT_ONCE):
        bench.cancel(f"r{number}")
    bench.actions.clear()
    bench.load("idle", ms_per_prefill_token=1.0, ms_per_decode_step=20.0, blocks_free=6400)
    bench.submit("later", num_tokens=801, block_hashes={16: HASHES})
    (leg,) = [action for action in bench.actions if isinstance(action, SendLeg)]
    assert leg.worker_id == "idle"
    assert leg.prefix_source is not None
