"""Tests which tokens of a prompt a step scores: each once, none from the cache, and not too many at once."""

from __future__ import annotations

from services.engine.schedule.scheduler import Scheduler, SchedulerConfig
from services.engine.schedule.sequence import (
    Admitted,
    Mode,
    PromptScored,
    SampledToken,
    SamplingParams,
    ScoredToken,
    Sequence,
    SequenceEvent,
    State,
    StepPlan,
    StepResult,
    StoppingParams,
    Token,
)
from services.kv.pool import BlockPool, Holder


class Steps:
    """Runs steps in which a token's log-probability says which token it is, and where."""

    def __init__(self, num_blocks: int = 64, **config: int) -> None:
        self.pool = BlockPool(num_blocks, 4, on_index=lambda *_: None, on_evict=lambda _: None)
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 200, **config}
        self.scheduler = Scheduler(self.pool, SchedulerConfig(**limits))
        self.events: list[SequenceEvent] = []
        self.plans: list[StepPlan] = []

    def add(self, seq_id: int, num_tokens: int, num_top: int | None = 2, **fields: int | Mode) -> Sequence:
        sequence = Sequence(
            seq_id, list(range(num_tokens)), num_tokens, SamplingParams(), StoppingParams(40), float(seq_id), **fields
        )
        sequence.num_prompt_logprobs = num_top
        self.scheduler.add(sequence)
        return sequence

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            plan = self.scheduler.schedule(0.0)
            if not plan.sequences:
                return
            self.plans.append(plan)
            sampled = {part.seq_id: (SampledToken(7),) * len(part.rows) for part in plan.sequences if part.rows}
            scored = {}
            for part in plan.sequences:
                if part.scoring is not None:
                    places = range(part.scoring.position, part.scoring.position + len(part.scoring.token_ids))
                    pairs = zip(places, part.scoring.token_ids, strict=True)
                    scored[part.seq_id] = tuple(ScoredToken(-(1000.0 * place + token), 1) for place, token in pairs)
            self.events += self.scheduler.update(plan, StepResult(sampled, scored), 0.0)
            self.scheduler.check()

    def scores_of(self, seq_id: int) -> list[float]:
        """Returns the log-probabilities in order, and asserts that nothing is repeated or left out."""
        found: list[float] = []
        for event in self.events:
            if isinstance(event, PromptScored) and event.seq_id == seq_id:
                assert event.position == 1 + len(found)
                found += [token.logprob for token in event.tokens]
        return found


def expected(num_prompt: int) -> list[float]:
    return [-(1000.0 * place + place) for place in range(1, num_prompt)]


def test_all_but_the_first_token_are_scored_before_any_output() -> None:
    steps = Steps()
    steps.add(1, 20)
    steps.run(2)
    assert steps.scores_of(1) == expected(20)
    kinds = [type(event) for event in steps.events]
    assert kinds == [Admitted, PromptScored, Token, Token]


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    steps = Steps()
    steps.add(1, 1)
    steps.run(2)
    assert [type(event) for event in steps.events] == [Admitted, Token, Token]


def test_chunks_meet_at_their_edges() -> None:
    steps = Steps(max_num_batched_tokens=7)
    steps.add(1, 20, mode=Mode.PREFILL_ONLY)
    steps.run(3)
    assert [plan.num_tokens for plan in steps.plans] == [7, 7, 6]
    assert steps.scores_of(1) == expected(20)
    assert steps.plans[0].sequences[0].scoring is not None
    assert steps.plans[0].sequences[0].scoring.token_ids == tuple(range(1, 8)), (
        "its last token foretells the next chunk"
    )


def test_the_logits_of_a_step_are_bounded() -> None:
    steps = Steps(max_scored_tokens=8)
    for seq_id in (1, 2):
        steps.add(seq_id, 20)
    steps.add(3, 20, None)
    steps.run(1)
    assert [(part.seq_id, part.num_tokens) for part in steps.plans[0].sequences] == [(1, 8), (3, 20)]
    steps.run(8)
    assert steps.scores_of(1) == steps.scores_of(2) == expected(20)
    for plan in steps.plans:
        assert sum(len(part.scoring.token_ids) for part in plan.sequences if part.scoring is not None) <= 8
        assert plan.sequences
        assert all(part.num_tokens for part in plan.sequences)


def test_a_cached_prefix_is_not_used_but_its_own_blocks_serve_others() -> None:
    steps = Steps()
    steps.add(1, 20, None)
    steps.run(1)
    scored = steps.add(2, 20)
    steps.run(1)
    assert scored.num_cached == 0
    assert steps.scores_of(2) == expected(20)
    steps.add(3, 20, None)
    steps.run(1)
    assert steps.scheduler.sequences[3].num_cached == 16


def test_replayed_output_is_not_scored() -> None:
    steps = Steps()
    steps.add(1, 20, output_base=5)
    steps.run(1)
    assert steps.scores_of(1) == expected(15)


def test_a_preempted_prompt_is_scored_once() -> None:
    """The sequence is preempted between two chunks, since one before it needs its blocks."""
    steps = Steps(num_blocks=8, max_num_batched_tokens=6)
    steps.add(1, 7, None)
    steps.run(2)
    scored = steps.add(2, 20)
    steps.run(1)
    assert 1 < scored.num_scored < 20
    while scored.state is State.RUNNING and len(steps.plans) < 20:
        steps.run(1)
    assert scored.state is State.PREEMPTED
    before = len(steps.scores_of(2))
    steps.scheduler.abort(1)
    steps.run(8)
    assert steps.scores_of(2) == expected(20)
    assert before < 19, "it was preempted before it was scored"


def test_an_aborted_sequence_reports_nothing() -> None:
    steps = Steps()
    steps.add(1, 20)
    plan = steps.scheduler.schedule(0.0)
    steps.scheduler.take_events()
    steps.scheduler.abort(1)
    part = plan.sequences[0]
    scored = {1: (ScoredToken(-1.0, 1),) * 19}
    assert part.scoring is not None
    assert steps.scheduler.update(plan, StepResult({1: (SampledToken(7),)}, scored), 0.0) == []
    steps.scheduler.check_idle()
    assert not steps.pool.references(Holder.SEQUENCE)
