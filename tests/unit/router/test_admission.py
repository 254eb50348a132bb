"""Tests who is refused, when, and with what: deadlines that cannot be met, and full queues."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest

from services.core.errors import BatonError, DeadlineExceeded, Overloaded
from services.router.coordinator.events import ExpectedRequest, FinishReason
from services.router.coordinator.request import Phase
from services.router.policy import Ahead, Costs, Load, Role, Work, WorkerView
from tests.support.router_bench import Bench, tokens
from tests.support.worker_views import decode, mixed, prefill


def costs(queued: int = 0, *, token_ms: float = 1.0, step_ms: float = 10.0, hit: int = 0) -> Load:
    return Load(
        1,
        blocks_active=1 if queued else 0,
        blocks_free=63 if queued else 64,
        queued_prefill_tokens=queued,
        ms_per_prefill_token=token_ms,
        ms_per_decode_step=step_ms,
        prefix_tokens_queried=100,
        prefix_tokens_hit=hit,
    )


# (workers, prompt, output, ahead, overtakes) -> (wait, run), milliseconds
FORECASTS: dict[str, tuple[Any, ...]] = {
    "idle": ([prefill(load=costs()), decode(load=costs())], 100, 1, 0, False, (0, 100)),
    "output tokens after the first": ([prefill(load=costs()), decode(load=costs())], 100, 11, 0, False, (0, 200)),
    "behind a queue": ([prefill(load=costs(300)), decode(load=costs())], 100, 1, 0, False, (300, 100)),
    "before it": ([prefill(load=costs(300)), decode(load=costs())], 100, 1, 50, True, (50, 100)),
    "the freest counts": ([prefill("p", load=costs(300)), prefill("q", load=costs())], 100, 1, 0, False, (0, 100)),
    "work ahead goes there first": (
        [prefill("p", load=costs(300)), prefill("q", load=costs())],
        100,
        1,
        200,
        False,
        (200, 100),
    ),
    "and then to both": ([prefill("p", load=costs(300)), prefill("q", load=costs())], 100, 1, 500, False, (400, 100)),
    "the fastest counts": (
        [prefill("p", load=costs()), prefill("q", load=costs(token_ms=0.5))],
        100,
        1,
        300,
        False,
        (100, 50),
    ),
    "caches save work": ([prefill(load=costs(300, hit=50)), decode(load=costs())], 100, 1, 0, False, (150, 50)),
    "mixed": ([mixed(load=costs(300))], 100, 3, 0, False, (300, 120)),
    "decode workers are no help": ([prefill(load=costs(300)), decode(load=costs())], 100, 1, 0, False, (300, 100)),
    "unless the prompt fits no other": (
        [prefill(load=costs(300), max_model_len=50), decode(load=costs())],
        100,
        1,
        0,
        False,
        (0, 100),
    ),
    "unknown": ([prefill("p", load=costs()), prefill("q", load=costs(token_ms=0))], 100, 1, 0, False, None),
    "nobody": ([prefill(ready=False, load=costs())], 100, 1, 0, False, None),
}


@pytest.mark.parametrize("case", FORECASTS)
def test_forecast(case: str) -> None:
    workers, num_tokens, num_output, ahead, overtakes, expected = FORECASTS[case]
    found = Costs.of(workers).forecast(Work(num_tokens, num_output, num_output), Ahead(ahead), overtakes=overtakes)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.wait_s * 1000, found.run_s * 1000) == pytest.approx(expected)


BUSY = replace(costs(), num_running=7, ms_per_decode_sequence=2.0)
# (workers, sequences ahead) -> milliseconds for a prompt of 100 and an output of 11
EXPECTED: dict[str, tuple[list[WorkerView], int, float]] = {
    "alone": ([prefill(load=costs()), decode(load=costs())], 0, 100 + 10 * 10),
    "among seven": ([prefill(load=costs()), decode(load=BUSY)], 0, 100 + 10 * 24),
    "and three on their way": ([prefill(load=costs()), decode(load=BUSY, max_num_seqs=16)], 3, 100 + 10 * 30),
    "they spread": (
        [prefill(load=costs()), decode("d", load=BUSY, max_num_seqs=16), decode("e", load=BUSY, max_num_seqs=16)],
        6,
        100 + 10 * 30,
    ),
    "where it is over first": ([prefill(load=costs()), decode("d", load=BUSY), decode("e", load=costs())], 0, 200),
    "more than fit in a step": ([prefill(load=costs()), decode(load=BUSY, max_num_seqs=4)], 0, 100 + (10 + 11) * 16),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_expected_time(case: str) -> None:
    workers, sequences, expected_ms = EXPECTED[case]
    found = Costs.of(workers).forecast(
        Work(100, 1, 11), Ahead(0, sequences, sequences * 100, sequences * 11), overtakes=False
    )
    assert found is not None
    assert found.expected_s * 1000 == pytest.approx(expected_ms)
    assert found.run_s * 1000 == pytest.approx(100), "what is certain stays a bound"
    assert found.alone_s * 1000 == pytest.approx(200)


@pytest.mark.parametrize("pool_blocks", [64, 100, 400])
def test_a_long_request_waits_for_those_before_it_as_they_are(pool_blocks: int) -> None:
    """It is expected to end about when a cluster whose queue is played step by step ends it."""
    long, short, num_ahead = Work(500, 1, 100), Work(20, 1, 10), 200
    worker = decode(load=replace(costs(), blocks_free=pool_blocks), max_num_seqs=512)
    ahead = Ahead(0, num_ahead, num_ahead * short.num_tokens, num_ahead * short.output_tokens)
    found = Costs.of([prefill(load=replace(costs(), ms_per_prefill_token=0.001)), worker]).forecast(
        long, ahead, overtakes=False
    )
    steps = _steps_until_the_last_ends([short] * num_ahead + [long], pool_blocks, worker.block_size)
    assert found is not None
    assert steps * 10 / 2 <= found.expected_s * 1000 <= steps * 10 * 2


def _steps_until_the_last_ends(line: list[Work], pool_blocks: int, block_size: int) -> int:
    """Returns the steps of a worker that takes the line in order, as each fits, and keeps its blocks until its end."""
    running: list[tuple[int, int]] = []
    step = 0
    while line or running:
        running = [(end, blocks) for end, blocks in running if end > step]
        while line:
            blocks = math.ceil((line[0].num_tokens + line[0].output_tokens) / block_size)
            if sum(taken for _, taken in running) + blocks > pool_blocks:
                break
            running.append((step + int(line.pop(0).output_tokens), blocks))
        step = min((end for end, _ in running), default=step)
    return step


@pytest.fixture
def bench() -> Bench:
    """A millisecond a prompt token, ten a step; deadlines are refused at twice of what is left."""
    bench = Bench(max_queue=3)
    for worker_id, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        bench.join(worker_id, role)
        bench.load(worker_id, ms_per_prefill_token=1.0, ms_per_decode_step=10.0)
    return bench


def fill(bench: Bench, queued_tokens: int) -> None:
    """Nothing more is placed."""
    bench.load("p", queued_prefill_tokens=queued_tokens, blocks_free=0, blocks_active=64)
    bench.load("d", blocks_free=0, blocks_active=64)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"num_tokens": 500, "deadline_s": 0.26}, None),
        ({"num_tokens": 500, "deadline_s": 0.24}, DeadlineExceeded),
        ({"num_tokens": 10, "max_tokens": 50, "min_tokens": 50, "deadline_s": 0.24}, DeadlineExceeded),
        ({"num_tokens": 10, "max_tokens": 50, "deadline_s": 0.24}, None),
        ({"num_tokens": 1000, "max_tokens": None, "min_tokens": 5000, "deadline_s": 0.7}, None),
        ({"num_tokens": 500}, None),
    ],
    ids=["just", "prompt too long", "output too long", "it may stop early", "the context ends it", "no deadline"],
)
def test_a_deadline_that_no_cluster_could_meet(bench: Bench, spec: dict[str, Any], error: type[BatonError]) -> None:
    if "deadline_s" in spec:
        spec = {**spec, "deadline_s": bench.now + spec["deadline_s"]}
    if error is None:
        bench.submit(**spec)
    else:
        with pytest.raises(error) as raised:
            bench.submit(**spec)
        assert raised.value.retry_after_s is None, "trying again would not help"
        bench.assert_idle()


def test_a_deadline_behind_too_much_work_is_refused_with_a_time_to_come_back(bench: Bench) -> None:
    fill(bench, 8000)
    with pytest.raises(Overloaded) as raised:
        bench.submit(deadline_s=bench.now + 7.9)
    assert raised.value.retry_after_s == pytest.approx(8.0)
    bench.submit("patient", deadline_s=bench.now + 8.1)
    bench.submit("urgent", priority=1, deadline_s=bench.now + 1.0)
    assert bench.coordinator.phases()[Phase.QUEUED] == 2


def test_work_queued_in_the_router_counts_too(bench: Bench) -> None:
    fill(bench, 0)
    for number in range(2):
        bench.submit(f"r{number}", num_tokens=900)
    with pytest.raises(Overloaded):
        bench.submit(deadline_s=bench.now + 0.8)
    bench.submit("urgent", priority=1, deadline_s=bench.now + 0.8)


def test_what_becomes_hopeless_in_the_queue_ends_there(bench: Bench) -> None:
    fill(bench, 1000)
    bench.submit(deadline_s=bench.now + 1.5)
    bench.wait(0.4)
    assert not bench.failed
    bench.wait(0.2)
    assert isinstance(bench.failed["r"], Overloaded), "0.9 s are left, and 1 s of work is before it"
    bench.assert_idle()


def complete(bench: Bench, num_tokens: int) -> None:
    """Completes a request that had so long an output."""
    _, command = bench.decoding("before", max_tokens=num_tokens)
    bench.say("d", tokens(command, *range(1, num_tokens), at=1, finish=FinishReason.LENGTH))
    assert "before" in bench.finished


def test_a_busy_cluster_takes_on_only_what_it_expects_to_finish_in_time(bench: Bench) -> None:
    complete(bench, 8)
    bench.load("d", ms_per_decode_step=10.0, ms_per_decode_sequence=20.0, num_running=5, blocks_active=5)
    with pytest.raises(Overloaded) as raised:
        bench.submit("late", deadline_s=bench.now + 0.7)  # 20 ms of prompt, 7 steps of 110 ms
    assert raised.value.retry_after_s
    bench.submit("short", max_tokens=4, deadline_s=bench.now + 0.7)
    bench.submit("patient", deadline_s=bench.now + 1.2)
    assert not bench.failed


def test_an_idle_cluster_tries_what_may_end_early(bench: Bench) -> None:
    complete(bench, 8)
    bench.load("d", ms_per_decode_step=100.0, ms_per_decode_sequence=20.0)
    bench.submit(deadline_s=bench.now + 0.5)
    assert not bench.failed


# A full queue


def test_a_higher_priority_takes_the_place_of_the_youngest_of_the_lowest(bench: Bench) -> None:
    """Whoever of lower priority has waited longest keeps its place."""
    fill(bench, 9000)
    for request_id, priority in (("old", 0), ("young", 0), ("high", 1)):
        bench.submit(request_id, priority=priority)
    with pytest.raises(Overloaded) as raised:
        bench.submit("equal", priority=0)
    assert raised.value.retry_after_s
    bench.submit("higher", priority=1)
    assert isinstance(bench.failed["young"], Overloaded)
    assert bench.failed["young"].retry_after_s
    bench.submit("highest", priority=2)
    assert set(bench.failed) == {"young", "higher"}
    with pytest.raises(Overloaded):
        bench.submit("late", priority=1)


def test_a_request_that_has_begun_keeps_its_place(bench: Bench) -> None:
    _, decode_command = bench.decoding("begun")
    bench.lose("d")
    bench.take_legs(Role.PREFILL)
    bench.lose("p")
    assert bench.phase() is Phase.QUEUED
    bench.submit("a", priority=1)
    bench.submit("b", priority=1)
    bench.submit("c", priority=2)
    assert set(bench.failed) == {"b"}
    assert decode_command.spec.request_id not in bench.failed


def test_under_a_steady_stream_of_high_priority_the_low_class_keeps_a_place(bench: Bench) -> None:
    """Pushed out whenever the queue is full, a low priority would never wait long enough to have its turn."""
    fill(bench, 9000)
    for request_id in ("low", "lower"):
        bench.submit(request_id, priority=-1)
    for number in range(5):
        with contextlib.suppress(Overloaded):
            bench.submit(f"high{number}", priority=1)
    assert "low" not in bench.failed
    assert isinstance(bench.failed["lower"], Overloaded)


# Long expected outputs


KINDS = {"word": 10, "chat": 20, "essay": 40}
"""Tokens of prompts whose outputs are alike."""


def known(bench: Bench, **lengths: int) -> None:
    """Lets it be known how long the outputs to prompts of each kind are."""
    for kind, length in lengths.items():
        for _ in range(20):
            bench.serve(KINDS[kind], length)


def test_a_full_queue_sheds_the_longest_expected_output_of_the_lowest_priority(bench: Bench) -> None:
    known(bench, chat=200, essay=800)
    fill(bench, 9000)
    for request_id, kind in (("a", "chat"), ("b", "essay"), ("c", "chat")):
        bench.submit(request_id, max_tokens=900, num_tokens=KINDS[kind])
    bench.submit("urgent", max_tokens=900, priority=1, num_tokens=KINDS["essay"])
    assert isinstance(bench.failed.pop("b"), Overloaded)
    assert not bench.failed


def test_a_shorter_output_takes_the_place_of_a_much_longer_one(bench: Bench) -> None:
    known(bench, word=10, chat=200, essay=800)
    fill(bench, 9000)
    for request_id, kind in (("a", "chat"), ("b", "essay"), ("c", "essay")):
        bench.submit(request_id, max_tokens=900, num_tokens=KINDS[kind])
    with pytest.raises(Overloaded, match="the queue is full"):
        bench.submit("long", max_tokens=900, num_tokens=KINDS["essay"])
    bench.submit("d", max_tokens=900, num_tokens=KINDS["chat"])
    assert bench.failed.keys() == {"c"}
    assert bench.failed["c"].retry_after_s
    with pytest.raises(Overloaded, match="the queue is full"):
        bench.submit("e", max_tokens=900, num_tokens=KINDS["chat"])  # of the longer ones, b has waited longest
    bench.submit("f", max_tokens=900, num_tokens=KINDS["word"])
    assert bench.failed.keys() == {"c", "b"}, "now a has"
    bench.submit("g", max_tokens=4, num_tokens=KINDS["chat"])
    assert bench.failed.keys() == {"c", "b", "d"}
    bench.submit("h", max_tokens=4, num_tokens=KINDS["chat"])
    assert bench.failed.keys() == {"c", "b", "d", "f"}
    with pytest.raises(Overloaded, match="the queue is full"):
        bench.submit("i", max_tokens=4, num_tokens=KINDS["chat"])


def test_what_was_pushed_out_has_never_started(bench: Bench) -> None:
    """A worker has the first, so it keeps its place though its output will be the longest."""
    known(bench, chat=20, essay=800)
    bench.submit("begun", max_tokens=900, num_tokens=KINDS["essay"])
    bench.take_leg(Role.PREFILL)
    fill(bench, 9000)
    for number in range(6):
        with contextlib.suppress(Overloaded):
            bench.submit(f"r{number}", max_tokens=900, num_tokens=KINDS["chat" if number % 2 else "essay"])
    bench.submit("urgent", max_tokens=900, priority=1, num_tokens=KINDS["chat"])
    assert bench.failed
    assert "begun" not in bench.failed
    assert not bench.take_legs(Role.PREFILL)


# Prompts that are being tokenised


def arrival(**fields: Any) -> ExpectedRequest:
    return ExpectedRequest(**{"fewest_tokens": 10, "tokenise_s": 0.0, "max_tokens": 8, **fields})


def test_the_wait_for_the_tokenizer_counts_against_a_deadline(bench: Bench) -> None:
    deadline_s = bench.now + 1.0
    first = bench.coordinator.expect(arrival(tokenise_s=0.9, deadline_s=deadline_s), bench.now)
    with pytest.raises(Overloaded, match=r"1\.11 s with what is before it, 1\.00 s left") as refused:
        bench.coordinator.expect(arrival(tokenise_s=1.1, deadline_s=deadline_s), bench.now)
    assert refused.value.retry_after_s == pytest.approx(1.11, abs=0.02)
    with pytest.raises(DeadlineExceeded):  # however idle the cluster
        bench.coordinator.expect(arrival(fewest_tokens=900, deadline_s=bench.now + 0.4), bench.now)
    second = bench.coordinator.expect(arrival(tokenise_s=2.1), bench.now)
    bench.coordinator.arrived(first)
    bench.coordinator.arrived(second)
    bench.coordinator.check_idle()


def test_a_prompt_at_the_tokenizer_has_a_place_in_the_queue(bench: Bench) -> None:
    fill(bench, 0)
    for request_id in ("oldest", "queued"):
        bench.submit(request_id)
    bench.coordinator.expect(arrival(), bench.now)
    with pytest.raises(Overloaded, match="the queue is full"):
        bench.coordinator.expect(arrival(), bench.now)
    with pytest.raises(Overloaded, match="the queue is full"):
        bench.submit("late")
    urgent = bench.coordinator.expect(arrival(priority=1), bench.now)  # it may take the place of the queued one
    with pytest.raises(Overloaded, match="the queue is full"):
        bench.coordinator.expect(arrival(priority=1), bench.now)
    bench.coordinator.arrived(urgent)
    bench.submit("urgent", priority=1)
    assert bench.failed.keys() == {"queued"}


def test_no_worker_makes_the_context_longer_than_the_models() -> None:
    """One that lies would have prompts wait that no other worker can take, and be refused only when it is gone."""
    bench = Bench(model_context_tokens=512)
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE, max_model_len=256)
    assert bench.coordinator.context_tokens() == 256
    bench.join("liar", Role.DECODE, max_model_len=1 << 20, num_blocks=1 << 20)
    assert bench.coordinator.context_tokens() == 512
