"""Runs a step plan on the device: plan -> flat inputs -> model -> sampled tokens."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from services.engine.inputs import flatten
from services.engine.kv_cache import KVCache
from services.engine.model import PagedModel
from services.engine.sampler import sample
from services.engine.sequence import StepPlan, StepResult

_FEW_TOKENS = 2


class Runner(Protocol):
    def run(self, plan: StepPlan) -> StepResult:
        """Returns when the step is complete on the device, so that its KV may be announced. May raise anything."""
        ...

    def reclaim(self) -> None:
        """After a failed step: gives back what the allocator keeps, so that a smaller step may fit."""
        ...


class DeviceRunner:
    """The `Runner` of a loaded model."""

    def __init__(self, model: PagedModel, cache: KVCache) -> None:
        self.threads_of_few: int | None = None
        """On CPU, for steps so small that more threads may cost more than they bring; None: as for others."""
        self._model = model
        self._cache = cache

    def run(self, plan: StepPlan) -> StepResult:
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
        sampling = [part for part in plan.sequences if part.samples]
        tokens = sample(logits, sampling) if sampling else []
        if self._cache.device.type != "cpu":
            torch.accelerator.synchronize(self._cache.device)
        sampled = {part.seq_id: token for part, token in zip(sampling, tokens, strict=True)}
        return StepResult(
            sampled,
            inputs_s=ready - started,
            model_s=forwarded - ready,
            sample_s=time.perf_counter() - forwarded,
        )

    def reclaim(self) -> None:
        if self._cache.device.type == "cuda":
            torch.cuda.empty_cache()
