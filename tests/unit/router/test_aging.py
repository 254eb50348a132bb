"""Tests that no steady load keeps a request waiting beyond a bound: in the queue, as a handoff, and at its worker."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest

from services.router.coordinator.events import DecodeRefused, FinishReason
from services.router.coordinator.queue import Queue
from services.router.coordinator.request import Phase
from services.router.policy import Role
from tests.support.router_bench import BUSY, Bench, started, tokens

AGING_S = 10.0
EVERY = 4
"""Of so many starts, one is that of the request that has waited longest."""


@pytest.fixture
def bench() -> Bench:
    """Has one worker with room for one sequence at a time."""
    bench = Bench(aging_s=AGING_S, turn_every=EVERY)
    bench.join("m", Role.DECODE, max_num_seqs=1)
    return bench


class Stream:
    """Keeps the worker's one place taken, and a request of high priority in the queue."""

    def __init__(self, bench: Bench, priority: int) -> None:
        self.bench = bench
        self.priority = priority
        self.num = 0
        for _ in range(2):
            self.more()

    def more(self) -> None:
        self.num += 1
        self.bench.submit(f"high{self.num}", priority=self.priority)

    def serve(self, seconds: float) -> str:
        """Ends what runs, after so long. Returns the request that is started then; one more has come meanwhile."""
        command = self.bench.take_leg(Role.DECODE)
        self.more()
        self.bench.load("m", num_running=1, blocks_active=2, blocks_free=62)
        self.bench.wait(seconds)
        self.bench.say("m", tokens(command, 1, finish=FinishReason.STOP))
        self.bench.load("m", num_running=0, blocks_active=0, blocks_free=64)
        [following] = [sent for sent in self.bench.actions if hasattr(sent, "phase")]
        return str(following.spec.request_id)


def test_a_steady_stream_of_high_priority_delays_a_low_one_only_so_long(bench: Bench) -> None:
    stream = Stream(bench, priority=100)
    bench.submit("low", priority=-100)
    began_s = bench.now
    while stream.serve(0.5) != "low":
        assert bench.now - began_s < 60.0, "it starves"
    assert AGING_S <= bench.now - began_s <= AGING_S + EVERY * 0.5


def test_it_goes_first_no_sooner(bench: Bench) -> None:
    stream = Stream(bench, priority=1)
    bench.submit("low")
    assert all(stream.serve(0.5) != "low" for _ in range(int(AGING_S / 0.5) - 1))


def test_many_that_have_waited_long_take_one_start_in_four(bench: Bench) -> None:
    """A flood of low priority that has waited long does not go before high priorities: both are served."""
    stream = Stream(bench, priority=1)
    for number in range(40):
        bench.submit(f"low{number:02}")
    bench.wait(AGING_S)
    started = [stream.serve(0.01) for _ in range(5 * EVERY)]
    low = [request_id for request_id in started if request_id.startswith("low")]
    assert low == [f"low{number:02}" for number in range(5)], "the longest wait first"
    gaps = [at for at, request_id in enumerate(started) if request_id.startswith("low")]
    assert {later - earlier for earlier, later in itertools.pairwise(gaps)} == {EVERY}


def test_turns_go_round_the_priorities(bench: Bench) -> None:
    """Several priorities have waited long, the higher for longer: the lowest is not behind all of them."""
    stream = Stream(bench, priority=3)
    for priority in (2, 1, 0):
        for number in range(10):
            bench.submit(f"{priority}-{number}", priority=priority)
    bench.wait(AGING_S)
    started = [stream.serve(0.01) for _ in range(8 * EVERY)]
    for priority in range(3):
        served = [request_id for request_id in started if request_id.startswith(f"{priority}-")]
        assert len(served) >= 2
        assert served == [f"{priority}-{number}" for number in range(len(served))]


def test_what_waits_costs_a_walk_over_it_and_not_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at a full queue of which nothing has waited long, and of which all has, when a turn is due."""
    stream = Stream(bench, priority=1)
    for number in range(300):
        bench.submit(f"r{number}")
    for seconds in (0.01, AGING_S):
        for _ in range(EVERY):
            stream.serve(seconds)
        looked_at = mock.create_autospec(Queue.has_waited_long, side_effect=Queue.has_waited_long)
        monkeypatch.setattr(Queue, "has_waited_long", looked_at)
        bench.place()
        assert looked_at.call_count <= 310
        monkeypatch.undo()


def test_one_that_nobody_can_serve_does_not_take_the_turn() -> None:
    bench = Bench(aging_s=AGING_S, turn_every=EVERY, model_context_tokens=2048)
    bench.join("m", Role.DECODE, max_num_seqs=1)
    bench.join("large", Role.DECODE, max_model_len=2048, num_blocks=128)
    bench.load("large", **BUSY)
    stream = Stream(bench, priority=1)
    bench.submit("stranded", num_tokens=1020, max_tokens=100)
    bench.lose("large")
    bench.submit("low")
    bench.wait(AGING_S)
    assert "low" in [stream.serve(0.01) for _ in range(EVERY)]


def test_a_handoff_that_has_waited_long_goes_before_higher_priorities() -> None:
    """Lets two handoffs wait for a worker that refuses both: it is asked for the higher priority first, until the other
    has waited long."""
    bench = Bench(aging_s=AGING_S)
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.submit("low")
    bench.submit("high", priority=1)
    low, high = bench.take_legs(Role.PREFILL)
    bench.load("d", **BUSY)
    bench.say("p", started(low))
    bench.wait(0.1)
    bench.say("p", started(high))
    first_asked: list[tuple[float, str]] = []
    began_s = bench.now
    while bench.now - began_s < AGING_S + 2.0:
        bench.wait(0.5)
        bench.load("d", **BUSY)
        if asked := bench.take_legs(Role.DECODE):
            first_asked.append((bench.now - began_s, asked[0].spec.request_id))
        for command in asked:
            bench.say("d", DecodeRefused(command.leg))
    assert {request_id for at_s, request_id in first_asked if 2.0 < at_s < AGING_S - 0.5} == {"high"}
    assert {request_id for at_s, request_id in first_asked if at_s > AGING_S} == {"low"}


def test_a_prompt_that_waits_at_its_worker_is_overtaken_only_so_often() -> None:
    """A worker begins higher priorities first. Where one of its prompts has waited long, it is sent only so many
    more of them until it has begun that prompt."""
    bench = Bench(aging_s=AGING_S, turn_every=EVERY)
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.submit("low", priority=-1)
    low = bench.take_leg(Role.PREFILL)
    bench.beat("p", AGING_S)
    for number in range(2 * EVERY):
        bench.submit(f"high{number}", priority=1)
    bench.submit("equal", priority=-1)
    sent = [command.spec.request_id for command in bench.take_legs(Role.PREFILL)]
    assert sent == [*(f"high{number}" for number in range(EVERY - 1)), "equal"]
    bench.say("p", started(low))
    assert len(bench.take_legs(Role.PREFILL)) == EVERY + 1
    assert not bench.coordinator.phases()[Phase.QUEUED]


def test_others_are_sent_where_no_prompt_is_overtaken() -> None:
    bench = Bench(aging_s=AGING_S, turn_every=EVERY)
    for worker_id, role in (("p1", Role.PREFILL), ("p2", Role.PREFILL), ("d", Role.DECODE)):
        bench.join(worker_id, role)
    bench.submit("low", priority=-1)
    where = bench.take_leg(Role.PREFILL).worker_id
    bench.wait(AGING_S)
    bench.load("p1")
    bench.load("p2")
    for number in range(20):
        bench.submit(f"high{number}", priority=1)
    sent = [command.worker_id for command in bench.take_legs(Role.PREFILL)]
    assert len(sent) == 20
    assert sent.count(where) == EVERY - 1


def test_what_is_sent_after_its_equals_overtakes_none_of_them() -> None:
    bench = Bench(aging_s=AGING_S, turn_every=EVERY)
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.submit("low")
    bench.beat("p", AGING_S)
    names = [f"equal{number}" for number in range(EVERY)]
    for name in names:
        bench.submit(name)
    bench.submit("high", priority=1)
    sent = [command.spec.request_id for command in bench.take_legs(Role.PREFILL)]
    assert sent == ["low", *names, "high"]
