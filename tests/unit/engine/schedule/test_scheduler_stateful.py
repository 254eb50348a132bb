"""Tests the scheduler under random interleavings: the ledger holds after every act, and no fault shows in an output."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.engine.schedule.sequence import Mode
from tests.support.examples import num_examples
from tests.support.scheduler_checks import check_outputs
from tests.support.scheduler_driver import SchedulerDriver

# Few prompts with long common beginnings, so that prefixes are shared, duplicated and evicted all the time.
STEMS = ([1] * 20, [1] * 6 + [2] * 14, [3, 4] * 10)

prompts = st.builds(
    lambda stem, length, tail: stem[:length] + tail,
    st.sampled_from(STEMS),
    st.integers(0, 20),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
options = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 12),
        "min_tokens": st.integers(0, 3),
        "stop": st.frozensets(st.integers(0, 6), max_size=2),
        "priority": st.integers(-1, 1),
        "cache_salt": st.sampled_from(["", "tenant"]),
        "output_base": st.sampled_from([0, 0, 1]),
        "num_answers": st.sampled_from([1, 1, 2, 3, 6]),
    },
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 16),
        block_size=st.sampled_from([2, 4, 1]),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 32]),
        max_model_len=st.sampled_from([60, 25]),
        half=st.booleans(),
    )
    def start(self, num_blocks: int, half: bool, **config: int) -> None:
        self.engine = SchedulerDriver(num_blocks, max_leased_blocks=num_blocks // 2 if half else None, **config)

    @rule(prompt=prompts, options=options, mode=st.sampled_from(list(Mode)))
    def add(self, prompt: list[int], options: dict[str, object], mode: Mode) -> None:
        self.engine.add(prompt, mode=mode, **options)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(2, 12),
        priority=st.integers(-1, 1),
        spare=st.booleans(),
        num_answers=st.sampled_from([1, 1, 2, 5]),
    )
    def adopt_import(self, prompt: list[int], **options: Any) -> None:
        self.engine.adopt_import(prompt[: self.engine.config.max_model_len - 2], **options)

    @precondition(lambda self: self.engine.leases)
    @rule(data=st.data(), max_tokens=st.integers(2, 12), num_answers=st.sampled_from([1, 1, 3]))
    def adopt_lease(self, data: st.DataObject, max_tokens: int, num_answers: int) -> None:
        self.engine.adopt_lease(data.draw(st.sampled_from(sorted(self.engine.leases))), max_tokens, num_answers)

    @precondition(lambda self: self.engine.leases)
    @rule(data=st.data())
    def drop_lease(self, data: st.DataObject) -> None:
        self.engine.drop_lease(data.draw(st.sampled_from(sorted(self.engine.leases))))

    @precondition(lambda self: self.engine.records)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted(self.engine.scheduler.sequences) or sorted(self.engine.records)
        self.engine.abort(data.draw(st.sampled_from(live)))

    @rule(num_blocks=st.integers(1, 6))
    def take_foreign(self, num_blocks: int) -> None:
        self.engine.take_foreign(num_blocks)

    @precondition(lambda self: self.engine.foreign)
    @rule(data=st.data())
    def release_foreign(self, data: st.DataObject) -> None:
        self.engine.release_foreign(data.draw(st.integers(0, len(self.engine.foreign) - 1)))

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0]))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @precondition(lambda self: self.engine.plan is None)
    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()
            self.engine.check()

    @precondition(lambda self: self.engine.plan is None)
    @rule(take_events=st.booleans())
    def begin(self, take_events: bool) -> None:
        self.engine.begin(take_events=take_events)

    @precondition(lambda self: self.engine.plan is not None)
    @rule()
    def finish(self) -> None:
        self.engine.finish()

    @precondition(lambda self: self.engine.plan is not None)
    @rule()
    def crash(self) -> None:
        self.engine.crash()

    @invariant()
    def ledger_holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        if engine.plan is not None:
            engine.finish()
        while engine.foreign:
            engine.release_foreign(0)
        engine.run()
        for seq_id in list(engine.leases):  # of prefills that were aborted or failed
            engine.drop_lease(seq_id)
        check_outputs(engine)
        engine.assert_idle()


SchedulerMachine.TestCase.settings = settings(
    max_examples=num_examples(150), stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase
