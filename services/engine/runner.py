"""Runs a step plan on the device: makes its flat inputs, runs the forward pass, and samples tokens.

Owns: the number of CPU threads of small steps. Never: what a step runs, or what follows from its result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor

from services.engine.model.decode_graphs import DecodeGraphs
from services.engine.model.inputs import flatten, partly_filled
from services.engine.model.kv_cache import KVCache
from services.engine.model.paged_model import PagedModel
from services.engine.sampling.masks import NO_MASKS, MaskMaker
from services.engine.sampling.sampler import sample
from services.engine.sampling.scoring import score
from services.engine.schedule.sequence import ScheduledSequence, StepPlan, StepResult
from services.engine.warm_up import WARM_DECODES

logger = logging.getLogger(__name__)

_FEW_TOKENS = 2
"""Most tokens of a step that runs on `DeviceRunner.threads_of_few` threads."""


class DeviceRunner:
    """Runs the steps of a loaded model over its pool. It is a `warm_up.Runner`."""

    def __init__(self, model: PagedModel, cache: KVCache, graphs: DecodeGraphs | None = None) -> None:
        """Takes the graphs by which steps of decodes are to run, if any; `tune` has them captured."""
        self.threads_of_few: int | None = None
        """CPU threads of steps of at most `_FEW_TOKENS` tokens. With None, which it always is on accelerators, all
        steps use torch's number."""
        self._model = model
        self._cache = cache
        self._graphs = graphs
        self._masks = MaskMaker()

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
        is_constrained = any(part.constraint is not None for part in plan.sequences)
        masking = self._masks.begin(plan.sequences, self._model.shape.vocab_size) if is_constrained else None
        try:
            compute = self._prepared(plan.sequences)
            self._cache.duplicate(plan.copies)
            self._cache.clear(partly_filled(plan.sequences, self._cache.shape.block_size))
            ready = time.perf_counter()
            logits = compute()
            forwarded = time.perf_counter()
        finally:
            masks = NO_MASKS if masking is None else masking.result()
        masked = time.perf_counter()
        rows = [row for part in plan.sequences for row in part.rows]
        num_sampled = sum(bool(part.rows) for part in plan.sequences)
        # Scored first: the sampler changes the logits.
        scored = score(logits[num_sampled:], plan.sequences)
        tokens = iter(sample(_for_all_rows(logits[:num_sampled], plan.sequences), rows, masks) if rows else [])
        if self._cache.device.type != "cpu":
            # Copies of blocks run on streams of their own, and the step does not wait for them.
            torch.accelerator.current_stream(self._cache.device).synchronize()
        sampled = {part.seq_id: tuple(islice(tokens, len(part.rows))) for part in plan.sequences if part.rows}
        return StepResult(
            {seq_id: tokens for seq_id, tokens in sampled.items() if seq_id not in masks.failed},
            scored,
            masks.failed,
            inputs_s=ready - started,
            model_s=forwarded - ready,
            masks_s=masked - forwarded,
            sample_s=time.perf_counter() - masked,
        )

    def _prepared(self, parts: tuple[ScheduledSequence, ...]) -> Callable[[], Tensor]:
        """Puts the step's inputs on the device. Returns the function that computes the logits of its rows."""
        graph = None if self._graphs is None else self._graphs.for_step(parts)
        if graph is not None:
            graph.load(parts)
            return graph.run
        inputs = flatten(parts, self._cache.shape.block_size, self._cache.device)
        return lambda: self._model.forward(inputs, self._cache)

    def reclaim(self) -> None:
        """Cleans up after a failed step (see `Runner.reclaim`). Raises what torch raises if the device is lost."""
        if self._cache.device.type != "cpu":
            torch.accelerator.synchronize(self._cache.device)
        if self._cache.device.type == "cuda":
            torch.cuda.empty_cache()

    def tune(self, decode: Callable[[], float]) -> None:
        """Chooses by a decode of one sequence: graphs or none, and on a CPU one thread for steps of few tokens or
        all."""
        if self._graphs is not None:
            self._choose_graphs(self._graphs, decode)
        if self._cache.device.type == "cpu" and torch.get_num_threads() > 1:
            self._choose_threads(decode)

    def _choose_graphs(self, graphs: DecodeGraphs, decode: Callable[[], float]) -> None:
        plain_ms = min(decode() for _ in range(WARM_DECODES))
        graphs.prepare()
        if not len(graphs):
            return
        graph_ms = min(decode() for _ in range(WARM_DECODES))
        logger.info("a decode takes %.1f ms, and %.1f ms by one of %d graphs", plain_ms, graph_ms, len(graphs))
        if graph_ms > plain_ms:
            graphs.drop()

    def _choose_threads(self, decode: Callable[[], float]) -> None:
        """Lets steps of few tokens run on one CPU thread, if a decode is faster on one.

        Such a step consists of hundreds of short operators. Dividing each among threads may cost more than it saves.
        """
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


def _for_all_rows(logits: Tensor, parts: tuple[ScheduledSequence, ...]) -> Tensor:
    """Returns a row of logits for each row that is sampled: further answers are sampled from copies of their first's.

    logits: [number of parts that have rows, vocab_size]
    """
    counts = [len(part.rows) for part in parts if part.rows]
    if len(counts) == sum(counts):
        return logits
    return logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0, output_size=sum(counts))
