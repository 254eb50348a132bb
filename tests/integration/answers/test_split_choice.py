"""Tests that a cluster which has measured its costs runs short prompts unsplit, with the same answers, and says so."""

from __future__ import annotations

import random
from pathlib import Path

from baton.v1 import control_pb2
from services.engine.cost_model import CostModel
from services.router.policy.handoff_time import MIN_HANDOFFS
from tests.support.cluster import Answer, running_cluster
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.workers import DECODE, PREFILL

OUTPUT = 32
SHORT = [7]


class SameCosts(CostModel):
    """Has costs that do not depend on the machine: a prompt token takes long beside a handoff, so that the break-even
    lies within the model's context."""

    def __init__(self) -> None:
        super().__init__()
        super().calibrate(100, 0, 100.0)
        super().calibrate(0, 1, 5.0)

    def observe(self, *_: object, **__: object) -> None:
        pass


def workers_of(answer: Answer) -> tuple[str, str]:
    assert answer.completion is not None
    return answer.completion.workers.prefill, answer.completion.workers.decode


async def test_a_one_token_prompt_is_not_handed_over_once_that_is_known_to_cost_more(tmp_path: Path) -> None:
    chance = random.Random(0)
    async with running_cluster(tiny_model("llama", tmp_path), [PREFILL, DECODE], router={"split": "auto"}) as cluster:
        for worker in cluster.workers:
            worker.engine._costs = SameCosts()  # type: ignore[attr-defined]  # measured ones differ by chance
        split = await cluster.greedy(SHORT, OUTPUT)
        assert workers_of(split) == ("w0", "w1"), "nothing is known of handoffs yet"
        (model,) = (await cluster.status()).models
        assert not model.split_break_even.HasField("handoff_ms")

        for _ in range(MIN_HANDOFFS - 1):  # too few tokens for a step that shows what one costs
            answer = await cluster.greedy(chance.choices(range(3, VOCAB_SIZE), k=12), OUTPUT)
            assert workers_of(answer) == ("w0", "w1")
        (model,) = (await cluster.status()).models
        found = model.split_break_even
        assert (found.prefill, found.decode) == ("w0", "w1")
        assert found.handoff_ms > 0
        assert found.tokens > 1

        unsplit = await cluster.greedy(SHORT, OUTPUT, request_id="short")
        assert workers_of(unsplit) == ("w1", "w1")
        assert unsplit.token_ids == split.token_ids
        (explained,) = (await cluster.control.Explain(control_pb2.ExplainRequest(request_id="short"))).requests
        (choice,) = explained.choices
        assert choice.phase == control_pb2.PLACED_PHASE_UNSPLIT
        assert choice.unsplit.reason == control_pb2.UNSPLIT_REASON_HANDOFF
        assert choice.unsplit.costs.handoff_ms > choice.unsplit.costs.disturbance_ms

        long = await cluster.greedy(chance.choices(range(3, VOCAB_SIZE), k=found.tokens + 200), OUTPUT)
        assert workers_of(long) == ("w0", "w1")


async def test_a_cluster_that_never_splits_hands_nothing_over(tmp_path: Path) -> None:
    async with running_cluster(tiny_model("llama", tmp_path), [PREFILL, DECODE], router={"split": "never"}) as cluster:
        answer = await cluster.greedy(list(range(3, 100)), 4)
        assert workers_of(answer) == ("w1", "w1")
        (model,) = (await cluster.status()).models
        assert not model.HasField("split_break_even")
