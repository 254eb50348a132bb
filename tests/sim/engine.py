"""Runs the real engine without its thread and its model: steps take simulated time, and compute with `SimMemory`.

Owns: when steps begin and end. Never: scheduling, the pool, the reports; `services.engine.engine.Engine` does those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Any

from services.engine.config import EngineConfig, EngineInfo
from services.engine.cost_model import CostModel
from services.engine.engine import Engine
from services.engine.sampling.masks import Masks, masks_of
from services.engine.schedule.constraint import has
from services.engine.schedule.sequence import (
    SampledToken,
    SampleRow,
    ScheduledSequence,
    ScoredToken,
    StepPlan,
    StepResult,
)
from services.engine.warm_up import Loaded
from services.engine.worker_engine import OnStep
from services.kv.layout import TORCH
from tests.sim.memory import SimMemory
from tests.sim.model import (
    EOS,
    OTHER_ENGINE,
    VOCAB_SIZE,
    History,
    Truth,
    choice_of,
    next_token,
    root_digest,
    score_after,
    slot,
)
from tests.sim.node import Node
from tests.sim.world import Actor
from tests.support.fake_runner import FakeRunner


class StepFault(Exception):
    """Is what a device raises when the seed says so."""


class SimEngine(Engine):
    def __init__(
        self,
        node: Node,
        config: EngineConfig,
        memory: SimMemory,
        step_s: float,
        weights: str,
        truth: Truth,
        *,
        says_token_ms: float = 0.0,
    ) -> None:
        """`step_s`: what a step takes, with a tenth of it for each token; give or take a half. `says_token_ms`: what
        warming up seems to have shown of a prompt token's cost; 0 for nothing."""
        self._node = node
        self._memory = memory
        self._weights = weights
        self._truth = truth
        self.is_wrong = False
        """It computes wrong: all it does, from now on."""
        runner = FakeRunner()  # only ever asked to warm up
        super().__init__(config, lambda _: Loaded(info_of(config, weights), _any(memory), runner), clock=node)
        self._costs = CostModel()  # warming up measured real time
        if says_token_ms:
            self._costs.calibrate(16, 0, 16 * says_token_ms)
        self._step_s = step_s
        self._plan: StepPlan | None = None
        self._histories: dict[int, History] = {}
        self._on_step: OnStep
        self.num_steps_to_fail = 0
        self.stuck_until_s = 0.0
        """The device does not answer before; the world's clock."""
        self._step_thread = node.new_thread()
        self._lock = _any(_Lock(node, self._step_thread))
        self._wake = _any(_Wake(self._step_thread, self._turn))

    def start(self, on_step: OnStep) -> None:
        self._on_step = on_step
        self._wake.set()

    @property
    def alive(self) -> bool:
        return not self._stopping

    def stop(self) -> None:
        self._stopping = True
        if self._plan is not None:
            self._land()
        super().stop()

    # On the step thread.

    def _turn(self) -> None:
        """`Engine._loop` until it waits: for the device, or to be woken."""
        self._wake.clear()
        if self._stopping or self._plan is not None:
            return
        plan, anything = self._begin(self._on_step)
        if plan.sequences:
            self._plan = plan
            world = self._node.world
            duration_s = self._step_s * (1 + 0.1 * plan.num_tokens) * world.random.uniform(0.5, 1.5)
            world.after(duration_s, self._device_done)
        elif anything:
            self._wake.set()

    def _device_done(self) -> None:
        world = self._node.world
        if world.now_s < self.stuck_until_s:
            world.at(self.stuck_until_s, self._device_done)
        else:
            self._step_thread.post(self._land)

    def _land(self) -> None:
        plan, self._plan = self._plan, None
        if plan is None:  # `stop` did not wait
            return
        try:
            result: StepResult | Exception = self._compute(plan)
        except StepFault as error:
            result = error
        self._finish(plan, result, self._on_step)
        self._wake.set()

    def _compute(self, plan: StepPlan) -> StepResult:
        fails = self.num_steps_to_fail > 0
        sampled: dict[int, tuple[SampledToken, ...]] = {}
        scored: dict[int, tuple[ScoredToken, ...]] = {}
        masks = masks_of(plan.sequences, VOCAB_SIZE)
        forbidden = iter(_forbidden(masks, sum(len(part.rows) for part in plan.sequences)))
        self._memory.duplicate(plan.copies)
        for part in plan.sequences:
            digest = self._read(part)
            digests, kv = [], bytearray()
            for position, token_id in enumerate(part.token_ids, part.start):
                digest = self._truth.after(digest, token_id, is_wrong=self.is_wrong)
                digests.append(digest)
                kv += slot(digest, position)
            self._memory.write_slots(part.block_ids, part.start, bytes(len(kv)) if fails else bytes(kv))
            if part.rows:
                sampled[part.seq_id] = tuple(_sample(digest, row, next(forbidden)) for row in part.rows)
            if (scoring := part.scoring) is not None:
                before = zip(digests[scoring.position - 1 - part.start :], scoring.token_ids, strict=False)
                scored[part.seq_id] = tuple(ScoredToken(score_after(*each), rank=1) for each in before)
        if fails:
            self.num_steps_to_fail -= 1
            raise StepFault("injected")
        return StepResult(sampled, scored, masks.failed)

    def _read(self, part: ScheduledSequence) -> int:
        """Returns the digest before the part, from memory; all KV before it must be that of the sequence's tokens."""
        sequence, world = self._scheduler.sequences.get(part.seq_id), self._node.world
        world.require(sequence is not None, f"{self._node.name}: sequence {part.seq_id} left under its step")
        assert sequence is not None
        history = self._histories.get(part.seq_id)
        if history is None:
            history = self._histories[part.seq_id] = History(sequence.cache_salt, self._weights)
        end = part.start + part.num_tokens
        history.extend(sequence.token_ids[history.num_tokens : end])
        if not part.start:
            return root_digest(sequence.cache_salt, self._weights)
        held = self._memory.read_slots(part.block_ids, part.start)
        world.require(
            held == history.kv[: len(held)] or self._truth.has_wrong(held),
            f"{self._node.name}: sequence {part.seq_id} reads KV that is not its own in {part.block_ids}",
        )
        return self._memory.digest_at(part.block_ids, part.start - 1)


def _sample(digest: int, row: SampleRow, forbidden: Set[int]) -> SampledToken:
    choice = choice_of(row.sampling, row.position, row.prompt_token_ids, row.output_token_ids)
    return SampledToken(next_token(digest, forbidden | set(row.masked_token_ids), choice))


def _forbidden(masks: Masks, num_rows: int) -> list[Set[int]]:
    """Returns what the constraints of a step's rows do not allow; nothing for rows without one."""
    forbidden: list[Set[int]] = [frozenset()] * num_rows
    for row, bits in zip(masks.rows, () if masks.bits is None else masks.bits, strict=True):
        forbidden[row] = {token_id for token_id in range(VOCAB_SIZE) if not has(bits, token_id)}
    return forbidden


class _Wake:
    """Stands for the engine's `threading.Event`: setting it gets the thread going."""

    def __init__(self, thread: Actor, turn: Any) -> None:
        self._thread = thread
        self._turn = turn
        self._set = False

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._thread.post(self._turn)

    def clear(self) -> None:
        self._set = False


class _Lock:
    """Stands for the engine's `threading.Lock`: whoever takes it may find that the step thread was quicker."""

    def __init__(self, node: Node, step_thread: Actor) -> None:
        self._node = node
        self._step_thread = step_thread
        self._overtaking = False

    def __enter__(self) -> None:
        thread, world = self._step_thread, self._node.world
        if not thread.ready or self._overtaking or not self._node.alive or world.random.random() > 0.3:
            return
        loop = asyncio._get_running_loop()
        if loop is None:  # it is the step thread that takes it
            return
        self._overtaking = True
        asyncio._set_running_loop(None)
        try:
            thread.ready.popleft()()
        finally:
            asyncio._set_running_loop(loop)
            self._overtaking = False

    def __exit__(self, *_: object) -> None:
        pass


def info_of(config: EngineConfig, weights: str) -> EngineInfo:
    is_other = weights == OTHER_ENGINE
    assert config.num_blocks is not None
    assert config.max_model_len is not None
    return EngineInfo(
        model_id="sim",
        weights_digest="sim-0" if is_other else weights,
        engine=OTHER_ENGINE if is_other else TORCH,
        config_digest="sim",
        numerics="sim",
        dtype="float32",
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,  # with keys and values: the 8 bytes of a slot
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_model_len=min(config.max_model_len, config.num_blocks * config.block_size),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        device="sim",
    )


def _any(value: object) -> Any:
    """Returns the value, untyped: it stands in for a type that it is not."""
    return value
