"""Counts of this process that nothing else keeps, for metrics. Never: what they mean."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Transports by name."""

    leases_ended: Counter[str] = field(default_factory=Counter)
    imports: Counter[str] = field(default_factory=Counter)
    transfer_bytes: Counter[str] = field(default_factory=Counter)
    transfer_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    transfers_failed: Counter[str] = field(default_factory=Counter)
    """By the error's reason."""
    imports_failed: int = 0
    """Given up for whatever reason, a client's too."""
