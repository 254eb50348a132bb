"""Tests whom the scheduler admits, runs, preempts and ends, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.errors import ConfigError, InvalidRequest, Overloaded, StepFailed
from services.engine.schedule.scheduler import SchedulerConfig
from services.engine.schedule.sequence import (
    Failed,
    Finish,
    SamplingParams,
    State,
    StepResult,
    Token,
)
from services.kv.pool import Holder, Ledger
from tests.support.fake_device import digests, next_token, prompt
from tests.support.scheduler_checks import parts, settle
from tests.support.scheduler_driver import Record, SchedulerDriver

# -- the shape of a step ----------------------------------------------------------------------------------------------


def test_one_sequence_runs_from_prompt_to_length() -> None:
    engine = SchedulerDriver(8, 4)
    record = engine.add(prompt(6), max_tokens=3)
    engine.begin()
    assert parts(engine) == [(0, 0, 6)]
    engine.finish()
    engine.begin()
    assert parts(engine) == [(0, 6, 1)]
    assert engine.plan is not None
    assert engine.plan.sequences[0].rows[0].position == 1
    engine.finish()
    settle(engine)
    assert record.finish is Finish.LENGTH
    assert record.sequence.state is State.FINISHED


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    engine = SchedulerDriver(32, 4, max_num_batched_tokens=8)
    engine.add(prompt(3), max_tokens=10)
    engine.step()
    engine.add(prompt(20, 2), max_tokens=2)
    engine.begin()
    assert parts(engine) == [(0, 3, 1), (1, 0, 7)]
    engine.finish()
    engine.begin()
    assert parts(engine) == [(0, 4, 1), (1, 7, 7)]
    assert engine.plan is not None
    assert [len(part.rows) for part in engine.plan.sequences] == [1, 0]
    engine.finish()
    settle(engine)


def test_chunks_can_be_made_shorter_and_decodes_run_all_the_same() -> None:
    engine = SchedulerDriver(64, 4, max_num_batched_tokens=32)
    for stem in range(2):
        engine.add(prompt(3, stem), max_tokens=10)
    engine.step()
    engine.add(prompt(9, 4), max_tokens=2)
    engine.add(prompt(9, 5), max_tokens=2)
    engine.begin(most_prompt_tokens=2)
    assert parts(engine)[2:] == [(2, 0, 2)]
    assert engine.scheduler.num_waiting == 1, "it is not admitted without a token to compute"
    engine.finish()
    engine.begin(most_prompt_tokens=9)
    assert parts(engine)[2:] == [(2, 2, 7), (3, 0, 2)]
    engine.finish()
    settle(engine)


def test_a_sequence_is_not_admitted_into_a_spent_budget() -> None:
    engine = SchedulerDriver(32, 4, max_num_batched_tokens=8)
    engine.add(prompt(8))
    engine.add(prompt(8, 2))
    engine.begin()
    assert parts(engine) == [(0, 0, 8)]
    assert engine.scheduler.num_waiting == 1
    assert engine.pool.references(Holder.SEQUENCE) == 3
    engine.finish()
    settle(engine)


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    engine = SchedulerDriver(32, 4, max_num_seqs=4, max_num_batched_tokens=2)
    for stem in range(4):
        engine.add(prompt(1, stem), max_tokens=5)
    engine.step()
    assert engine.scheduler.num_running == 2
    settle(engine)


def test_priority_then_arrival_decides_who_is_admitted() -> None:
    engine = SchedulerDriver(32, 4, max_num_seqs=1)
    for priority in (0, 1, 0, 1):
        engine.add(prompt(3, priority), priority=priority)
        engine.now += 0.1
    order = []
    while engine.scheduler.has_work:
        plan = engine.step()
        order += [part.seq_id for part in plan.sequences if part.start == 0]
    assert order == [1, 3, 0, 2]
    settle(engine)


def test_penalties_see_prompt_and_output_and_a_replay_keeps_the_difference() -> None:
    engine = SchedulerDriver(32, 4)
    sequence = engine.sequence([1, 2, 3, 4], output_base=1)
    sequence.sampling = SamplingParams(repetition_penalty=1.5)
    engine.scheduler.add(sequence)
    (row,) = engine.begin().sequences[0].rows
    assert row.prompt_token_ids == (1, 2, 3)
    assert row.output_token_ids == (4,)
    assert row.position == 1
    engine.finish()
    (row,) = engine.begin().sequences[0].rows
    assert row.output_token_ids == (4, sequence.token_ids[-1])
    engine.finish()
    settle(engine)


# -- how a sequence ends ----------------------------------------------------------------------------------------------


def test_stop_wins_over_length() -> None:
    engine = SchedulerDriver(8, 4)
    stop = next_token(digests(prompt(3))[-1])
    record = engine.add(prompt(3), max_tokens=1, stop=frozenset({stop}))
    engine.begin()
    (token,) = [event for event in engine.finish() if isinstance(event, Token)]
    assert (token.finish, token.stop_token_id) == (Finish.STOP, stop)
    assert record.finish is Finish.STOP
    settle(engine)


def test_stop_ids_are_masked_before_min_tokens() -> None:
    engine = SchedulerDriver(8, 4)
    stop = next_token(digests(prompt(3))[-1])
    record = engine.add(prompt(3), max_tokens=5, min_tokens=2, stop=frozenset({stop}))
    assert engine.begin().sequences[0].rows[0].masked_token_ids == (stop,)
    engine.finish()
    assert engine.begin().sequences[0].rows[0].masked_token_ids == (stop,)
    engine.finish()
    assert record.finish is None
    assert all(row.masked_token_ids == () for part in engine.begin().sequences for row in part.rows)
    engine.finish()
    settle(engine)


def test_max_tokens_counts_from_output_position_0_on_a_replay() -> None:
    engine = SchedulerDriver(8, 4)
    sequence = engine.sequence(prompt(5), output_base=3, max_tokens=2)
    assert sequence.stopping.max_tokens == 5
    engine.scheduler.add(sequence)
    engine.run()
    assert len(engine.records[0].output) == 2
    settle(engine)


def test_the_longest_sequence_ends_for_length() -> None:
    engine = SchedulerDriver(8, 4, max_model_len=8)
    record = engine.add(prompt(6), max_tokens=50)
    engine.run()
    assert (len(record.output), record.finish) == (2, Finish.LENGTH)
    settle(engine)


def test_a_prompt_that_can_never_run_fails_with_the_reason() -> None:
    engine = SchedulerDriver(4, 4, max_model_len=20)
    too_long, too_big = engine.add(prompt(20)), engine.add(prompt(17))
    assert engine.scheduler.has_work, "the events are to be fetched"
    assert not engine.begin().sequences
    assert isinstance(too_long.error, InvalidRequest)
    assert too_long.error.field == "token_ids"
    assert isinstance(too_big.error, Overloaded)
    settle(engine)


def test_a_prompt_that_fills_the_pool_still_gets_its_token() -> None:
    engine = SchedulerDriver(4, 4)
    record = engine.add(prompt(16), max_tokens=1)
    grows = engine.add(prompt(16, 2), max_tokens=2)
    engine.run()
    assert record.finish is Finish.LENGTH
    assert isinstance(grows.error, Overloaded), "its second token would need a fifth block"
    assert len(grows.output) == 1
    settle(engine)


# -- aborts and failures ----------------------------------------------------------------------------------------------


def test_an_abort_during_a_step_waits_for_it() -> None:
    engine = SchedulerDriver(8, 4)
    engine.add(prompt(9))
    engine.begin()
    engine.abort(0)
    engine.abort(0)
    assert engine.pool.references(Holder.SEQUENCE) == 3, "the step still writes them"
    assert engine.finish() == []
    assert engine.pool.ledger() == Ledger(0, 0, 0, 2, 6), "what the step completed is cached"
    assert engine.scheduler.abort(0) is False
    settle(engine)


def test_what_was_aborted_counts_as_a_step_at_most() -> None:
    engine = SchedulerDriver(64, 4, max_num_batched_tokens=8)
    engine.add(prompt(100), max_tokens=1)
    engine.step()
    engine.begin()
    engine.add(prompt(5, 2), max_tokens=1)
    assert engine.scheduler.queued_prefill_tokens == 92 + 5
    engine.abort(0)
    assert engine.scheduler.queued_prefill_tokens == 8 + 5
    engine.finish()
    assert engine.scheduler.queued_prefill_tokens == 5
    settle(engine)


def test_an_abort_of_a_running_sequence_outside_the_step_is_immediate() -> None:
    engine = SchedulerDriver(16, 4, max_num_batched_tokens=3, max_num_seqs=3)
    engine.add(prompt(2, 1), max_tokens=9)
    engine.step()
    engine.add(prompt(4, 2), max_tokens=9)
    engine.step()
    engine.abort(1)
    engine.check()
    assert engine.scheduler.num_running == 1
    settle(engine)


def test_a_failed_step_ends_only_its_sequences_and_indexes_nothing() -> None:
    engine = SchedulerDriver(16, 4, max_num_batched_tokens=8)
    broken = engine.add(prompt(8, 1))
    waiting = engine.add(prompt(8, 2))
    engine.begin()
    events = engine.crash()
    assert [type(event) for event in events] == [Failed]
    assert isinstance(broken.error, StepFailed)
    assert not engine.indexed
    settle(engine)
    assert waiting.finish is Finish.LENGTH


def test_the_plan_in_flight_is_the_one_absorbed() -> None:
    engine = SchedulerDriver(8, 4)
    engine.add(prompt(3))
    empty = SchedulerDriver(8, 4).scheduler.schedule(0.0)
    assert engine.scheduler.update(empty, StepResult({}), 0.0) == [], "an empty plan needs no update, and bears one"
    engine.begin()
    with pytest.raises(AssertionError, match="not absorbed"):
        engine.scheduler.schedule(engine.now)
    with pytest.raises(AssertionError, match="not the plan in flight"):
        engine.scheduler.update(empty, StepResult({}), engine.now)
    engine.finish()
    settle(engine)


def test_queued_prefill_tokens_counts_what_stands_before_decoding() -> None:
    engine = SchedulerDriver(32, 4, max_num_batched_tokens=8)
    engine.add(prompt(3, 1), max_tokens=5)
    engine.step()
    assert engine.scheduler.queued_prefill_tokens == 0
    engine.add(prompt(20, 2))
    engine.add(prompt(10, 3))
    assert engine.scheduler.queued_prefill_tokens == 30
    engine.step()
    assert engine.scheduler.queued_prefill_tokens == 23
    settle(engine)


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        SchedulerConfig(0, 16, 100)


# -- several tokens a step --------------------------------------------------------------------------------------------


def decoding(engine: SchedulerDriver, **options: Any) -> Record:
    """Returns the record of a sequence that has been prefilled."""
    record = engine.add(prompt(2), **{"max_tokens": 12, **options})
    engine.step()
    assert len(record.output) == 1
    return record


def test_the_last_token_of_a_prompt_is_no_decode() -> None:
    engine = SchedulerDriver(8, 4, max_num_batched_tokens=4)
    engine.add(prompt(5), max_tokens=3)
    engine.step()
    plan = engine.begin()
    assert parts(engine) == [(0, 4, 1)]
    assert (plan.num_decodes, plan.num_prefill_tokens) == (0, plan.num_tokens)
    engine.finish()
    plan = engine.begin()
    assert (plan.num_decodes, plan.num_prefill_tokens) == (1, 0)
    engine.finish()
    settle(engine)
