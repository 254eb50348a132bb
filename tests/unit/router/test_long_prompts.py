"""Tests which prompts are long, which workers are kept from them, and what becomes of them meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.router.policy import (
    Cluster,
    HandoffsInFlight,
    Job,
    KnownCache,
    Load,
    PolicyConfig,
    Ranking,
    Role,
    WhyNot,
    WorkerView,
    nearest_start,
    place_prefill,
)
from services.router.policy.filter import LongPromptConfig, LongPrompts
from tests.support.router_bench import Bench
from tests.support.worker_views import decode, prefill

AUTO = LongPromptConfig(isolation="auto")
NOW = 1000.0
MEASURED = Load(1, blocks_free=64, ms_per_prefill_token=1.0)
BUSY = replace(MEASURED, blocks_free=60, blocks_active=4, num_running=1)
TRAFFIC = [10] * 27 + [190] * 3
"""Short prompts are 27 of 84 parts of the work, and the mean is 28."""


def prompts(lengths: list[int] = TRAFFIC, config: LongPromptConfig = AUTO, times: int = 2) -> LongPrompts:
    found = LongPrompts(config)
    for length in lengths * times:
        found.arrived(length)
    return found


def job(num_tokens: int, hashes: tuple[int, ...] = ()) -> Job:
    return Job(num_tokens, num_tokens + 8, block_hashes={16: hashes} if hashes else {})


def workers(number: int, load: Load = BUSY) -> list[WorkerView]:
    return [prefill(f"p{index}", load=load) for index in reversed(range(number))]


@pytest.mark.parametrize(
    ("number", "kept"), [(1, set()), (2, set()), (3, {"p0"}), (4, {"p0"}), (8, {"p0", "p1", "p2"})]
)
def test_workers_are_kept_by_the_work_of_short_prompts(number: int, kept: set[str]) -> None:
    """Keeps as many as leave at most a tenth more work than the mean to each of the others."""
    assert prompts().kept(job(190), workers(number), NOW) == kept


def test_a_prompt_is_long_beyond_twice_the_mean() -> None:
    found = prompts()
    assert not found.is_long(56)
    assert found.is_long(57)
    assert found.kept(job(56), workers(4), NOW) == set()


@pytest.mark.parametrize(
    ("lengths", "isolated"),
    [
        ([10], False),
        ([10, 11, 12, 13, 14], False),
        ([10] * 9 + [50], False),
        ([10] * 9 + [85], False),
        ([10] * 9 + [95], True),
        ([190], False),
    ],
)
def test_only_while_long_prompts_are_most_of_the_work(lengths: list[int], *, isolated: bool) -> None:
    assert bool(prompts(lengths, times=60).kept(job(1000), workers(4), NOW)) is isolated


def test_it_follows_the_newest_prompts() -> None:
    found = prompts(times=20)
    assert found.is_long(190)
    for _ in range(AUTO.window):
        found.arrived(190)
    assert not found.is_long(190)
    for length in TRAFFIC * 9:
        found.arrived(length)
    assert found.is_long(190)


def test_a_few_prompts_say_nothing_and_off_is_off() -> None:
    assert not prompts(times=1).is_long(1000)
    assert prompts(times=2).is_long(1000)
    assert not prompts(config=LongPromptConfig(), times=9).is_long(1000)


def test_a_kept_worker_is_lent_if_it_is_idle_and_nobody_needed_it_for_as_long_as_the_prompt_takes() -> None:
    found, idle = prompts(), workers(4, MEASURED)
    assert found.kept(job(2000), idle, NOW) == set(), "nobody has ever used it"
    found.started("p0", 10, NOW)
    assert found.kept(job(2000), idle, NOW + 1.9) == {"p0"}
    assert found.kept(job(2000), idle, NOW + 2.0) == set()
    assert found.kept(job(4000), idle, NOW + 2.0) == {"p0"}
    assert found.kept(job(2000), workers(4, BUSY), NOW + 100) == {"p0"}
    assert found.kept(job(2000), workers(4, replace(MEASURED, ms_per_prefill_token=0.0)), NOW + 100) == {"p0"}


def test_a_long_prompt_that_uses_it_shows_no_need() -> None:
    found = prompts()
    found.started("p0", 10, NOW)
    found.started("p0", 190, NOW + 5)
    assert found.kept(job(2000), workers(4, MEASURED), NOW + 6) == set()


# Prefix caches

HASHES = tuple(range(1, 13))
"""Of a prompt of 200 tokens."""


def knowing(view: WorkerView, hashes: tuple[int, ...]) -> WorkerView:
    cache = KnownCache(64, 0.0)
    cache.tell(whole=True, stored=hashes, removed=())
    return replace(view, cache=cache)


@pytest.mark.parametrize(("num_known", "kept"), [(0, {"p0"}), (8, {"p0"}), (9, set()), (12, set())])
def test_a_prompt_is_short_for_a_worker_that_has_most_of_it(num_known: int, kept: set[str]) -> None:
    """What a worker computes of a prompt of 200 tokens is short up to 56."""
    views = [knowing(view, HASHES[:num_known]) if view.worker_id == "p0" else view for view in workers(4)]
    assert prompts().kept(job(200, HASHES), views, NOW) == kept
    assert prompts().kept(job(200), views, NOW) == {"p0"}, "it was not hashed"


def test_what_other_workers_have_makes_it_no_shorter_for_a_kept_one() -> None:
    views = [knowing(view, HASHES) if view.worker_id != "p0" else view for view in workers(4)]
    assert prompts().kept(job(200, HASHES), views, NOW) == {"p0"}


def test_a_kept_worker_is_lent_for_as_long_as_it_computes_what_it_has_not() -> None:
    found, views = prompts(), [knowing(view, HASHES[:4]) for view in workers(4, MEASURED)]
    found.started("p0", 10, NOW)
    assert found.kept(job(200, HASHES), views, NOW + 0.135) == {"p0"}
    assert found.kept(job(200, HASHES), views, NOW + 0.137) == set()


# Placement

JOB = Job(num_tokens=64, total_tokens=128)
LONG = replace(JOB, kept_off=frozenset({"a"}))


def test_a_long_prompt_goes_elsewhere_or_waits() -> None:
    config, none = PolicyConfig(), HandoffsInFlight()
    views = [prefill("a"), prefill("b", busy=8), decode()]
    everyone = Cluster(views).everyone
    assert place_prefill(JOB, everyone, none, NOW, config) == "a"
    ranking = Ranking()
    assert place_prefill(LONG, everyone, none, NOW, config, ranking) == "b"
    assert ranking.left_out == {"a": WhyNot.KEPT}
    full = Cluster([prefill("a"), prefill("b", busy=64), decode()]).everyone
    assert place_prefill(LONG, full, none, NOW, config) is None
    nearest = nearest_start(LONG, full, config)
    assert nearest is not None
    assert (nearest.source_id, nearest.source_has_room) == ("b", False)


# The coordinator


def isolating_bench() -> Bench:
    """Returns three prefill workers, of which "p0" is kept; all have something to do."""
    bench = Bench(long_prompts=replace(AUTO, window=10_000))
    for index in range(3):
        bench.join(f"p{index}", Role.PREFILL, max_model_len=4096, num_blocks=256)
    bench.join("d", Role.DECODE, max_model_len=4096, num_blocks=4096)
    for index in range(3):
        bench.load(f"p{index}", num_running=1, blocks_active=1, blocks_free=255)
    bench.come_and_go(*([10] * 30 + [400]) * 60)
    return bench


def hashing_bench() -> Bench:
    bench = Bench(long_prompts=AUTO, policy=replace(PolicyConfig(), hash_prompts=True))
    for index in range(3):
        bench.join(f"p{index}", Role.PREFILL, max_model_len=4096, num_blocks=256)
        bench.load(f"p{index}", num_running=1, blocks_active=1, blocks_free=255)
    bench.join("d", Role.DECODE, max_model_len=4096, num_blocks=4096)
    return bench


@pytest.mark.parametrize("is_known", [False, True])
def test_the_work_of_a_prompt_is_what_no_cache_has_of_it(is_known: bool) -> None:
    """Counts prompts of 400 tokens, of which all but 16 stand in a cache, as those of 16: then long ones are not most
    of the work, and no worker is kept from one."""
    bench, hashes = hashing_bench(), tuple(range(1, 26))
    bench.coordinator.cache_changed("p1", 1, whole=True, stored=hashes[:24], removed=())
    bench.coordinator.cache_changed("d", 1, whole=True, stored=hashes, removed=())
    for _ in range(2):
        bench.come_and_go(*[10] * 30)
        bench.come_and_go(400, block_hashes={16: hashes} if is_known else {})
    for name in ("p1", "p2"):
        bench.load(name, blocks_active=256, blocks_free=0)
    bench.submit("long", num_tokens=400)
    assert where(bench) == ({"long": "p0"} if is_known else {})


def test_a_prompt_that_a_kept_worker_has_most_of_shows_that_it_is_needed() -> None:
    bench, hashes = hashing_bench(), tuple(range(1, 26))
    bench.coordinator.cache_changed("p0", 1, whole=True, stored=hashes[:24], removed=())
    bench.come_and_go(*([10] * 30 + [400]) * 2)
    for name in ("p1", "p2"):
        bench.load(name, blocks_active=256, blocks_free=0)
    bench.submit("long", num_tokens=400)
    assert where(bench) == {}
    bench.submit("known", num_tokens=400, block_hashes={16: hashes})
    assert where(bench) == {"known": "p0"}
    bench.cancel("known")
    bench.load("p0", num_running=0, blocks_active=0, blocks_free=256, ms_per_prefill_token=1.0)
    bench.wait(0.3)
    assert where(bench) == {}, "it is idle, and was needed within the 400 ms that the long one would take"
    bench.wait(0.2)
    assert where(bench) == {"long": "p0"}


def where(bench: Bench) -> dict[str, str]:
    return {leg.spec.request_id: leg.worker_id for leg in bench.take_legs(Role.PREFILL)}


def test_long_prompts_wait_for_the_others_and_short_ones_do_not_wait_behind_them() -> None:
    bench = isolating_bench()
    for name in ("p1", "p2"):
        bench.load(name, blocks_active=256, blocks_free=0)
    for index in range(40):
        bench.submit(f"long {index}", num_tokens=400)
    bench.submit("short", num_tokens=10)
    assert where(bench) == {"short": "p0"}
    waits = [bench.coordinator.wait_of(f"long {index}") for index in range(40)]
    num_tried = sum(wait is not None and wait[1] is not None for wait in waits)
    assert num_tried == bench.coordinator.config.max_overtaken + 1, (
        "a place is not looked for as often as they are many"
    )
    bench.beat("d", 2.0)
    bench.submit("after the long ones are aged", num_tokens=10)
    assert where(bench) == {"after the long ones are aged": "p0"}
    bench.load("p2", blocks_active=1, blocks_free=255)
    assert set(where(bench).values()) == {"p2"}


def test_a_long_prompt_that_has_waited_long_goes_anywhere() -> None:
    bench = isolating_bench()
    for name in ("p1", "p2"):
        bench.load(name, blocks_active=256, blocks_free=0)
    bench.submit("long", num_tokens=400)
    for _ in range(18):
        bench.beat("d", 0.5)
        for name in ("p0", "p1", "p2"):
            bench.load(name)
    assert where(bench) == {}
    for _ in range(4):
        bench.beat("d", 0.5)
        for name in ("p0", "p1", "p2"):
            bench.load(name)
    assert where(bench) == {"long": "p0"}
