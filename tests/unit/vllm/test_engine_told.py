"""Tests `VllmEngine` over a vLLM that tells what a test says, in the order in which the test says it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engine.schedule.sequence import SamplingParams, Sequence, StoppingParams
from services.vllm import messages
from tests.support.told_vllm import ToldVllm

PROMPT = [3 + at % 200 for at in range(40)]


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[ToldVllm]:
    with ToldVllm(tmp_path) as vllm:
        yield vllm
        vllm.engine.check_idle()


def passed_on(vllm: ToldVllm, seq_id: int = 1) -> Sequence:
    """Returns a sequence that vLLM has begun with."""
    sequence = Sequence(seq_id, list(PROMPT), len(PROMPT), SamplingParams(), StoppingParams(9), vllm.clock.now())
    vllm.engine.add(sequence)
    vllm.settle()
    vllm.tell(vllm.core, messages.STEP, begun=[[seq_id, 0]], preempted=[])
    return sequence


def test_a_step_that_does_not_end_shows_also_when_nobody_waits_for_it_any_more(vllm: ToldVllm) -> None:
    """Its sequences were cancelled, their slots cannot be freed, and what comes may find no room: that the step stands
    still is all that there is to see."""
    sequence = passed_on(vllm)
    vllm.engine.abort(sequence.seq_id)
    vllm.clock.advance(7.0)
    assert vllm.engine.stats().num_running == 0
    assert vllm.engine.stats().current_step_ms == 7000.0
    vllm.tell(vllm.ranks[0], messages.GONE, ids=[sequence.seq_id])
    vllm.clock.advance(7.0)
    assert vllm.engine.stats().current_step_ms == 0.0, "nothing is to be computed"
