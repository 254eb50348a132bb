"""Tests deadlines over costs that a worker has learned from the steps that it really had: canaries in an idle time,
a step that was held up, a prompt that was cancelled. Nothing is refused that could be served."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.core.errors import DeadlineExceeded, Overloaded
from services.engine.cost_model import CostModel
from services.router.coordinator.events import CancelLeg, DecodeAdmitted, PromptComputed
from services.router.policy import Role
from tests.support.router_bench import Bench, started

CANARY_TOKENS, STEP_TOKENS = 17, 512
FIXED_MS, TOKEN_MS, DECODE_MS = 20.0, 0.9, 12.0
LONG = 7000
CONTEXT = 16384


def prefill_ms(num_tokens: int) -> float:
    """Returns what a step takes."""
    return FIXED_MS + TOKEN_MS * num_tokens


def prompt_s(num_tokens: int) -> float:
    """Returns what a prompt takes, in steps."""
    whole, rest = divmod(num_tokens, STEP_TOKENS)
    return (whole * prefill_ms(STEP_TOKENS) + (prefill_ms(rest) if rest else 0.0)) / 1e3


class Learning:
    """Is a cluster of a worker or two, each of which learns what steps cost from those that it has."""

    def __init__(self, role: Role = Role.PREFILL) -> None:
        """`role` is that of the worker that computes the prompts; a decode worker is the only one."""
        self.bench = Bench(max_queue=100, model_context_tokens=CONTEXT)
        self._num_asked = 0
        self._costs: dict[str, CostModel] = {}
        for worker_id, its_role in (("p", role), ("d", Role.DECODE))[: 1 if role is Role.DECODE else 2]:
            self.bench.join(worker_id, its_role, num_blocks=4096, max_model_len=CONTEXT)
            model = self._costs[worker_id] = CostModel()
            for num_tokens in (16, 64, 256, STEP_TOKENS):
                model.calibrate(num_tokens, 0, prefill_ms(num_tokens))
            for num_sequences in (1, 8):
                model.calibrate(0, num_sequences, DECODE_MS + num_sequences)
        self.report()

    def report(self, **changes: int) -> None:
        """Lets both workers send a snapshot; `changes` are those of the prefill worker's."""
        for worker_id, model in self._costs.items():
            costs = model.at(self.bench.now)
            self.bench.load(
                worker_id,
                ms_per_prefill_token=costs.ms_per_prefill_token,
                ms_per_further_prefill_token=costs.ms_per_further_prefill_token,
                tokens_per_prefill_step=costs.tokens_per_prefill_step,
                ms_per_decode_step=costs.ms_per_decode_step,
                ms_per_decode_sequence=costs.ms_per_decode_sequence,
                **(changes if worker_id == "p" else {}),
            )

    def step(self, num_tokens: int, ms: float, *, held_up: bool = False) -> None:
        self.bench.wait(ms / 1e3)
        self._costs["p"].observe(num_tokens, 0, ms, self.bench.now, held_up=held_up)
        if "d" in self._costs:
            self._costs["d"].observe(0, 1, DECODE_MS, self.bench.now)
        self.report()

    def idle(self, seconds: float) -> None:
        """Only canaries come, and each takes longer than in a row: nothing of the worker is in the caches."""
        for _ in range(round(seconds / 15.0)):
            self.bench.wait(15.0)
            self.step(CANARY_TOKENS, 80.0)

    def prompts(self, number: int) -> None:
        for _ in range(number):
            self.step(STEP_TOKENS, prefill_ms(STEP_TOKENS))

    def is_served(self, num_tokens: int, within_s: float) -> bool:
        """Submits a request for one token with a deadline, and returns whether it is taken. It ends at once."""
        self._num_asked += 1
        name = f"asked-{self._num_asked}"
        try:
            self.bench.submit(name, num_tokens, max_tokens=1, deadline_s=self.bench.now + within_s)
        except (DeadlineExceeded, Overloaded):
            return False
        self.bench.cancel(name)
        return True


@pytest.fixture
def learning() -> Learning:
    return Learning()


def after_the_start(_: Learning) -> None:
    """Nothing has run yet but the warm-up."""


def after_an_idle_minute(learning: Learning) -> None:
    learning.prompts(5)
    learning.idle(60.0)


def after_an_idle_hour(learning: Learning) -> None:
    learning.idle(3600.0)


def after_a_canary_over_a_pause(learning: Learning) -> None:
    learning.prompts(5)
    learning.step(CANARY_TOKENS, 12_000.0)


def after_a_chunk_over_a_pause(learning: Learning) -> None:
    learning.prompts(5)
    learning.step(STEP_TOKENS, 12_000.0, held_up=True)


def after_a_chunk_over_a_pause_that_no_clock_shows(learning: Learning) -> None:
    learning.prompts(5)
    learning.step(STEP_TOKENS, 12_000.0)


def after_a_first_step_over_a_pause(learning: Learning) -> None:
    learning.step(STEP_TOKENS, 12_000.0, held_up=True)


HISTORIES: list[Callable[[Learning], None]] = [
    after_the_start,
    after_an_idle_minute,
    after_an_idle_hour,
    after_a_canary_over_a_pause,
    after_a_chunk_over_a_pause,
    after_a_chunk_over_a_pause_that_no_clock_shows,
    after_a_first_step_over_a_pause,
]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("num_tokens", [30, 250, 790, 2000, 8004])
def test_what_can_be_served_is_not_refused(
    learning: Learning, history: Callable[[Learning], None], num_tokens: int
) -> None:
    history(learning)
    assert learning.is_served(num_tokens, within_s=1.1 * prompt_s(num_tokens))


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("num_tokens", [790, 2000, 8004])
def test_what_cannot_be_served_is_refused(
    learning: Learning, history: Callable[[Learning], None], num_tokens: int
) -> None:
    history(learning)
    assert not learning.is_served(num_tokens, within_s=0.4 * prompt_s(num_tokens))


def test_steps_that_are_all_slow_are_believed(learning: Learning) -> None:
    for _ in range(100):
        learning.step(STEP_TOKENS, 5 * prefill_ms(STEP_TOKENS))
    assert not learning.is_served(2000, within_s=2 * prompt_s(2000))
    assert learning.is_served(2000, within_s=5 * prompt_s(2000))
    learning.bench.beat("p", 300.0)
    learning.report()
    assert learning.is_served(2000, within_s=1.1 * prompt_s(2000)), "and not for ever"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_cancelled_prompt_is_in_nobodys_way(role: Role) -> None:
    learning = Learning(role)
    bench = learning.bench
    busy = {"queued_prefill_tokens": LONG - STEP_TOKENS, "num_running": 1, "blocks_active": 440, "blocks_free": 3000}
    bench.submit("long", LONG, max_tokens=1)
    leg = bench.take_leg(role)
    bench.say("p", started(leg) if role is Role.PREFILL else DecodeAdmitted(leg.leg))
    bench.wait(0.5)
    learning.report(**busy)
    assert not learning.is_served(100, within_s=1.0), "it is behind the long one"
    bench.cancel("long")
    assert leg.leg in [action.leg for action in bench.take_all(CancelLeg)]
    for _ in range(6):
        assert learning.is_served(100, within_s=1.0)
    bench.wait(0.5)
    learning.report(**busy)
    assert not learning.is_served(100, within_s=1.0), "a later snapshot says that there is other work"


def test_of_a_cancelled_prompt_only_what_was_not_computed_is_no_work_any_more() -> None:
    learning = Learning()
    bench = learning.bench
    bench.submit("long", LONG, max_tokens=1)
    leg = bench.take_leg(Role.PREFILL)
    bench.say("p", started(leg), PromptComputed(leg.leg, 6000))
    bench.wait(0.5)
    learning.report(queued_prefill_tokens=LONG - 6000 + 5000, num_running=2, blocks_active=900, blocks_free=3000)
    bench.cancel("long")
    assert not learning.is_served(100, within_s=1.0), "it is behind the other prompt"
