"""Tests that a deadline is judged by the ways that --split leaves open to a prompt."""

from __future__ import annotations

import pytest

from services.core.errors import Overloaded
from services.router.policy import Ahead, Costs, Load, Role, Split, Work, WorkerView
from tests.support.router_bench import Bench
from tests.support.worker_views import decode, mixed, prefill

ALWAYS, AUTO, NEVER = Split.ALWAYS, Split.AUTO, Split.NEVER


def load(queued: int = 0, token_ms: float = 1.0, **changes: float) -> Load:
    return Load(
        1,
        blocks_free=64,
        queued_prefill_tokens=queued,
        ms_per_prefill_token=token_ms,
        ms_per_decode_step=10.0,
        **changes,  # type: ignore[arg-type]
    )


BUSY, SLOW = prefill(load=load(300)), decode(load=load(token_ms=3.0))
# (workers, tokens ahead, milliseconds until the prompt of 100 tokens begins and that it takes, for each way)
WAYS: dict[str, tuple[list[WorkerView], int, dict[Split, tuple[float, float] | None]]] = {
    "a queue that can be gone round": (
        [BUSY, decode(load=load())],
        0,
        {ALWAYS: (300, 100), AUTO: (0, 100), NEVER: (0, 100)},
    ),
    "each bound is that of the worker which is best in it": (
        [BUSY, SLOW],
        0,
        {ALWAYS: (300, 100), AUTO: (0, 100), NEVER: (0, 300)},
    ),
    "what is ahead may go round it too": (
        [BUSY, decode(load=load())],
        500,
        {ALWAYS: (800, 100), AUTO: (400, 100), NEVER: (500, 100)},
    ),
    "a queue at the decode worker": (
        [prefill(load=load()), decode(load=load(300))],
        0,
        {ALWAYS: (0, 100), AUTO: (0, 100), NEVER: (300, 100)},
    ),
    "a decode worker that has measured no prompt": (
        [BUSY, decode(load=load(token_ms=0.0))],
        0,
        {ALWAYS: (300, 100), AUTO: (300, 100), NEVER: None},
    ),
    "no prefill worker": (
        [decode(load=load(300))],
        0,
        {ALWAYS: (300, 100), AUTO: (300, 100), NEVER: (300, 100)},
    ),
    "no decode worker": ([BUSY], 0, {ALWAYS: (300, 100), AUTO: (300, 100), NEVER: (300, 100)}),
    "a mixed worker": (
        [BUSY, mixed(load=load(50))],
        0,
        {ALWAYS: (50, 100), AUTO: (50, 100), NEVER: (50, 100)},
    ),
}


@pytest.mark.parametrize("split", Split, ids=lambda split: split.value)
@pytest.mark.parametrize("case", WAYS)
def test_the_earliest_times_are_those_of_the_open_ways(case: str, split: Split) -> None:
    workers, ahead, expected = WAYS[case]
    found = Costs.of(workers, split).forecast(Work(100, 1, 1), Ahead(ahead), overtakes=False)
    if (times := expected[split]) is None:
        assert found is None
    else:
        assert found is not None
        assert (found.wait_s * 1000, found.run_s * 1000) == pytest.approx(times)


def test_where_nothing_is_split_streams_are_expected_to_wait_for_prompts() -> None:
    """Of seven streams of 11 tokens one ends each 11/8 steps, and a prompt of 100 ms takes its place."""
    workers = [prefill(load=load()), decode(load=load(num_running=7), max_num_seqs=16)]
    work, ahead = Work(100, 1, 11), Ahead(tokens_left=(5.0,))
    expected = {split: Costs.of(workers, split).forecast(work, ahead, overtakes=False) for split in Split}
    times = {split: found.expected_s * 1000 for split, found in expected.items() if found is not None}
    assert times[ALWAYS] == times[AUTO] == pytest.approx(100 + 10 * 10)
    assert times[NEVER] == pytest.approx(100 + 10 * (10 + 8 / 11 * 100))


@pytest.mark.parametrize("split", Split, ids=lambda split: split.value)
def test_what_can_be_met_unsplit_is_not_refused(split: Split) -> None:
    bench = Bench(split=split)
    for worker_id, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        bench.join(worker_id, role)
        bench.load(worker_id, ms_per_prefill_token=1.0, ms_per_decode_step=10.0)
    bench.load("p", queued_prefill_tokens=8000, num_waiting=1)
    if split is ALWAYS:
        with pytest.raises(Overloaded):
            bench.submit(num_tokens=100, deadline_s=bench.now + 1.0)
    else:
        bench.submit(num_tokens=100, deadline_s=bench.now + 1.0)
        assert bench.take_leg(Role.DECODE).handoff is None


def test_never_is_refused_for_the_queue_of_the_decode_workers() -> None:
    bench = Bench(split=NEVER)
    for worker_id, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        bench.join(worker_id, role)
        bench.load(worker_id, ms_per_prefill_token=1.0, ms_per_decode_step=10.0)
    bench.load("d", queued_prefill_tokens=8000, num_waiting=1)
    with pytest.raises(Overloaded):
        bench.submit(num_tokens=100, deadline_s=bench.now + 1.0)
