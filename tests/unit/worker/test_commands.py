"""Commands off the wire: what a router should have refused is refused here too, before it shares a step with others."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format

from baton.v1 import worker_pb2
from services.core.errors import InvalidRequest
from services.engine.schedule.sequence import Mode, Sequence
from services.worker.commands import sequence_of


def sequence(text: str) -> Sequence:
    command: Any = text_format.Parse(text, worker_pb2.DecodeCommand())
    return sequence_of(
        command,
        seq_id=1,
        mode=Mode.GENERATE,
        now=0.0,
        max_model_len=64,
        vocab_size=100,
        eos_token_ids=frozenset({2}),
    )


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "token_ids"),
        ("token_ids: 100", "token_ids"),
        ("token_ids: -1", "token_ids"),
        (f"token_ids: {[1] * 64}", "token_ids"),
        ("token_ids: 1 output_base: 1", "output_base"),
        ("token_ids: 1 output_base: -1", "output_base"),
        ("token_ids: [1, 2] output_base: 1 stopping { max_tokens: 1 }", "stopping.max_tokens"),
        ("token_ids: 1 sampling { temperature: nan }", "sampling.temperature"),
        ("token_ids: 1 sampling { top_p: -0.1 }", "sampling.top_p"),
        ("token_ids: 1 sampling { top_k: -1 }", "sampling.top_k"),
        ("token_ids: 1 sampling { logit_bias { token_id: 100 } }", "sampling.logit_bias[0].token_id"),
        ("token_ids: 1 sampling { allowed_token_ids: 100 }", "sampling.allowed_token_ids[0]"),
        ("token_ids: 1 sampling { bad_token_ids {} }", "sampling.bad_token_ids[0].token_ids"),
        ("token_ids: 1 sampling { bad_token_ids { token_ids: [1, 100] } }", "sampling.bad_token_ids[0].token_ids[1]"),
        (
            "token_ids: 1 sampling { allowed_token_ids: [2, 3] } stopping { min_tokens: 1 stop_token_ids: 3 }",
            "sampling.allowed_token_ids",
        ),
        ("token_ids: 1 stopping { stop_token_ids: -1 }", "stopping.stop_token_ids[0]"),
        ("token_ids: 1 logprobs: -1", "logprobs"),
        ("token_ids: 1 logprobs: 21", "logprobs"),
    ],
)
def test_what_would_fail_a_step_is_refused(text: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sequence(text)
    assert refused.value.field == field


def test_a_replay_keeps_its_positions() -> None:
    made = sequence("token_ids: [5, 6, 7] output_base: 2 stopping { max_tokens: 9 min_tokens: 50 stop_token_ids: 3 }")
    assert (made.next_position, made.stopping.max_tokens) == (2, 9)
    assert made.stopping.stop_token_ids == {2, 3}
