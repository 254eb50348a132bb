"""What policy may look at: workers as the router knows them, and the job to be placed. Pure data."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass

from services.core.hashing import num_blocks_for
from services.router.health import Ramp


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def can_prefill(self) -> bool:
        return self is not Role.DECODE

    @property
    def can_decode(self) -> bool:
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class Load:
    """Mirror of `baton.v1.LoadSnapshot`; same units."""

    sequence_number: int = 0
    blocks_importing: int = 0
    blocks_leased: int = 0
    blocks_active: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    num_importing: int = 0
    num_leases: int = 0
    ms_per_prefill_token: float = 0.0
    ms_per_decode_step: float = 0.0
    ms_per_decode_sequence: float = 0.0
    current_step_ms: float = 0.0
    prefix_tokens_queried: int = 0
    prefix_tokens_hit: int = 0
    draining: bool = False

    @property
    def available_blocks(self) -> int:
        """Cached blocks count: they are evicted when needed."""
        return self.blocks_free + self.blocks_cached

    @property
    def idle(self) -> bool:
        return not (self.blocks_importing or self.blocks_leased or self.blocks_active or self.num_waiting)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What policy knows of a worker: its description, its newest snapshot, and what was sent there since."""

    worker_id: str
    role: Role
    ready: bool
    host_id: str
    layout: Hashable
    """Workers exchange KV only between equal layouts."""
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    load: Load
    predicted_blocks: int = 0
    """Blocks that commands in flight will take and the snapshot does not show."""
    predicted_tokens: int = 0
    predicted_sequences: int = 0
    on_trial: bool = False
    """After failures it takes a single request; what it holds of that one may go on there."""
    ramp: Ramp | None = None
    """Trust that grows again after failures; None: full trust."""
    barred: frozenset[str] = frozenset()
    """Workers whose leases it cannot fetch."""
    untried: frozenset[str] = frozenset()
    """Workers whose leases it may be unable to fetch: the last resort, until a transfer has shown that it can."""

    @property
    def context_tokens(self) -> int:
        """Longest sequence this worker can ever hold, prompt and output together."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def available_blocks(self) -> int:
        return max(0, self.load.available_blocks - self.predicted_blocks)

    @property
    def idle(self) -> bool:
        return self.load.idle and not self.predicted_sequences

    def step_ms(self, num_sequences: float) -> float:
        """A decode step of so many sequences, or of all that fit in one."""
        further = max(0.0, min(num_sequences, self.max_num_seqs) - 1)
        return self.load.ms_per_decode_step + further * self.load.ms_per_decode_sequence

    @property
    def num_sequences(self) -> int:
        """Sequences that will share its decode steps, as far as known."""
        return self.load.num_running + self.load.num_importing + self.predicted_sequences

    @property
    def queued_tokens(self) -> int:
        return self.load.queued_prefill_tokens + self.predicted_tokens

    def blocks_for(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.block_size)


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be placed. Lengths in tokens."""

    num_tokens: int
    """Prompt and replayed output: what is computed before the next token can be sampled."""
    total_tokens: int
    """Prompt and max_tokens: how long the sequence may become."""
    avoid: frozenset[str] = frozenset()
    """Workers it failed on lately; chosen only when there is no other."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a handoff's lease lives."""

    worker_id: str
    host_id: str
    layout: Hashable
