"""What an engine is made of, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.block_pool import Ledger
from services.engine.sequence import SequenceEvent


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The worker's flags of the same names decide these; None and "auto" leave the choice to the engine."""

    model_path: str
    """A directory in the transformers layout."""
    model_id: str
    device: str = "cpu"
    dtype: str = "auto"
    """"auto" (as saved), "float32", "bfloat16" or "float16"."""
    block_size: int = 16
    """Tokens."""
    num_blocks: int | None = None
    """None: as many as `memory_utilization` allows."""
    memory_utilization: float | None = None
    """Share of the device's memory for weights and pool; None: 0.9 of an accelerator's, 0.2 of the host's."""
    max_num_seqs: int = 64
    """Most sequences in a step."""
    max_model_len: int | None = None
    """Most tokens of a sequence; None: what the model allows."""
    max_num_batched_tokens: int = 512
    """Most tokens in a step."""
    threads: int | None = None
    """CPU threads of this process (torch keeps one number per process); None: torch's choice."""
    limit_leased_blocks: bool = False
    """Leases hold at most half of the pool: for a worker that also decodes."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    model_id: str
    weights_digest: str
    dtype: str
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
    """What a step produced; before it runs, a report with its admissions only (no tokens)."""

    events: tuple[SequenceEvent, ...]
    step_number: int
    """0: nothing ran."""
    num_tokens: int
    num_decodes: int
    """Sequences that computed a single token."""
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class EngineStats:
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
    """0 between steps."""
    num_steps: int
    """Since start, like the next."""
    num_failed_steps: int
    last_batch_size: int
    """Sequences in the last step."""
    consecutive_step_failures: int
