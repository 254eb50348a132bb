"""Tests sequences that go on from one prompt: what they share, what each has for itself, and how each ends."""

from __future__ import annotations

from typing import Any

import pytest

from services.engine.schedule.sequence import Finish, Mode, Preempted, State, Token
from services.kv.pool import Holder
from tests.support.fake_device import prompt
from tests.support.scheduler_checks import settle
from tests.support.scheduler_driver import Record, SchedulerDriver


def begun(engine: SchedulerDriver, num_tokens: int, **options: Any) -> tuple[Record, list[Record]]:
    """Returns the record of a first answer and those of the others, after the step that has computed their prompt."""
    first = engine.add(prompt(num_tokens), num_answers=3, **options)
    engine.step()
    return first, engine.further(first)


def test_full_blocks_are_shared_and_the_partial_one_is_copied() -> None:
    engine = SchedulerDriver(16, 4)
    first, others = begun(engine, 10, max_tokens=6)
    assert engine.pool.ledger().active == 3 + 2, "each block once"
    plan = engine.begin()
    assert {copy.source for copy in plan.copies} == {first.sequence.block_ids[2]}
    assert [copy.target for copy in plan.copies] == [each.sequence.block_ids[2] for each in others]
    for each in others:
        assert each.sequence.block_ids[:2] == first.sequence.block_ids[:2]
    assert engine.pool.references(Holder.SEQUENCE, first.sequence.block_ids[0]) == 3
    assert engine.pool.references(Holder.SEQUENCE, first.sequence.block_ids[2]) == 3, "until they are copied"
    engine.finish()
    assert engine.pool.references(Holder.SEQUENCE, first.sequence.block_ids[2]) == 1
    assert not engine.begin().copies, "they are copied once"
    engine.finish()
    settle(engine)


def test_of_a_prompt_of_full_blocks_nothing_is_copied() -> None:
    engine = SchedulerDriver(16, 4)
    begun(engine, 8, max_tokens=3)
    assert engine.pool.ledger().active == 3, "two of the prompt, and one for the first to grow into"
    assert not engine.begin().copies
    engine.finish()
    assert engine.pool.ledger().active == 5
    settle(engine)


def test_answers_differ_and_are_those_of_sequences_of_their_own() -> None:
    engine = SchedulerDriver(16, 4)
    first, others = begun(engine, 9, max_tokens=5)
    engine.run()
    alone = [engine.add(prompt(9), max_tokens=5, seed=seed) for seed in range(3)]
    engine.run()
    assert [record.output for record in (first, *others)] == [record.output for record in alone]
    assert len({tuple(record.output) for record in alone}) == 3
    settle(engine)


def test_an_answer_that_its_first_token_ends_takes_no_block() -> None:
    engine = SchedulerDriver(16, 4)
    alone = engine.add(prompt(10), max_tokens=1, seed=1)
    engine.run()
    first, others = begun(engine, 10, max_tokens=6, stop=frozenset(alone.output))
    assert [each.finish for each in (first, *others)] == [None, Finish.STOP, None]
    assert engine.pool.ledger().active == 3 + 1
    settle(engine)


def test_the_others_go_on_after_the_first_token_of_the_first_has_ended_it() -> None:
    engine = SchedulerDriver(16, 4)
    alone = engine.add(prompt(10), max_tokens=1)
    engine.run()
    first, others = begun(engine, 10, max_tokens=6, stop=frozenset(alone.output))
    assert first.finish is Finish.STOP
    assert all(each.finish is None for each in others)
    plan = engine.begin()
    assert len(plan.copies) == 2, "from a block that is nobody's else any more"
    engine.finish()
    settle(engine)


def test_a_prefill_samples_the_first_tokens_of_all_and_begins_none() -> None:
    engine = SchedulerDriver(16, 4)
    first, others = begun(engine, 10, mode=Mode.PREFILL_ONLY)
    assert [len(each.output) for each in (first, *others)] == [1, 1, 1]
    assert not engine.scheduler.sequences
    engine.drop_lease(first.sequence.seq_id)
    settle(engine)


def test_room_for_the_others_is_set_aside_at_admission() -> None:
    engine = SchedulerDriver(6, 4, max_num_batched_tokens=4)
    first = engine.add(prompt(10), num_answers=3, max_tokens=2)
    late = engine.add(prompt(5, stem=2), max_tokens=2)
    engine.step()
    assert len(first.sequence.reserved_ids) == 2
    assert late.sequence.state is State.WAITING
    assert engine.pool.num_available == 1
    settle(engine)


def test_who_finds_no_block_is_preempted_at_once_and_comes_back() -> None:
    engine = SchedulerDriver(4, 4)
    first = engine.add(prompt(10), num_answers=3, max_tokens=3)
    engine.begin()
    events = engine.finish()
    ids = [each.sequence.seq_id for each in engine.further(first)]
    assert [event.seq_id for event in events if isinstance(event, Preempted)] == ids[1:]
    assert [event.seq_id for event in events if isinstance(event, Token)] == [first.sequence.seq_id, *ids]
    settle(engine)


def test_an_aborted_prompt_begins_nobody() -> None:
    engine = SchedulerDriver(16, 4)
    first = engine.add(prompt(10), num_answers=3)
    engine.begin()
    engine.abort(first.sequence.seq_id)
    engine.finish()
    assert not engine.scheduler.sequences
    settle(engine)


@pytest.mark.parametrize("in_step", [False, True])
def test_an_answer_is_aborted_alone_with_its_copy(*, in_step: bool) -> None:
    engine = SchedulerDriver(16, 4)
    first, others = begun(engine, 10, max_tokens=6)
    if in_step:
        engine.begin()
    target = others[0].sequence.block_ids[-1]
    engine.abort(others[0].sequence.seq_id)
    assert bool(engine.pool.references(Holder.SEQUENCE, target)) is in_step, "nobody gets it while it is copied into"
    if in_step:
        engine.finish()
    else:
        assert len(engine.begin().copies) == 1
        engine.finish()
    assert not engine.pool.references(Holder.SEQUENCE, target)
    settle(engine)
    assert first.finish is Finish.LENGTH


def test_a_victim_takes_its_copy_with_it() -> None:
    engine = SchedulerDriver(7, 4)
    earlier = engine.add(prompt(7, stem=2), max_tokens=9)
    engine.step()
    _, others = begun(engine, 10, max_tokens=6)
    assert len(earlier.sequence.token_ids) == 9, "its third block is one of those that the others have set aside"
    plan = engine.begin()
    assert plan.preempted == (others[1].sequence.seq_id,)
    assert [copy.target for copy in plan.copies] == [others[0].sequence.block_ids[-1]]
    engine.finish()
    settle(engine)


def test_a_copy_is_made_although_the_batch_is_full() -> None:
    engine = SchedulerDriver(16, 4, max_num_seqs=1)
    first, others = begun(engine, 10, max_tokens=4)
    plan = engine.begin()
    assert [part.seq_id for part in plan.sequences] == [first.sequence.seq_id]
    assert len(plan.copies) == 2
    engine.abort(others[1].sequence.seq_id)
    assert others[1].sequence.block_ids, "kept until the copy is made"
    engine.finish()
    assert not others[1].sequence.block_ids
    settle(engine)


def test_a_step_that_raises_fails_those_for_which_it_was_to_copy() -> None:
    engine = SchedulerDriver(16, 4, max_num_seqs=1)
    _, others = begun(engine, 10, max_tokens=4)
    engine.begin()
    engine.crash()
    assert all(each.error is not None for each in others)
    settle(engine)


def test_adopted_answers_share_the_blocks_of_the_handoff() -> None:
    engine = SchedulerDriver(16, 4)
    record = engine.adopt_import(prompt(10), num_answers=3, max_tokens=5)
    assert record is not None
    assert engine.pool.ledger().active == 3 + 2
    settle(engine)
    assert all(each.finish is Finish.LENGTH for each in (record, *engine.further(record)))


def test_a_lease_is_adopted_for_several_answers_in_a_full_pool() -> None:
    engine = SchedulerDriver(3, 4)
    engine.add(prompt(10), mode=Mode.PREFILL_ONLY)
    engine.step()
    (lease,) = engine.leases
    record = engine.adopt_lease(lease, 2, num_answers=3)
    assert record is not None
    assert all(each.sequence.state is State.PREEMPTED for each in engine.further(record)), "it has waited for nobody"
    settle(engine)
