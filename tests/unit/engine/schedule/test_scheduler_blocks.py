"""Tests which blocks sequences hold under the scheduler: shared, cached, reserved, given back."""

from __future__ import annotations

from typing import Any

import pytest

from services.engine.schedule.sequence import (
    Admitted,
    Finish,
    Mode,
    Progress,
    State,
    Token,
)
from services.kv.pool import Holder, Ledger
from tests.support.fake_device import prompt, reference
from tests.support.scheduler_checks import parts, settle
from tests.support.scheduler_driver import SchedulerDriver

PREFILL_ONLY: dict[str, Any] = {"mode": Mode.PREFILL_ONLY}


# -- prefix cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_a_hit_skips_full_blocks_but_always_computes_a_token(num_tokens: int, num_cached: int) -> None:
    engine = SchedulerDriver(16, 4)
    engine.add(prompt(12), max_tokens=1)
    engine.run()
    again = engine.add(prompt(num_tokens), max_tokens=3)
    engine.begin()
    assert parts(engine) == [(1, num_cached, num_tokens - num_cached)]
    assert again.sequence.num_cached == num_cached
    engine.finish()
    assert engine.scheduler.prefix_tokens_hit == num_cached
    assert engine.scheduler.prefix_tokens_queried == 12 + num_tokens
    settle(engine)


def test_blocks_are_not_shared_before_their_step_completed() -> None:
    engine = SchedulerDriver(16, 4)
    engine.add(prompt(9))
    engine.begin()
    twin = engine.add(prompt(9))
    assert not engine.indexed
    engine.finish()
    late = engine.add(prompt(9))
    engine.step()
    assert twin.sequence.num_cached == late.sequence.num_cached == 8
    settle(engine)


def test_two_that_compute_the_same_block_keep_their_own() -> None:
    engine = SchedulerDriver(16, 4)
    first, second = engine.add(prompt(9)), engine.add(prompt(9))
    engine.step()
    assert not set(first.sequence.block_ids) & set(second.sequence.block_ids)
    assert engine.indexed.keys() == set(first.sequence.block_ids[:2])
    settle(engine)


def test_salts_never_share() -> None:
    engine = SchedulerDriver(16, 4)
    engine.add(prompt(9), cache_salt="a")
    engine.run()
    other = engine.add(prompt(9), cache_salt="b")
    engine.step()
    assert other.sequence.num_cached == 0
    settle(engine)


def test_the_hit_of_an_admission_is_not_evicted_by_it() -> None:
    engine = SchedulerDriver(4, 4)
    engine.add(prompt(9), max_tokens=1)  # leaves two cached blocks
    engine.run()
    record = engine.add(prompt(15), max_tokens=1)
    engine.step()
    assert record.sequence.num_cached == 8
    settle(engine)


# -- room -------------------------------------------------------------------------------------------------------------


def test_a_prompt_waits_until_all_its_blocks_are_there() -> None:
    engine = SchedulerDriver(6, 4)
    engine.take_foreign(3)
    record = engine.add(prompt(13))
    assert not engine.begin().sequences
    assert engine.pool.references(Holder.SEQUENCE) == 0, "no hold-and-wait"
    engine.release_foreign(0)
    engine.step()
    assert record.sequence.state is State.RUNNING
    settle(engine)


def test_a_young_head_is_overtaken_and_an_aged_one_is_not() -> None:
    engine = SchedulerDriver(6, 4)
    engine.take_foreign(3)
    big = engine.add(prompt(13))
    engine.add(prompt(2, 2), max_tokens=1)
    assert [part.seq_id for part in engine.step().sequences] == [1]
    engine.now += 1.1
    engine.add(prompt(2, 3), max_tokens=1)
    assert not engine.begin().sequences
    engine.release_foreign(0)
    engine.step()
    assert big.sequence.state is State.RUNNING
    settle(engine)


def test_decode_growth_preempts_the_lowest_priority_then_the_latest() -> None:
    engine = SchedulerDriver(6, 4)
    options = {"max_tokens": 12}
    engine.add(prompt(6, 0), priority=1, **options)
    engine.add(prompt(6, 1), priority=0, **options)
    engine.now += 0.1
    engine.add(prompt(6, 2), priority=0, **options)
    preempted: list[int] = []
    while len(preempted) < 2:
        preempted += engine.step().preempted
    assert preempted == [2, 1]
    assert engine.scheduler.num_preempted == engine.scheduler.num_preemptions == 2
    assert engine.records[1].sequence.state is State.PREEMPTED
    settle(engine)


def test_a_victim_comes_back_before_new_work_and_from_its_cached_blocks() -> None:
    engine = SchedulerDriver(6, 4, max_num_batched_tokens=64)
    engine.add(prompt(9, 0), max_tokens=5)
    engine.now += 0.1
    victim = engine.add(prompt(9, 1), max_tokens=12)
    while not engine.scheduler.num_preempted:
        engine.step()
    new = engine.add(prompt(2, 2), max_tokens=1, priority=5)
    while victim.sequence.state is State.PREEMPTED:
        assert new.sequence.state is State.WAITING
        plan = engine.step()
    num_found = next(part.start for part in plan.sequences if part.seq_id == 1)
    assert num_found >= 4
    assert victim.found == [num_found], "others may have computed that: whoever is told of caches is told of it"
    settle(engine)


def test_a_sequence_without_room_to_grow_becomes_its_own_victim_and_comes_back() -> None:
    engine = SchedulerDriver(4, 4)
    record = engine.add(prompt(6), max_tokens=8)
    engine.step()
    engine.take_foreign(2)
    for _ in range(2):
        engine.step()
    plan = engine.begin()
    assert plan.preempted == (0,)
    assert not plan.sequences
    assert engine.pool.references(Holder.SEQUENCE) == 0
    engine.release_foreign(0)
    settle(engine)
    assert record.finish is Finish.LENGTH


def test_a_victim_is_never_in_the_plan_it_was_preempted_for() -> None:
    engine = SchedulerDriver(4, 4)
    engine.add(prompt(3, 1), max_tokens=12, priority=0)
    engine.step()
    engine.add(prompt(3, 2), max_tokens=12, priority=1)
    while not engine.scheduler.num_preempted:
        plan = engine.begin()
        assert not {part.seq_id for part in plan.sequences} & set(plan.preempted)
        engine.finish()
    assert plan.preempted == (0,)
    settle(engine)


# -- leases -----------------------------------------------------------------------------------------------------------


def test_a_leased_prefill_reports_its_chunks_and_leaves_its_blocks_to_the_lease() -> None:
    engine = SchedulerDriver(8, 4, max_num_batched_tokens=8)
    engine.add(prompt(14), **PREFILL_ONLY)
    engine.begin(take_events=False)
    events = engine.finish()
    assert [type(event) for event in events] == [Admitted, Progress]
    assert isinstance(events[0], Admitted)
    assert len(events[0].block_ids) == 4, "no room for the token it samples"
    engine.begin()
    progress, token = engine.finish()
    assert isinstance(progress, Progress)
    assert progress.num_computed == 14
    assert isinstance(token, Token)
    assert (token.position, token.finish) == (0, None)
    assert engine.pool.ledger() == Ledger(0, 4, 0, 0, 4)
    assert not engine.scheduler.sequences
    engine.drop_lease(0)
    assert engine.pool.ledger() == Ledger(0, 0, 0, 3, 5)
    settle(engine)


def test_token_0_may_end_a_leased_prefill() -> None:
    engine = SchedulerDriver(8, 4)
    record = engine.add(prompt(3), max_tokens=1, **PREFILL_ONLY)
    engine.step()
    assert record.finish is Finish.LENGTH
    engine.drop_lease(0)
    settle(engine)


def test_a_prefill_pools_context_does_not_end_the_sequence() -> None:
    """It goes on in the decode worker's pool, which may hold more."""
    engine = SchedulerDriver(8, 4, max_model_len=8)
    record = engine.add(prompt(7), max_tokens=5, **PREFILL_ONLY)
    engine.step()
    assert (len(record.output), record.finish) == (1, None)
    engine.drop_lease(0)
    settle(engine)


def test_an_abort_before_admission_leaves_no_lease() -> None:
    engine = SchedulerDriver(2, 4)
    engine.take_foreign(2)
    engine.add(prompt(3), **PREFILL_ONLY)
    engine.begin()
    engine.abort(0)
    assert engine.pool.references(Holder.LEASE) == 0
    assert not engine.leases
    engine.release_foreign(0)
    settle(engine)


def test_an_abort_between_admission_and_its_event_still_delivers_the_lease() -> None:
    engine = SchedulerDriver(8, 4)
    engine.add(prompt(6), **PREFILL_ONLY)
    engine.begin(take_events=False)
    engine.abort(0)
    assert [type(event) for event in engine.finish()] == [Admitted]
    assert engine.pool.references(Holder.LEASE) == 2
    engine.drop_lease(0)
    settle(engine)


def test_leases_hold_at_most_their_share_but_for_an_only_lease() -> None:
    engine = SchedulerDriver(8, 4, max_num_batched_tokens=64, max_leased_blocks=4)
    engine.add(prompt(24, 1), **PREFILL_ONLY)
    engine.add(prompt(3, 2), **PREFILL_ONLY)
    engine.now += 5
    engine.add(prompt(3, 3), max_tokens=1)
    plan = engine.step()
    assert [part.seq_id for part in plan.sequences] == [0, 2], "an aged lease does not hold up what needs none"
    engine.drop_lease(0)
    engine.step()
    engine.drop_lease(1)
    settle(engine)


def test_leased_prefills_are_never_preempted() -> None:
    engine = SchedulerDriver(4, 4, max_num_batched_tokens=4)
    engine.add(prompt(3, 1), max_tokens=8, priority=5)
    engine.step()
    engine.add(prompt(12, 2), priority=-5, **PREFILL_ONLY)
    preempted: list[int] = []
    while not engine.leases or not engine.leases[1].sealed:
        preempted += engine.step().preempted
    assert preempted == [0]
    settle(engine)


# -- adoption ---------------------------------------------------------------------------------------------------------


def test_an_adopted_sequence_decodes_at_once_and_its_blocks_are_indexed() -> None:
    engine = SchedulerDriver(8, 4)
    record = engine.adopt_import(prompt(9), max_tokens=4)
    assert record is not None
    assert engine.indexed.keys() == set(record.sequence.block_ids[:2])
    engine.begin()
    assert parts(engine) == [(0, 9, 1)]
    assert engine.plan is not None
    assert engine.plan.sequences[0].rows[0].position == 1
    engine.finish()
    settle(engine)


def test_an_adopted_sequence_is_first_in_line_for_a_full_batch_and_keeps_its_blocks() -> None:
    engine = SchedulerDriver(16, 4, max_num_seqs=1)
    engine.add(prompt(3, 1), max_tokens=3)
    engine.step()
    engine.add(prompt(3, 2), max_tokens=1, priority=9)
    adopted = engine.adopt_import(prompt(9, 3), max_tokens=2)
    assert adopted is not None
    engine.step()
    assert adopted.sequence.state is State.WAITING
    assert len(adopted.sequence.block_ids) == 3
    engine.step()
    assert [part.seq_id for part in engine.step().sequences] == [2]
    settle(engine)


def test_an_adopted_sequence_runs_when_the_only_running_one_had_to_give_way() -> None:
    engine = SchedulerDriver(4, 4, max_num_seqs=1)
    engine.add(prompt(3, 1), max_tokens=12)
    engine.step()
    adopted = engine.adopt_import(prompt(11, 2), max_tokens=2)
    assert adopted is not None
    plan = engine.step()
    while not plan.preempted:
        plan = engine.step()
    assert [part.seq_id for part in plan.sequences] == [1]
    settle(engine)


def test_a_waiting_adopted_sequence_can_be_aborted() -> None:
    engine = SchedulerDriver(16, 4, max_num_seqs=1)
    engine.add(prompt(3, 1), max_tokens=9)
    engine.step()
    assert engine.adopt_import(prompt(9, 2)) is not None
    engine.abort(1)
    assert engine.pool.references(Holder.SEQUENCE) == 1
    settle(engine)


def test_a_lease_adopted_in_place_goes_on_from_its_partial_block() -> None:
    engine = SchedulerDriver(8, 4)
    source = engine.add(prompt(6), **PREFILL_ONLY)
    engine.step()
    record = engine.adopt_lease(0, max_tokens=4)
    assert record is not None
    assert engine.pool.ledger().leased == 0
    settle(engine)
    assert source.output == record.output[:1]
    assert record.output == reference(prompt(6), record.sequence.stopping, max_model_len=200)[0]
