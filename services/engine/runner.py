"""Runs a step plan on the device: makes its flat inputs, runs the forward pass, and samples tokens.

Owns: the number of CPU threads of small steps. Never: what a step runs, or what follows from its result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice

import torch

from services.engine.model.inputs import flatten
from services.engine.model.kv_cache import KVCache
from services.engine.model.paged_model import PagedModel
from services.engine.sampling.sampler import sample
from services.engine.schedule.sequence import StepPlan, StepResult
from services.engine.warm_up import WARM_DECODES

logger = logging.getLogger(__name__)

_FEW_TOKENS = 2
"""Most tokens of a step that runs on `DeviceRunner.threads_of_few` threads."""


class DeviceRunner:
    """Runs the steps of a loaded model over its pool. It is a `warm_up.Runner`."""

    def __init__(self, model: PagedModel, cache: KVCache) -> None:
        self.threads_of_few: int | None = None
        """CPU threads of steps of at most `_FEW_TOKENS` tokens. With None, which it always is on accelerators, all
        steps use torch's number."""
        self._model = model
        self._cache = cache

    def run(self, plan: StepPlan) -> StepResult:
        """Runs a step (see `Runner.run`). Raises what torch raises, such as OutOfMemoryError."""
        if self.threads_of_few is None or plan.num_tokens > _FEW_TOKENS:
            return self._run(plan)
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads_of_few)
        try:
            return self._run(plan)
        finally:
            torch.set_num_threads(before)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        inputs = flatten(plan.sequences, self._cache.shape.block_size, self._cache.device)
        self._cache.clear(inputs.partly_filled)
        ready = time.perf_counter()
        logits = self._model.forward(inputs, self._cache)
        forwarded = time.perf_counter()
        rows = [row for part in plan.sequences for row in part.rows]
        tokens = iter(sample(logits, rows) if rows else [])
        if self._cache.device.type != "cpu":
            torch.accelerator.synchronize(self._cache.device)
        sampled = {part.seq_id: tuple(islice(tokens, len(part.rows))) for part in plan.sequences if part.rows}
        return StepResult(
            sampled,
            inputs_s=ready - started,
            model_s=forwarded - ready,
            sample_s=time.perf_counter() - forwarded,
        )

    def reclaim(self) -> None:
        """Cleans up after a failed step (see `Runner.reclaim`). Raises what torch raises if the device is lost."""
        if self._cache.device.type != "cpu":
            torch.accelerator.synchronize(self._cache.device)
        if self._cache.device.type == "cuda":
            torch.cuda.empty_cache()

    def tune(self, decode: Callable[[], float]) -> None:
        """Lets steps of few tokens run on one CPU thread, if a decode of one sequence is faster on one.

        Such a step consists of hundreds of short operators. Dividing each among threads may cost more than it saves.
        """
        if self._cache.device.type != "cpu" or torch.get_num_threads() == 1:
            return
        many_ms = min(decode() for _ in range(WARM_DECODES))
        self.threads_of_few = 1
        one_ms = min(decode() for _ in range(WARM_DECODES))
        if many_ms < one_ms:
            self.threads_of_few = None
        logger.info("a decode takes %.0f ms on %d threads, %.0f ms on one", many_ms, torch.get_num_threads(), one_ms)

    def device_memory(self) -> dict[str, int]:
        """Returns bytes by name: `allocated` to this process's tensors, `reserved` by torch for them, `free` on the
        device, and its `total`. The result is empty unless the device is a CUDA one."""
        device = self._cache.device
        if device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(device)
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "free": free,
            "total": total,
        }
