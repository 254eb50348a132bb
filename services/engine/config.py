"""Defines an engine's configuration, and the records by which it describes itself and its steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.core.step_average import StepAverage
from services.engine.schedule.sequence import SequenceEvent
from services.kv.layout import TORCH
from services.kv.pool import Ledger

BLOCK_SIZE = 16
"""Tokens of a block where nobody has said how many."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Keeps the configuration of an engine, from the worker's flags of the same names. None and "auto" leave the
    choice to the engine."""

    model_path: str
    """Directory of the model, as transformers' `save_pretrained` writes one."""
    model_id: str
    device: str = "cpu"
    dtype: str = "auto"
    """Type of weights and activations: "auto" (as saved), "float32", "bfloat16" or "float16"."""
    kv_dtype: str = "auto"
    """Type of the KV cache: "auto" (that of activations), one of the others, or "int8" (see `attention.int8_rows`)."""
    quantization: str = "none"
    """Bits in which weights are kept: "none" (as saved), "int8", "int4", or "gguf", "gptq" and "awq" (those of such a
    checkpoint as they are there). See `cpu.quantisation`."""
    block_size: int = BLOCK_SIZE
    """Tokens of a block; 0 leaves it to an engine that chooses by itself, which torch's does not."""
    num_blocks: int | None = None
    """Blocks of the pool. With None, the pool has as many as `memory_utilization` allows."""
    memory_utilization: float | None = None
    """Share of the device's memory for weights and pool, from 0 to 1. None stands for 0.9 on an accelerator and 0.2 on
    a CPU."""
    max_num_seqs: int = 64
    """Most sequences in a step."""
    max_model_len: int | None = None
    """Most tokens of a sequence, prompt and output. With None, the model's positions are the limit."""
    max_num_batched_tokens: int = 512
    """Most tokens that one step computes, over all its sequences."""
    decode_graphs: bool = True
    """Whether steps of decodes run as CUDA graphs, on a CUDA device, where that is faster and computes the same."""
    threads: int | None = None
    """CPU threads of torch in this process, which has one such number. None leaves torch's choice."""
    limit_leased_blocks: bool = False
    """Whether leases may hold at most half of the pool; set on a worker that also decodes."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Describes a loaded model and its pool. It does not change while the engine lives."""

    model_id: str
    weights_digest: str
    """Digest of parameters and buffers (see `model.fingerprint`)."""
    config_digest: str
    """Digest of the configuration in force (see `model.fingerprint`)."""
    numerics: str
    """Types of weights and activations, in words."""
    dtype: str
    """Type of the KV cache, such as "bfloat16"."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    engine: str = TORCH
    """What computes: "torch" or "vllm"."""
    kernels: str = field(default="", compare=False)
    """How it computes on this host, in words for operators."""
    has_masks: bool = True
    """Whether output can be held to a constraint."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Reports the events of a step that has run, or those of scheduling one, before it runs.

    Events of scheduling are admissions, preemptions and failures, never tokens. Times are the engine clock's, in
    seconds.
    """

    events: tuple[SequenceEvent, ...]
    step_number: int
    """Number of the step, from 1; 0 if the events are those of scheduling."""
    num_tokens: int
    """Tokens that the step computed."""
    num_decodes: int
    """Sequences of the step that were decoding; each computed one token."""
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Keeps the numbers that describe an engine at one moment. The costs are those of `StepCosts`."""

    num_running: int
    num_waiting: int
    queued_prefill_tokens: int
    ledger: Ledger
    num_preemptions: int
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    ms_per_prefill_token: float
    ms_per_further_prefill_token: float
    ms_per_decode_step: float
    ms_per_decode_sequence: float
    tokens_per_prefill_step: float
    prefill_step: StepAverage
    decode_step: StepAverage
    current_step_ms: float
    """Milliseconds since the running step was begun; 0 between steps."""
    num_steps: int
    """Steps since the engine started, including those that raised."""
    num_tokens: int
    """Tokens of those steps, of prompts and of decoding sequences."""
    consecutive_step_failures: int
    """Steps that raised since the last one that did not."""
