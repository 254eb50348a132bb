"""Decides from whom a worker brings a prompt's prefix, and whether that costs less than to compute it. Pure.

Owns: what a bring is expected to take, learnt from those that were made, and the choice. Never: what workers have in
their caches (`known_cache.py`), or what becomes of a bring: if nothing comes of it, the prompt is computed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.core.records import record

MARGIN = 1.25
"""A prefix is brought where it is expected to cost less than computing it even if it takes so many times as long."""
MOST_AT_ONCE = 4
"""The most prefixes that one source is asked for at once: whoever has got it is a source for the next."""
_FIXED_MS = 10.0
_BYTES_PER_MS = 1e6
"""What a bring is taken to cost until some were made: 1 GB/s if no handoff has shown it. That is rather fast, so that
it is tried."""
_MEMORY = 0.9
"""The weight of what was known before, beside each new bring."""
_FAR_TOKENS = 1000.0
_MOST_KEPT = 4096
"""The most sources of one worker of which times are kept."""


class BringTime:
    """Knows what it takes to bring a prefix from one worker to another.

    It is a line over the prefix's tokens, by least squares over the newest brings; what is assumed before counts as two
    of them."""

    def __init__(self, token_bytes: int, bytes_per_s: float | None = None) -> None:
        """`token_bytes` is the KV of one token; 0 if it is not known. `bytes_per_s` is what handoffs between the two
        have shown, if there were any."""
        bytes_per_ms = _BYTES_PER_MS if bytes_per_s is None else bytes_per_s / 1000
        self.num_seen = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._fixed_ms = self._token_ms = 0.0
        for tokens in (0.0, _FAR_TOKENS):
            self._add(tokens, _FIXED_MS + tokens * token_bytes / bytes_per_ms)

    def observe(self, num_tokens: int, ms: float) -> None:
        """Adds a bring of so many tokens that took so long."""
        self.num_seen += 1
        self._add(float(num_tokens), ms)

    @property
    def fixed_ms(self) -> float:
        return self._fixed_ms

    @property
    def token_ms(self) -> float:
        return self._token_ms

    def ms(self, num_tokens: int) -> float:
        """Returns what a bring of so many tokens is expected to take, in milliseconds."""
        return self._fixed_ms + num_tokens * self._token_ms

    def _add(self, x: float, y: float) -> None:
        self._weight = _MEMORY * self._weight + 1
        self._x, self._y = _MEMORY * self._x + x, _MEMORY * self._y + y
        self._xx, self._xy = _MEMORY * self._xx + x * x, _MEMORY * self._xy + x * y
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 0 else 0.0
        mean_ms = self._y / self._weight
        # Neither part is negative: a longer prefix takes no less, and none takes no time.
        self._token_ms = min(max(0.0, slope), mean_ms * self._weight / self._x if self._x else math.inf)
        self._fixed_ms = max(0.0, mean_ms - self._token_ms * self._x / self._weight)


class BringTimes(dict[str, BringTime]):
    """Knows what it takes one worker to bring from each source, by the source's id, also from one that it has not
    brought from yet."""

    def __init__(self, token_bytes: int, bytes_per_s: Callable[[str], float | None]) -> None:
        """`bytes_per_s` returns what handoffs from a source have shown."""
        super().__init__()
        self._token_bytes = token_bytes
        self._bytes_per_s = bytes_per_s

    def __missing__(self, source_id: str) -> BringTime:
        if len(self) >= _MOST_KEPT:
            self.clear()
        time = self[source_id] = BringTime(self._token_bytes, self._bytes_per_s(source_id))
        return time

    def forget_assumed(self, source_id: str) -> None:
        """Forgets what was assumed of the source if nothing was brought from it, since more is known of handoffs."""
        if source_id in self and not self[source_id].num_seen:
            del self[source_id]


@record
class PrefixOffer:
    """Describes one worker or store that has more of a prompt than the worker that is to compute it."""

    worker_id: str
    num_tokens: int
    """How many tokens more."""
    bring_ms: float
    """What it is expected to take to bring them, if nobody else asks there."""
    num_lending: int = 0
    """Brings from there that are under way."""

    @property
    def expected_ms(self) -> float:
        return self.bring_ms * (1 + self.num_lending)


class WhyComputed(enum.Enum):
    """Says why tokens are computed that another worker has; the values are words for people."""

    COSTS_MORE = "too little would be saved"
    BUSY = f"it lends to {MOST_AT_ONCE} others already"


@record
class PrefixSource:
    """Says who has more of a prompt than the worker that is to compute it, and what spoke for bringing it."""

    worker_id: str
    num_tokens: int
    bring_ms: float
    compute_ms: float
    """What it would take to compute as many tokens."""
    why_computed: WhyComputed | None = None
    """What spoke against it; None if it is to be brought."""


@record
class PrefixOutcome:
    """Says what has come of a prefix that was to be brought."""

    num_tokens: int
    """Tokens that were brought; 0 if nothing was, and they were computed."""
    ms: float


def choose_source(offers: Iterable[PrefixOffer], token_ms: float) -> PrefixSource | None:
    """Returns the source from which bringing saves most time, or, if it saves none anywhere, the best and why they are
    computed all the same; None without offers.

    `token_ms` is what each further prompt token takes to compute where it would be brought to; 0 if that is not known,
    and then nothing is brought."""

    def saved_ms(offer: PrefixOffer) -> float:
        return offer.num_tokens * token_ms - MARGIN * offer.expected_ms

    def rank(offer: PrefixOffer) -> tuple[bool, float, str]:
        return offer.num_lending >= MOST_AT_ONCE, -saved_ms(offer), offer.worker_id

    best = min(offers, key=rank, default=None)
    if best is None:
        return None
    why = WhyComputed.COSTS_MORE if saved_ms(best) <= 0 else None
    if best.num_lending >= MOST_AT_ONCE:
        why = WhyComputed.BUSY
    return PrefixSource(best.worker_id, best.num_tokens, best.expected_ms, best.num_tokens * token_ms, why)


@dataclass(frozen=True, slots=True)
class PrefixBreakEven:
    """Says from how many tokens on bringing a prefix pays."""

    source_id: str
    target_id: str
    tokens: float
    """Infinite if it never does."""
    fixed_ms: float
    token_ms: float
    num_seen: int
    """Brings of which these times are; 0 if they are assumed."""


def prefix_break_even(bring: BringTime, compute_token_ms: float, margin: float = MARGIN) -> float:
    """Returns how many tokens take as long to bring, `margin` included, as to compute; infinite if none do."""
    saved_ms = compute_token_ms - margin * bring.token_ms
    return margin * bring.fixed_ms / saved_ms if saved_ms > 0 else math.inf
