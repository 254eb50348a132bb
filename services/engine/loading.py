"""From a configuration to a model that was shown to work, with its pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from services.core.errors import ConfigError
from services.core.hashing import num_blocks_for
from services.engine import attention, servable, verification, weights
from services.engine.config import EngineConfig, EngineInfo
from services.engine.cost_model import CostModel
from services.engine.fingerprint import weights_digest
from services.engine.host_memory import keep_freed_memory
from services.engine.kv_cache import KVCache, KVShape
from services.engine.model import ATTENTION, ModelShape, PagedModel
from services.engine.native.replacement import use_native_modules
from services.engine.packed_linear import pack_linears
from services.engine.runner import DeviceRunner, Runner
from services.engine.sequence import SamplingParams, ScheduledSequence, StepPlan

logger = logging.getLogger(__name__)

_HOST_SHARE, _DEVICE_SHARE = 0.2, 0.9
_WARM_DECODES = 3
_WARM_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class Loaded:
    info: EngineInfo
    cache: KVCache
    runner: Runner


def load(config: EngineConfig) -> Loaded:
    """Raises UnsupportedModel, or ConfigError naming the flag."""
    keep_freed_memory()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    started = time.perf_counter()
    module = weights.load_model(Path(config.model_path), config.dtype, device, ATTENTION)
    servable.check_config(module.config)
    shape = servable.examine(module)
    digest = weights_digest(module)
    weight_bytes = sum(parameter.nbytes for parameter in module.parameters())
    expected = verification.plain_logits(module, shape.vocab_size)
    num_parts, num_layers = use_native_modules(module)  # first: it looks for plain linear layers
    logger.info(
        "native: %d norms and gates, %d whole layers; packed: %d linear layers",
        num_parts,
        num_layers,
        pack_linears(module),
    )
    backend = attention.select(
        device, shape.dtype, shape.num_heads, shape.num_kv_heads, shape.head_dim, config.block_size
    )
    model = PagedModel(module, shape, backend)
    verification.verify(model, config.block_size, expected)
    kv_shape = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.block_size, shape.dtype)
    num_blocks = _num_blocks(config, device, kv_shape, weight_bytes)
    max_model_len = _max_model_len(config, shape, num_blocks)
    cache = KVCache(kv_shape, num_blocks, device)
    info = EngineInfo(
        model_id=config.model_id,
        weights_digest=digest,
        dtype=weights.DTYPE_NAMES[shape.dtype],
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        device=config.device,
    )
    logger.info("loaded %s in %.1f s: %s", config.model_id, time.perf_counter() - started, info)
    return Loaded(info, cache, DeviceRunner(model, cache))


def warm_up(loaded: Loaded, config: EngineConfig, costs: CostModel) -> None:
    """Runs a full prefill step and single decodes on a pool that nobody uses yet: first uses are slow, and costs known.

    What it leaves in the blocks is no one's, like what a sequence leaves in them.
    """
    info = loaded.info
    num_tokens = min(config.max_num_batched_tokens, info.max_model_len - 1, info.num_blocks * info.block_size - 1)
    blocks = tuple(range(num_blocks_for(num_tokens + 1, info.block_size)))
    greedy = SamplingParams(temperature=0.0)

    def run(start: int, count: int, num_sequences: int = 1) -> float:
        part = ScheduledSequence(0, start, (0,) * count, blocks, samples=True, position=0, sampling=greedy)
        started = time.perf_counter()
        loaded.runner.run(StepPlan(0, (part,) * num_sequences))
        return (time.perf_counter() - started) * 1e3

    run(0, num_tokens)
    costs.observe(num_tokens, 0, run(0, num_tokens))
    if isinstance(loaded.runner, DeviceRunner) and loaded.cache.device.type == "cpu" and torch.get_num_threads() > 1:
        _choose_threads(loaded.runner, lambda: run(num_tokens, 1))
    for _ in range(_WARM_DECODES):
        for num_sequences in (1, min(_WARM_SEQUENCES, config.max_num_seqs)):
            costs.observe(0, num_sequences, run(num_tokens, 1, num_sequences))


def _choose_threads(runner: DeviceRunner, decode: Callable[[], float]) -> None:
    """One thread for a single decode, where that is faster: its parts are small, and hundreds are handed round."""
    many_ms = min(decode() for _ in range(_WARM_DECODES))
    runner.threads_of_few = 1
    one_ms = min(decode() for _ in range(_WARM_DECODES))
    if many_ms < one_ms:
        runner.threads_of_few = None
    logger.info("a decode takes %.0f ms on %d threads, %.0f ms on one", many_ms, torch.get_num_threads(), one_ms)


def _max_model_len(config: EngineConfig, shape: ModelShape, num_blocks: int) -> int:
    wanted = config.max_model_len
    if wanted is not None and wanted > shape.max_model_len:
        raise ConfigError(f"--max-model-len: {wanted} is more than the model's {shape.max_model_len} positions")
    # A sequence that the pool can never hold is better refused before it starts than failed while it grows.
    return min(shape.max_model_len if wanted is None else wanted, num_blocks * config.block_size)


def _num_blocks(config: EngineConfig, device: torch.device, shape: KVShape, weight_bytes: int) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    share = config.memory_utilization
    if device.type == "cpu":
        total = _host_bytes()
        share = _HOST_SHARE if share is None else share
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        share = _DEVICE_SHARE if share is None else share
    num_blocks = (int(total * share) - weight_bytes) // shape.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"--memory-utilization: {share:.0%} of {total / 1e9:.1f} GB leaves no room for KV blocks beside "
            f"{weight_bytes / 1e9:.1f} GB of weights"
        )
    return num_blocks


def _host_bytes() -> int:
    """Of the machine, or of the container where that is less."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
