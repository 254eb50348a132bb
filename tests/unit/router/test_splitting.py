"""Tests the decision whether a prompt runs apart from its decode: the reasons not to, and what it costs not to know."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from services.router.policy import (
    HandoffTime,
    Job,
    KnownCache,
    Load,
    SplitCosts,
    WhyUnsplit,
    WorkerView,
    break_even,
    split_costs,
)
from services.router.policy.handoff_time import MEMORY_S, MIN_HANDOFFS
from services.router.policy.splitting import TPOT_WEIGHT
from tests.support.worker_views import decode, prefill

MEASURED = Load(1, blocks_free=64, ms_per_prefill_token=0.5, ms_per_decode_step=20.0, ms_per_decode_sequence=1.0)
SOURCE = prefill(load=MEASURED)
TARGET = decode(load=MEASURED)
OUTPUT = 200.0
"""Tokens of an output: with 20 ms for each ms of TPOT, what a stream waits counts a tenth."""
HASHES = tuple(range(1, 63))


def job(num_tokens: int) -> Job:
    return Job(num_tokens=num_tokens, total_tokens=num_tokens + 8, block_hashes={16: HASHES[: num_tokens // 16]})


def decoding(number: int, **load: float) -> WorkerView:
    return decode(load=replace(MEASURED, num_running=number, **load))  # type: ignore[arg-type]


def costs(num_tokens: int, source: WorkerView, target: WorkerView, handoff_ms: float | None) -> SplitCosts:
    found = split_costs(job(num_tokens), source, target, handoff_ms, OUTPUT)
    assert found is not None
    return found


def test_a_short_prompt_is_not_worth_a_handoff() -> None:
    short, long = (costs(num_tokens, SOURCE, decoding(2), 10.0) for num_tokens in (1, 200))
    assert not short.splits
    assert short.why_unsplit is WhyUnsplit.HANDOFF
    assert long.splits


def test_a_slow_pair_hands_nothing_over_that_delays_others_less() -> None:
    assert costs(200, SOURCE, decoding(2), 10.0).splits
    slow = costs(200, SOURCE, decoding(2), 1000.0)
    assert not slow.splits
    assert slow.why_unsplit is WhyUnsplit.HANDOFF


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    cache = KnownCache(64, 0.0)
    cache.tell(whole=True, stored=HASHES, removed=())
    holder = replace(decoding(2), cache=cache)
    found = costs(900, SOURCE, holder, 10.0)
    assert found.unsplit_prefill_ms == pytest.approx((900 - 56 * 16) * 0.5)
    assert not found.splits
    assert found.why_unsplit is WhyUnsplit.PREFIX
    assert costs(900, SOURCE, decoding(2), 10.0).splits
    assert costs(900, replace(SOURCE, cache=cache), holder, None).splits, "the prefill worker has it too"


def test_the_last_token_of_a_cached_prompt_is_computed_all_the_same() -> None:
    cache = KnownCache(64, 0.0)
    cache.tell(whole=True, stored=HASHES, removed=())
    assert costs(32, SOURCE, replace(TARGET, cache=cache), None).unsplit_prefill_ms == pytest.approx(16 * 0.5)


def test_a_prompt_passes_a_queue_if_it_delays_others_less() -> None:
    waiting = prefill(load=replace(MEASURED, queued_prefill_tokens=2000))
    few, many = decoding(2), decoding(int(1000 / (100 * TPOT_WEIGHT / OUTPUT)))
    assert not costs(200, waiting, few, None).splits
    assert costs(200, waiting, few, None).why_unsplit is WhyUnsplit.QUEUE
    assert costs(200, waiting, many, None).splits, "too many would wait"
    assert costs(200, waiting, decoding(2, queued_prefill_tokens=2000), None).splits, "prompts wait there as well"


def test_streams_of_few_tokens_are_delayed_less_readily() -> None:
    waiting = prefill(load=replace(MEASURED, queued_prefill_tokens=300))
    shown = {
        output_tokens: split_costs(job(200), waiting, decoding(4), None, output_tokens)
        for output_tokens in (1, 20, 200)
    }
    assert [each is not None and each.splits for each in shown.values()] == [True, True, False]


def test_a_faster_decode_worker_takes_prompts_at_rest() -> None:
    fast = decode(load=replace(MEASURED, ms_per_prefill_token=0.1))
    assert costs(200, SOURCE, fast, None).why_unsplit is WhyUnsplit.SPEED
    assert not costs(200, SOURCE, fast, None).splits


def test_an_idle_decode_worker_is_not_given_all_prompts() -> None:
    """Counts the sequence that comes next, which would wait for a long one."""
    assert costs(10, SOURCE, TARGET, 10.0).splits is False
    assert costs(900, SOURCE, TARGET, 10.0).splits


@pytest.mark.parametrize(("source", "target"), [(prefill(), TARGET), (SOURCE, decode()), (prefill(), decode())])
def test_without_measured_costs_nothing_is_said(source: WorkerView, target: WorkerView) -> None:
    assert split_costs(job(1), source, target, 10.0, OUTPUT) is None
    assert break_even(source, target, lambda _: 10.0, OUTPUT) is None


def test_what_is_not_known_of_a_pair_counts_for_splitting() -> None:
    assert costs(1, SOURCE, TARGET, None).splits


@pytest.mark.parametrize("handoff_ms", [None, 5.0, 50.0])
@pytest.mark.parametrize("queued", [0, 300])
@pytest.mark.parametrize("number", [0, 3, 7])
def test_the_break_even_is_where_the_decision_changes(handoff_ms: float | None, queued: int, number: int) -> None:
    source, target = prefill(load=replace(MEASURED, queued_prefill_tokens=queued)), decoding(number)
    found = break_even(source, target, lambda _: handoff_ms, OUTPUT)
    assert found is not None
    assert (found.prefill_id, found.decode_id, found.handoff_ms) == ("p", "d", handoff_ms)
    at = math.ceil(found.tokens)
    assert costs(at + 1, source, target, handoff_ms).splits
    assert at <= 2 or not costs(at - 2, source, target, handoff_ms).splits


def test_splitting_may_pay_for_no_prompt() -> None:
    fast = decode(load=replace(MEASURED, ms_per_prefill_token=0.01))
    found = break_even(SOURCE, fast, lambda _: 5.0, OUTPUT)
    assert found is not None
    assert math.isinf(found.tokens)


def test_a_pairs_average_is_trusted_after_some_handoffs_and_for_a_while() -> None:
    time, now = HandoffTime(), 100.0
    for _ in range(MIN_HANDOFFS - 1):
        time.observe(10.0, now)
    assert time.average_ms(now) is None
    time.observe(30.0, now)
    assert time.average_ms(now) == pytest.approx(11.0)
    for _ in range(200):
        time.observe(50.0, now)
    assert time.average_ms(now) == pytest.approx(50.0, rel=0.01), "it follows the newest"
    assert time.average_ms(now + MEMORY_S + 1) is None
    time.observe(10.0, now + MEMORY_S + 1)
    assert time.average_ms(now + MEMORY_S + 1) == pytest.approx(30.0, rel=0.01), "one more tells as much as all before"


def small_steps(worker: WorkerView, tokens: float, ms: float) -> WorkerView:
    return replace(worker, load=replace(worker.load, tokens_per_prefill_step=tokens, ms_per_prefill_token=ms))


def test_costs_of_steps_of_other_sizes_are_not_compared() -> None:
    """A step costs 20 ms and 0.1 for each token: 0.76 of prompts of 30, and 0.11 of those of 2000."""
    short, long = small_steps(SOURCE, 30, 0.76), small_steps(decoding(30), 2000, 0.11)
    assert costs(4000, short, long, 5.0).splits, "both compute as quickly"
    found = costs(4000, small_steps(SOURCE, 2000, 0.11), small_steps(decoding(2), 30, 0.76), 5.0)
    assert (found.prefill_ms, found.unsplit_prefill_ms) == pytest.approx((440.0, 440.0))
    alike = costs(4000, small_steps(SOURCE, 1000, 0.5), small_steps(decoding(2), 2000, 0.11), 5.0)
    assert (alike.prefill_ms, alike.unsplit_prefill_ms) == pytest.approx((2000.0, 440.0)), "a factor of 2 is compared"
    other = replace(long, hardware="another")
    assert split_costs(job(4000), short, other, 5.0, OUTPUT) is None
    assert break_even(short, other, lambda _: 5.0, OUTPUT) is None


def test_one_prompt_in_a_minute_finds_out_what_a_slow_pair_takes_now() -> None:
    time = HandoffTime()
    for _ in range(MIN_HANDOFFS):
        time.observe(5000.0, 0.0)
    assert time.average_ms(MEMORY_S) == pytest.approx(5000.0)
    now = MEMORY_S + 1.0
    assert time.average_ms(now) is None
    time.tried(now)
    assert time.average_ms(now) == pytest.approx(5000.0), "for all others"
    assert time.average_ms(now + MEMORY_S + 1.0) is None, "nothing came back: it is tried again"
    time.observe(1000.0, now + 2.0)
    assert time.average_ms(now + 2.0) == pytest.approx(3000.0), "what it takes now counts as a half"
