"""Checks what must hold of plans, failures and outputs of a `SchedulerDriver`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from services.core.errors import InvalidRequest, Overloaded, StepFailed
from services.core.hashing import num_blocks_for
from services.engine.schedule.sequence import Mode, StepPlan
from services.kv.pool import Holder
from tests.support.fake_device import reference

if TYPE_CHECKING:
    from tests.support.scheduler_driver import Record, SchedulerDriver


def check_plan(engine: SchedulerDriver, plan: StepPlan) -> None:
    assert plan.num_tokens <= engine.config.max_num_batched_tokens
    assert len({part.seq_id for part in plan.sequences}) == len(plan.sequences) <= engine.config.max_num_seqs
    size = engine.pool.block_size
    for part in plan.sequences:
        record = engine.records[part.seq_id]
        if record.num_written is None:
            assert part.start % size == 0
            assert part.start <= (len(record.sequence.token_ids) - 1) // size * size
        else:
            assert part.start == record.num_written, "each position is computed once"
        end = part.start + part.num_tokens
        assert bool(part.rows) == (end == len(record.sequence.token_ids))
        next_position = record.sequence.output_base + len(record.output)
        assert all(row.position == next_position for row in part.rows)
        assert part.is_decode == record.decodes
        assert not part.is_decode or part.start == end - 1
        assert not engine.indexed.keys() & set(part.block_ids[part.start // size :]), "indexed blocks are read-only"
    decoding = {sequence.seq_id for sequence in engine.scheduler.decoding}
    assert decoding <= {part.seq_id for part in plan.sequences}, "every decode advances"
    check_reads(engine, plan)


def check_reads(engine: SchedulerDriver, plan: StepPlan) -> None:
    for part in plan.sequences:
        sequence = engine.records[part.seq_id].sequence
        engine.device.check_part(part, sequence.token_ids, sequence.cache_salt, plan.copies)


def check_stuck(engine: SchedulerDriver) -> None:
    """An empty plan stays empty until someone else acts, since the engine sleeps on it."""
    again = engine.scheduler.schedule(engine.now + 1000)
    assert not again.sequences
    assert not again.preempted
    assert not engine.scheduler.take_events()
    if engine.scheduler.sequences:
        held = engine.pool.references(Holder.IMPORT) + engine.pool.references(Holder.LEASE)
        assert held, "nothing runs although nobody else holds blocks"


def check_failure(engine: SchedulerDriver, record: Record) -> None:
    num_tokens = len(record.given) + len(record.output)
    if isinstance(record.error, InvalidRequest):
        assert num_tokens >= engine.config.max_model_len
    elif isinstance(record.error, Overloaded):
        assert num_blocks_for(num_tokens, engine.pool.block_size) > engine.pool.num_blocks, "it could have fitted"
    else:
        assert isinstance(record.error, StepFailed)


def check_outputs(engine: SchedulerDriver) -> None:
    """Asserts that every sequence that was left alone has exactly the output of a run without faults."""
    for record in engine.records.values():
        sequence = record.sequence
        expected, finish = reference(
            record.given,
            sequence.stopping,
            # A prompt goes on in another pool, whose context is its own.
            max_model_len=engine.config.max_model_len if sequence.mode is Mode.GENERATE else sys.maxsize,
            output_base=sequence.output_base,
            cache_salt=sequence.cache_salt,
            seed=sequence.sampling.seed,
        )
        assert record.output == expected[: len(record.output)]
        if record.aborted or record.error or record.never_began:
            continue
        if sequence.mode is Mode.GENERATE:
            assert (record.output, record.finish) == (expected, finish)
        else:
            assert len(record.output) == 1
            assert record.finish is (finish if len(expected) == 1 else None)
            assert record.first or record.progress == len(record.given)


def settle(engine: SchedulerDriver) -> None:
    """Steps to the end: outputs are right, and nothing is held."""
    engine.run()
    check_outputs(engine)
    engine.assert_idle()


def parts(engine: SchedulerDriver) -> list[tuple[int, int, int]]:
    """Returns (seq_id, start, tokens) of each part of the step in flight."""
    assert engine.plan is not None
    return [(part.seq_id, part.start, part.num_tokens) for part in engine.plan.sequences]
