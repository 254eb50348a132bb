"""Defines an engine's configuration, and the records by which it describes itself and its steps."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.schedule.sequence import SequenceEvent
from services.kv.pool import Ledger


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an engine, from the worker's flags of the same names. None and "auto" leave the choice to
    the engine."""

    model_path: str
    """A directory in the transformers layout."""
    model_id: str
    device: str = "cpu"
    dtype: str = "auto"
    """Type of weights and KV cache: "auto" (as saved), "float32", "bfloat16" or "float16"."""
    quantization: str = "auto"
    """Bits in which weights are kept: "auto" (those of a GGUF file as they are there, others as saved), "none", "int8"
    or "int4". See `cpu.quantisation`."""
    block_size: int = 16
    """Tokens of a block."""
    num_blocks: int | None = None
    """Blocks of the pool; None: as many as `memory_utilization` allows."""
    memory_utilization: float | None = None
    """Share of the device's memory for weights and pool, from 0 to 1; None: 0.9 on an accelerator, 0.2 on a CPU."""
    max_num_seqs: int = 64
    """Most sequences in a step."""
    max_model_len: int | None = None
    """Most tokens of a sequence; None: what the model allows."""
    max_num_batched_tokens: int = 512
    """Most tokens in a step."""
    threads: int | None = None
    """CPU threads of this process (torch keeps one number per process); None: torch's choice."""
    limit_leased_blocks: bool = False
    """Whether leases may hold at most half of the pool; set on a worker that also decodes."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A description of a loaded model and its pool, which does not change."""

    model_id: str
    weights_digest: str
    config_digest: str
    """Digest of the configuration in force; `weights_digest` is that of parameters and buffers. See
    `model.fingerprint`."""
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


@dataclass(frozen=True, slots=True)
class StepReport:
    """The events of a step; or, in a report of its own, the events before it (admissions, preemptions, failures; no
    tokens). Times are the engine clock's, in seconds."""

    events: tuple[SequenceEvent, ...]
    step_number: int
    """Number of the step, from 1; 0 in a report for which nothing has run."""
    num_tokens: int
    num_decodes: int
    """Sequences of which the step computed a single token."""
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Numbers that describe an engine at one moment. The costs are those of `CostModel`."""

    num_running: int
    num_waiting: int
    queued_prefill_tokens: int
    ledger: Ledger
    num_preemptions: int
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    ms_per_prefill_token: float
    ms_per_decode_step: float
    ms_per_decode_sequence: float
    current_step_ms: float
    """Milliseconds since the step that is running began; 0 between steps."""
    num_steps: int
    """Steps since the engine started, failed ones included."""
    num_failed_steps: int
    """Steps that raised since the engine started."""
    last_batch_size: int
    """Sequences in the last step."""
    consecutive_step_failures: int
