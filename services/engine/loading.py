"""Loads a model as an engine's configuration says, checks that it computes correctly here, and makes its pool.

Owns: the order of these acts, the size of the pool, and the limit on a sequence's length. Never: the acts themselves
(`model`, `attention`, `cpu`), or the thread that runs steps (`engine`).
"""

from __future__ import annotations

import logging
import platform
import time
from functools import partial
from pathlib import Path

import psutil
import torch

from services.core.config import demand_kv_dtype
from services.core.container import CGROUP, memory_limit
from services.core.errors import ConfigError
from services.core.start_progress import StartProgress, TellProgress, tell_nobody
from services.engine.attention import choice
from services.engine.config import EngineConfig, EngineInfo
from services.engine.cpu.fast_paths import use_fast_paths
from services.engine.cpu.host_memory import keep_freed_memory
from services.engine.cpu.quantisation import num_weight_bytes, quantise
from services.engine.engine import Engine
from services.engine.model import fingerprint, servable, verification, weights
from services.engine.model.cuda_graph import CudaCapture
from services.engine.model.decode_graphs import DecodeGraphs
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.model.paged_model import ModelShape, PagedModel, register_attention
from services.engine.native.instruction_sets import cpu_name
from services.engine.runner import DeviceRunner
from services.engine.warm_up import Loaded

logger = logging.getLogger(__name__)

_HOST_SHARE, _DEVICE_SHARE = 0.2, 0.9
"""Shares of the memory of a CPU's host and of an accelerator that weights and pool take unless told otherwise."""

_PARTS = ("weights", "reference logits", "kernels", "verification", "KV pool")
"""What loading consists of, as it is told."""


def torch_engine(config: EngineConfig, tell: TellProgress = tell_nobody) -> Engine:
    """Returns an engine that has loaded a transformers model and is not started. Raises as `load` does.

    `tell` is called on other threads too, one at a time.
    """
    processor_s = time.thread_time if config.device == "cpu" else None
    return Engine(config, partial(load, tell=tell), processor_s=processor_s, tell=tell)


def load(config: EngineConfig, tell: TellProgress = tell_nobody) -> Loaded:
    """Returns the loaded and verified model with its pool. `tell` hears what is done now.

    Raises UnsupportedModel if the model cannot be served, and ConfigError, which names the flag, if the configuration
    does not fit the model or the memory.
    """
    keep_freed_memory()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = _device(config.device)
    demand_kv_dtype(config.kv_dtype, config.device)
    started = time.perf_counter()
    _tell_part(tell, "weights")
    module = weights.load_model(Path(config.model_path), config.dtype, device, register_attention())
    servable.check_config(module.config)
    weights_digest = fingerprint.weights_digest(module)  # before any forward pass, which may change buffers
    scheme = quantise(module, config.quantization, Path(config.model_path))
    shape = servable.examine(module)
    weight_bytes = num_weight_bytes(module)
    _tell_part(tell, "reference logits")
    expected = verification.plain_logits(module, shape.vocab_size)
    kv_dtype = weights.kv_dtype_of(config.kv_dtype, shape.dtype)
    _tell_part(tell, "kernels")
    fast_paths = use_fast_paths(module, kv_dtype)
    kv_shape = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.block_size, kv_dtype)
    attention, backend = choice.select(
        device,
        kv_shape.computed_in(shape.dtype),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        config.block_size,
        over_int8=kv_dtype == torch.int8,
    )
    model = PagedModel(module, shape, backend)
    _tell_part(tell, "verification")
    verification.verify(model, kv_shape, expected, rounds_inputs=bool(scheme))
    _tell_part(tell, "KV pool")
    num_blocks = _num_blocks(config, device, kv_shape, weight_bytes)
    max_model_len = _max_model_len(config, shape, num_blocks)
    uses_graphs = config.decode_graphs and device.type == "cuda"
    # Behind the pool's blocks there is one for the rows of a graph that have no sequence.
    cache = KVCache(kv_shape, num_blocks + uses_graphs, device)
    graphs = None
    if uses_graphs:
        attend, capture = choice.for_graphs(backend), CudaCapture(device)
        limits = {"max_num_seqs": config.max_num_seqs, "max_model_len": max_model_len}
        graphs = DecodeGraphs(model, cache, attend, capture, **limits)
    info = EngineInfo(
        model_id=config.model_id,
        weights_digest=fingerprint.quantised_digest(weights_digest, scheme),
        config_digest=fingerprint.config_digest(module.config, shape.eos_token_ids),
        numerics=fingerprint.numerics(module, scheme),
        dtype=weights.KV_DTYPE_NAMES[kv_dtype],
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        device=config.device,
        kernels=f"{attention} attention; {fast_paths}; on {_device_name(device)}",
    )
    logger.info("loaded %s in %.1f s: %s", config.model_id, time.perf_counter() - started, info)
    return Loaded(info, cache, DeviceRunner(model, cache, graphs), touch=cache.touch)


def _tell_part(tell: TellProgress, part: str) -> None:
    tell(StartProgress("load", part, _PARTS.index(part), len(_PARTS)))


def _device_name(device: torch.device) -> str:
    """Returns what the processor is called, on one line: routers compare the speed of like ones only."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    printable = "".join(filter(str.isprintable, name or platform.machine()))
    return " ".join(printable.split())[:64]


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device: {name}, but torch sees {torch.cuda.device_count()} GPUs here")
    return device


def _max_model_len(config: EngineConfig, shape: ModelShape, num_blocks: int) -> int:
    wanted = config.max_model_len
    if wanted is not None and wanted > shape.max_model_len:
        raise ConfigError(f"--max-model-len: {wanted} is more than the model's {shape.max_model_len} positions")
    # A sequence that the whole pool cannot hold is refused on arrival; otherwise it would fail when it outgrows the
    # pool.
    return min(shape.max_model_len if wanted is None else wanted, num_blocks * config.block_size)


def _num_blocks(config: EngineConfig, device: torch.device, shape: KVShape, weight_bytes: int) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    share = config.memory_utilization
    if device.type == "cpu":
        total = host_bytes()
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


def host_bytes(cgroup: Path = CGROUP) -> int:
    """Returns the bytes of memory of the machine, or of the container if it has less."""
    total: int = psutil.virtual_memory().total
    return total if (limit := memory_limit(cgroup)) is None else min(total, limit[0])
