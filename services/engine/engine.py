"""The engine: one thread that schedules, runs and absorbs steps, over one model and one block pool.

Owns: the step thread, the lock over pool and scheduler, and the life of what it loads. Never: leases, transfers, gRPC.
Callers add, adopt and abort from any thread; everything that happens comes back through `on_step`, on the step thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from services.core.clock import Clock, MonotonicClock
from services.core.errors import StepFailed
from services.engine.block_pool import BlockPool, Holder
from services.engine.config import EngineConfig, EngineInfo, EngineStats, StepReport
from services.engine.cost_model import CostModel
from services.engine.loading import Loaded, load, warm_up
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.sequence import Sequence, SequenceEvent, StepPlan, StepResult
from services.engine.step_tally import StepTally

logger = logging.getLogger(__name__)

OnStep = Callable[[StepReport], None]
Loader = Callable[[EngineConfig], Loaded]


class Engine:
    def __init__(self, config: EngineConfig, *, clock: Clock | None = None, loader: Loader = load) -> None:
        """Loads and checks the model, and measures a few steps. Raises UnsupportedModel, ConfigError.

        Nothing runs until `start`.
        """
        self._costs = CostModel()
        # On a thread that is over before the step thread begins: OpenMP keeps a team of threads for every thread that
        # ever computed, and makes them all wait less eagerly once there are more than cores (see `core.openmp`).
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-load") as passing:
            loaded = passing.submit(_prepare, loader, config, self._costs).result()
        self.info: EngineInfo = loaded.info
        self.cache = loaded.cache
        self.lock = threading.Lock()
        """Guards `pool` and `scheduler`. Held for microseconds, never during a step."""
        self.pool = BlockPool(loaded.info.num_blocks, loaded.info.block_size)
        self.scheduler = Scheduler(
            self.pool,
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=loaded.info.max_model_len,
                max_leased_blocks=loaded.info.num_blocks // 2 if config.limit_leased_blocks else None,
            ),
        )
        self.consecutive_step_failures = 0
        self.tally = StepTally()
        """For metrics."""
        self._runner = loaded.runner
        self._clock = clock or MonotonicClock()
        self._step_started_s: float | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # -- from any thread ----------------------------------------------------------------------------------------------

    def start(self, on_step: OnStep) -> None:
        """on_step must not block: the next step waits for it."""
        assert self._thread is None, "an engine starts once"
        self._thread = threading.Thread(target=self._loop, args=(on_step,), name="engine-step", daemon=True)
        self._thread.start()

    def add(self, sequence: Sequence) -> None:
        with self.lock:
            self.scheduler.add(sequence)
        self._wake.set()

    def adopt(self, sequence: Sequence, block_ids: Iterable[int], holder: Holder) -> None:
        """Takes over a sequence whose KV is here (see `Scheduler.adopt`).

        The references of these of its blocks pass from `holder` to it; it has those of the others already.
        """
        with self.lock:
            self.pool.transfer(block_ids, holder, Holder.SEQUENCE)
            self.scheduler.adopt(sequence)
        self._wake.set()

    def abort(self, seq_id: int) -> None:
        """Ends a sequence without an event; at the end of the step that it is in, if any. Unknown ids are ignored."""
        with self.lock:
            self.scheduler.abort(seq_id)
        self._wake.set()

    def wake(self) -> None:
        """To be called when blocks were freed: someone may fit now."""
        self._wake.set()

    def stop(self) -> None:
        """Waits for the step in flight; sequences are dropped without events. Again is harmless."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self.lock:
            for seq_id in list(self.scheduler.sequences):
                self.scheduler.abort(seq_id)
            self.scheduler.take_events()

    def join(self) -> None:
        """Returns when the step thread has ended: after `stop`, or by a defect. Blocks; not for the event loop."""
        assert self._thread is not None, "join follows start"
        self._thread.join()

    @property
    def alive(self) -> bool:
        """The step thread runs. False after a defect of the engine itself, which the log tells."""
        return self._thread is not None and self._thread.is_alive()

    def stats(self) -> EngineStats:
        started_s, now = self._step_started_s, self._clock.now()
        with self.lock:
            return EngineStats(
                num_running=self.scheduler.num_running,
                num_waiting=self.scheduler.num_waiting,
                queued_prefill_tokens=self.scheduler.queued_prefill_tokens,
                ledger=self.pool.ledger(),
                num_preemptions=self.scheduler.num_preemptions,
                prefix_tokens_queried=self.scheduler.prefix_tokens_queried,
                prefix_tokens_hit=self.scheduler.prefix_tokens_hit,
                ms_per_prefill_token=self._costs.ms_per_prefill_token,
                ms_per_decode_step=self._costs.ms_per_decode_step,
                ms_per_decode_sequence=self._costs.ms_per_decode_sequence,
                current_step_ms=0.0 if started_s is None else (now - started_s) * 1e3,
                num_steps=self.tally.num_steps,
                num_failed_steps=self.tally.num_failed,
                last_batch_size=self.tally.last_batch_size,
                consecutive_step_failures=self.consecutive_step_failures,
            )

    # -- on the step thread -------------------------------------------------------------------------------------------

    def _loop(self, on_step: OnStep) -> None:
        try:
            while not self._stopping:
                # Before looking for work: whatever arrives from here on is seen now or wakes the wait below.
                self._wake.clear()
                if not self._step(on_step):
                    self._wake.wait()
        except Exception:
            # A defect of the engine or of on_step, not of a step. `alive` tells whoever watches.
            logger.critical("the step thread ends", exc_info=True)

    def _step(self, on_step: OnStep) -> bool:
        """One turn; False if there was nothing to do."""
        plan, anything = self._begin(on_step)
        if not plan.sequences:
            return anything
        try:
            result: StepResult | Exception = self._runner.run(plan)
        except Exception as error:
            result = error
        self._finish(plan, result, on_step)
        return True

    def _begin(self, on_step: OnStep) -> tuple[StepPlan, bool]:
        """What to run next, and whether there was anything to tell before."""
        started_s = self._clock.now()
        with self.lock:
            plan = self.scheduler.schedule(started_s)
            events = self.scheduler.take_events()
        if events:
            # Before the step: whoever binds the other half of a handoff need not wait for the first chunk.
            on_step(StepReport(tuple(events), 0, 0, 0, started_s, started_s))
        if plan.sequences:
            self._step_started_s = started_s
            self.tally.scheduled(self._clock.now() - started_s)
        return plan, bool(events)

    def _finish(self, plan: StepPlan, result: StepResult | Exception, on_step: OnStep) -> None:
        """The step has run, or raised."""
        assert self._step_started_s is not None, "a step that ends has begun"
        started_s, ended_s = self._step_started_s, self._clock.now()
        self._step_started_s = None
        events = self._absorb(plan, result, started_s, ended_s)
        self.tally.absorbed(self._clock.now() - ended_s)
        on_step(StepReport(tuple(events), plan.step_number, plan.num_tokens, plan.num_decodes, started_s, ended_s))

    def _absorb(
        self, plan: StepPlan, result: StepResult | Exception, started_s: float, ended_s: float
    ) -> list[SequenceEvent]:
        self.tally.step(plan, result, started_s, ended_s)
        if isinstance(result, Exception):
            self.consecutive_step_failures += 1
            logger.error("step %d failed: its sequences end", plan.step_number, exc_info=result)
            # The traceback's frames hold the step's tensors.
            result.__traceback__ = None
            self._runner.reclaim()
            with self.lock:
                return self.scheduler.fail(plan, StepFailed(f"step {plan.step_number} failed: {result}"), ended_s)
        self.consecutive_step_failures = 0
        self._costs.observe(plan.num_tokens - plan.num_decodes, plan.num_decodes, (ended_s - started_s) * 1e3)
        with self.lock:
            return self.scheduler.update(plan, result, ended_s)


def _prepare(loader: Loader, config: EngineConfig, costs: CostModel) -> Loaded:
    loaded = loader(config)
    warm_up(loaded, config, costs)
    return loaded
