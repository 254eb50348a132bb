"""Counts, for metrics, what nothing else in this process counts. Never: interprets the counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Keeps counts since the start. Counters of transfers are keyed by the transport's name."""

    leases_ended: Counter[str] = field(default_factory=Counter)
    imports: Counter[str] = field(default_factory=Counter)
    transfer_bytes: Counter[str] = field(default_factory=Counter)
    transfer_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    blocks_not_moved: int = 0
    """Blocks of handoffs that were here before, so that they did not cross."""
    transfers_failed: Counter[str] = field(default_factory=Counter)
    """Failed transfers by the error's reason."""
    prefix_tokens_brought: Counter[str] = field(default_factory=Counter)
    """Tokens of prefixes that were brought into the pool, by where they came from."""
    prefixes_failed: Counter[str] = field(default_factory=Counter)
    """Prefixes that were not brought, by the error's reason."""
    imports_failed: int = 0
    """Imports given up for any reason, a client's cancellation included."""
    internal_errors: int = 0
    """Unforeseen exceptions; each has ended one leg at most."""

    def transferred(self, transport: str, num_bytes: int, seconds: float, exposed_s: float) -> None:
        """Counts an import that became READY."""
        self.imports[transport] += 1
        self.transfer_bytes[transport] += num_bytes
        self.transfer_s[transport] += seconds
        self.exposed_s[transport] += exposed_s
