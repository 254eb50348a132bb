"""Schedules, runs and absorbs steps on one thread, over one model and one block pool.

Owns: the step thread, the lock over pool and scheduler, and the life of what it loads. Never: leases, transfers, gRPC.
Callers add, adopt and abort sequences on any thread; the engine reports all events to `on_step`, on the step thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from services.core.clock import Clock, MonotonicClock
from services.core.errors import StepFailed
from services.core.hashing import BlockHash, num_blocks_for
from services.core.start_progress import TellProgress, tell_nobody
from services.engine.config import EngineConfig, EngineInfo, EngineStats, StepReport
from services.engine.cost_model import CostModel
from services.engine.schedule.prefix import cacheable_prefix, hash_prompt
from services.engine.schedule.scheduler import Scheduler, SchedulerConfig
from services.engine.schedule.sequence import Sequence, SequenceEvent, StepPlan, StepResult
from services.engine.step_tally import StepTally
from services.engine.warm_up import Loaded, warm_up
from services.engine.worker_engine import BlockReservation, OnStep
from services.kv.handoff_admission import EngineRoom
from services.kv.pool import Holder
from services.kv.pool_face import PoolFace

logger = logging.getLogger(__name__)

_AT_REST_S = 0.1
"""How long the engine is without work before it does what is not urgent: right after a step, others need the processor
to hand over what it computed."""

_LONGEST_STEP_MS = 5000.0
"""Milliseconds that a step should take at most, by which chunks of prompts are cut. It is a sixth of the time after
which routers take a step for stuck unless told otherwise (`RouterConfig.step_timeout_s`)."""
_HELD_UP = 3.0
"""The ratio of a step's time to the time that its thread ran, above which the step was held up (on a CPU)."""

Loader = Callable[[EngineConfig], Loaded]


class Engine(PoolFace):
    """Serves a loaded model with a block pool, a scheduler and a step thread. It is a `WorkerEngine`.

    It works with any model that a loader makes; `loading.load` is the loader of transformers models.
    """

    _lock: threading.Lock

    def __init__(
        self,
        config: EngineConfig,
        loader: Loader,
        *,
        clock: Clock | None = None,
        processor_s: Callable[[], float] | None = None,
        tell: TellProgress = tell_nobody,
    ) -> None:
        """Loads the model and measures a few steps; `tell` hears of each. Raises what the loader and these steps raise.

        No sequence runs before `start`. `processor_s` returns the seconds that the calling thread has run, where it is
        this processor that computes the steps: by it a step that was held up is told from one that is slow.
        """
        self._costs = CostModel()
        # The model is loaded on a thread that ends before the step thread begins. OpenMP keeps a team of threads for
        # every live thread that has computed, and lets all teams spin less once they have more threads than there are
        # cores, which would make steps slower (see `cpu.openmp`).
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-load") as passing:
            loaded = passing.submit(_prepare, loader, config, self._costs, tell).result()
        self.info: EngineInfo = loaded.info
        self.cache = loaded.cache
        super().__init__(loaded.info.num_blocks, loaded.info.block_size, threading.Lock())  # the lock guards all below
        self._scheduler = Scheduler(
            self._pool,
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=loaded.info.max_model_len,
                max_leased_blocks=loaded.info.num_blocks // 2 if config.limit_leased_blocks else None,
            ),
        )
        self._arrivals: dict[int, Sequence] = {}
        """Sequences by id that the scheduler does not know yet, because their prompts are not hashed yet."""
        self.consecutive_step_failures = 0
        self.tally = StepTally()
        """Counts of what steps have done, for metrics."""
        self._runner = loaded.runner
        self._touch = loaded.touch
        self._clock = clock or MonotonicClock()
        self._processor_s = processor_s
        self._step_started_s: float | None = None
        self._step_began_processor_s = 0.0
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # -- from any thread ----------------------------------------------------------------------------------------------

    def start(self, on_step: OnStep) -> None:
        """Starts the step thread; call it once. The thread reports all events to `on_step`, which must not block: the
        next step waits until it returns."""
        assert self._thread is None, "an engine starts once"
        self._thread = threading.Thread(target=self._loop, args=(on_step,), name="engine-step", daemon=True)
        self._thread.start()

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose prompt is to be computed (see `Scheduler.add`). The step thread hashes the prompt."""
        with self._lock:
            self._arrivals[sequence.seq_id] = sequence
        self._wake.set()

    def adopt(
        self,
        sequence: Sequence,
        prefix: Iterable[int],
        block_ids: Iterable[int],
        first_token: int,
        holder: Holder,
        *,
        further: Iterable[tuple[Sequence, int]] = (),
        spare: Iterable[int] = (),
    ) -> None:
        """Takes over a sequence whose KV is in this pool (see `WorkerEngine.adopt`)."""
        block_ids, spare = tuple(block_ids), tuple(spare)
        hash_prompt(sequence, self.info.block_size)
        with self._lock:
            self._pool.transfer((*block_ids, *spare), holder, Holder.SEQUENCE)
            try:
                self._scheduler.adopt(sequence, prefix, block_ids, first_token, further=further, spare=spare)
            except BaseException:
                self._pool.transfer((*block_ids, *spare), Holder.SEQUENCE, holder)
                raise
        self._wake.set()

    def abort(self, seq_id: int) -> None:
        """Ends a sequence without an event; if a step computes it now, at the end of that step. Unknown ids are
        ignored."""
        with self._lock:
            if self._arrivals.pop(seq_id, None) is None:
                self._scheduler.abort(seq_id)
        self._wake.set()

    def was_admitted(self, sequence: Sequence) -> bool:
        """Returns whether the sequence's `Admitted` event was reported or will be (see `WorkerEngine.was_admitted`)."""
        return sequence.admitted_s is not None

    def hash_prompt(self, sequence: Sequence) -> None:
        """Computes the hashes of the sequence's full blocks (see `WorkerEngine.hash_prompt`)."""
        hash_prompt(sequence, self.info.block_size)

    def reserve(
        self, sequence: Sequence, check: Callable[[int, EngineRoom], None], num_further: int = 0
    ) -> BlockReservation:
        """Sets blocks aside for an import (see `WorkerEngine.reserve`)."""
        # The block of the prompt's last token is always imported: unless it is full, the first step here writes to it,
        # and blocks of the prefix cache are never written.
        hashes = cacheable_prefix(sequence, self.info.block_size)
        with self._lock:
            pool = self._pool
            prefix = pool.match_prefix(hashes)
            pool.acquire(prefix, Holder.SEQUENCE)
            num_blocks = num_blocks_for(len(sequence.token_ids), pool.block_size)
            num_fresh = num_blocks - len(prefix)
            # In a small pool not all can have one beside the blocks of the sequence and one to grow into.
            num_spare = min(num_further, max(0, pool.num_blocks - num_blocks - 1))
            try:
                check(num_fresh + num_spare, self._room())
                fresh = pool.allocate(num_fresh + num_spare, Holder.IMPORT)
                return BlockReservation(prefix, fresh[:num_fresh], fresh[num_fresh:])
            except BaseException:
                pool.release(prefix, Holder.SEQUENCE)
                raise

    def prefix_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Returns the hashes of the blocks that may be cached (see `WorkerEngine.prefix_hashes`)."""
        return cacheable_prefix(sequence, self.info.block_size)

    def _room(self) -> EngineRoom:
        """Returns the room as of now; the caller has the lock."""
        pool, scheduler = self._pool, self._scheduler
        return EngineRoom(
            num_available=pool.num_available,
            num_blocks=pool.num_blocks,
            num_sequences=scheduler.num_running + scheduler.num_waiting + len(self._arrivals),
            max_num_seqs=scheduler.config.max_num_seqs,
            num_preempted=scheduler.num_preempted,
            num_wanted=scheduler.num_wanted_blocks
            + sum(num_blocks_for(len(sequence.token_ids), pool.block_size) for sequence in self._arrivals.values()),
        )

    def _blocks_freed(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """Frees the pool's memory. Call it after `stop`."""
        self.cache.close()

    def device_memory(self) -> dict[str, int]:
        """Returns bytes of accelerator memory by kind (see `WorkerEngine.device_memory`)."""
        return self._runner.device_memory()

    def check_idle(self) -> None:
        """Raises AssertionError unless no sequence is left, nothing holds a block, and all counts agree."""
        with self._lock:
            assert not self._arrivals, f"sequences left: {sorted(self._arrivals)}"
            self._scheduler.check_idle()
            assert self._pool.ledger().idle, self._pool.ledger()

    def stop(self) -> None:
        """Waits for the running step, then drops all sequences without events. Calling it again changes nothing."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._arrivals.clear()
            for seq_id in list(self._scheduler.sequences):
                self._scheduler.abort(seq_id)
            self._scheduler.take_events()

    def join(self) -> None:
        """Blocks the calling thread until the step thread has ended, after `stop` or because of a defect."""
        assert self._thread is not None, "the engine was started"
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Returns whether the step thread runs. It does not before `start`, after `stop`, and after a defect of the
        engine itself, which is logged."""
        return self._thread is not None and self._thread.is_alive()

    def stats(self) -> EngineStats:
        """Returns the engine's numbers as of now."""
        started_s, now = self._step_started_s, self._clock.now()
        with self._lock:
            costs = self._costs.at(now)
            arriving_tokens = sum(len(sequence.token_ids) for sequence in self._arrivals.values())
            return EngineStats(
                num_running=self._scheduler.num_running,
                num_waiting=self._scheduler.num_waiting + len(self._arrivals),
                queued_prefill_tokens=self._scheduler.queued_prefill_tokens + arriving_tokens,
                ledger=self._pool.ledger(),
                num_preemptions=self._scheduler.num_preemptions,
                prefix_tokens_queried=self._scheduler.prefix_tokens_queried,
                prefix_tokens_hit=self._scheduler.prefix_tokens_hit,
                ms_per_prefill_token=costs.ms_per_prefill_token,
                ms_per_further_prefill_token=costs.ms_per_further_prefill_token,
                ms_per_decode_step=costs.ms_per_decode_step,
                ms_per_decode_sequence=costs.ms_per_decode_sequence,
                tokens_per_prefill_step=costs.tokens_per_prefill_step,
                prefill_step=self.tally.prefill_step,
                decode_step=self.tally.decode_step,
                current_step_ms=0.0 if started_s is None else (now - started_s) * 1e3,
                num_steps=self.tally.num_steps,
                num_tokens=self.tally.num_tokens,
                consecutive_step_failures=self.consecutive_step_failures,
            )

    # -- on the step thread -------------------------------------------------------------------------------------------

    def _loop(self, on_step: OnStep) -> None:
        try:
            while True:
                # The event is cleared before the looks for an end and for work. So what is told from here on is either
                # found by these looks, or ends the wait below.
                self._wake.clear()
                if self._stopping:
                    return
                if not self._step(on_step) and not self._wake.wait(_AT_REST_S):
                    self._touch_blocks()
                    self._wake.wait()
        except Exception:
            # This is a defect of the engine or of on_step, not of a step. `alive` is false from now on.
            logger.critical("the step thread ends because of a defect; no further steps run", exc_info=True)

    def _touch_blocks(self) -> None:
        """Makes the memory of the blocks that come next ready, until something else is to be done."""
        while self._touch is not None and self._touch(self._pool.num_used) and not self._wake.is_set():
            pass

    def _step(self, on_step: OnStep) -> bool:
        """Schedules, runs and absorbs one step; returns False if there was nothing to run or report."""
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
        """Schedules a step and reports the events of scheduling. Returns the plan, and whether there were such
        events."""
        started_s = self._clock.now()
        self._step_began_processor_s = self._processor_s() if self._processor_s is not None else 0.0
        self._take_arrivals()
        with self._lock:
            plan = self._scheduler.schedule(started_s, self._costs.tokens_within(_LONGEST_STEP_MS, started_s))
            events = self._scheduler.take_events()
        if events:
            # They are reported before the step runs, so that the router can place the decode leg during the first
            # chunk.
            on_step(StepReport(tuple(events), 0, 0, 0, started_s, started_s))
        self._step_started_s = started_s if plan.sequences else None
        if plan.sequences:
            self.tally.scheduled(self._clock.now() - started_s)
        return plan, bool(events)

    def _take_arrivals(self) -> None:
        """Hashes the prompts that have arrived, without the lock, and passes them to the scheduler."""
        with self._lock:
            arrived = list(self._arrivals.values())
        for sequence in arrived:
            hash_prompt(sequence, self.info.block_size)
        with self._lock:
            for sequence in arrived:
                if self._arrivals.pop(sequence.seq_id, None) is not None:  # not aborted meanwhile
                    self._scheduler.add(sequence)

    def _finish(self, plan: StepPlan, result: StepResult | Exception, on_step: OnStep) -> None:
        """Absorbs and reports a step that has run or raised."""
        assert self._step_started_s is not None, "a step has begun"
        started_s, ended_s = self._step_started_s, self._clock.now()
        self._step_started_s = None
        events = self._absorb(plan, result, started_s, ended_s)
        self.tally.absorbed(self._clock.now() - ended_s)
        on_step(StepReport(tuple(events), plan.step_number, plan.num_tokens, plan.num_decodes, started_s, ended_s))

    def _absorb(
        self, plan: StepPlan, result: StepResult | Exception, started_s: float, ended_s: float
    ) -> list[SequenceEvent]:
        seconds = ended_s - started_s
        held_up = self._was_held_up(seconds)
        self.tally.step(plan, result, started_s, ended_s, held_up=held_up)
        if isinstance(result, Exception):
            self.consecutive_step_failures += 1
            logger.error("step %d failed: its sequences end", plan.step_number, exc_info=result)
            # The frames of the traceback refer to the step's tensors, whose memory `reclaim` is to give back.
            result.__traceback__ = None
            self._runner.reclaim()
            with self._lock:
                return self._scheduler.fail(plan, StepFailed(f"step {plan.step_number} failed: {result}"), ended_s)
        self.consecutive_step_failures = 0
        with self._lock:
            self._costs.observe(plan.num_prefill_tokens, plan.num_decodes, seconds * 1e3, ended_s, held_up=held_up)
            return self._scheduler.update(plan, result, ended_s)

    def _was_held_up(self, seconds: float) -> bool:
        """Returns whether the step that has just ended, and took `seconds`, was stopped or waited for the processor for
        most of that time."""
        if self._processor_s is None:
            return False
        return seconds > _HELD_UP * (self._processor_s() - self._step_began_processor_s)


def _prepare(loader: Loader, config: EngineConfig, costs: CostModel, tell: TellProgress) -> Loaded:
    """Loads the model and warms it up; the durations of the warm-up's steps are added to `costs`."""
    loaded = loader(config)
    warm_up(loaded, config, costs, tell)
    return loaded
