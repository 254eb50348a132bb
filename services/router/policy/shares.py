"""Keeps what tenants have been served and hold at workers, for one model: who is to be served next, and who has more
than its share. Pure.

Owns: the tenants' counters, by VTC (Sheng et al., OSDI 2024, arXiv 2401.00588), and what each has placed. Never:
requests, the order in which one tenant's are served (`coordinator/queue.py`), or what follows from a share
(`placement.py`).

A tenant's counter grows by what it is served, divided by its weight, and the waiting tenant with the least goes next.
One that begins to wait is lifted to `CREDIT` below the counter of whoever began last: what it has not used before went
to others. So while two tenants wait, what they are served differs by a bound, however many requests each has sent
(`tests/unit/router/test_shares.py`). In the paper there is no credit; then a tenant that uses half of its share, but
not evenly, waits for others whenever it sends two requests at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""What a token of a prompt costs that no cache had, and one of an output, as in the paper."""
CREDIT = 32768.0
"""How much less than others, in cost, a tenant may have been served when it begins to wait."""
RECENT_S = 60.0
"""Seconds after its last request for which a tenant counts in the others' shares, and its counter is remembered."""
HEADROOM = 0.25
"""The part of a worker's memory and batch that whoever has more than its share leaves to others, or less if these have
less by their weights."""
OVER_SHARE_LINE = 0.5
"""The part of what may wait at a worker to which whoever has more than its share may add."""


@dataclass(eq=False, slots=True)
class Share:
    """Keeps one tenant's use of one model's workers."""

    tenant: str
    weight: float
    group: Shares = field(repr=False)
    served: float = 0.0
    """Its counter: the cost of what it was served, divided by its weight."""
    num_live: int = 0
    """Its requests: expected, waiting and begun."""
    num_expected: int = 0
    """Its requests whose prompts are being tokenised."""
    num_tokens: int = 0
    """Tokens of those begun, prompts and outputs: what they hold at workers."""
    idle_since_s: float = 0.0

    def charge_prompt(self, num_tokens: int) -> None:
        """Charges tokens of a prompt; fewer than 0 are given back, since a cache had them."""
        self.served += PROMPT_COST * num_tokens / self.weight

    def charge_output(self, num_tokens: int) -> None:
        self.served += OUTPUT_COST * num_tokens / self.weight

    def start_after(self, num_tokens: int) -> float:
        """Returns what the counter would be after prompts of `num_tokens`, all together."""
        return self.served + PROMPT_COST * num_tokens / self.weight

    @property
    def lifted(self) -> float:
        """Returns what the counter would be if the first of its requests began to wait now."""
        return max(self.served, self.group.newest_start - CREDIT / self.weight)

    def begins_to_wait(self) -> None:
        """Lifts the counter. To be called when the first of its requests begins to wait."""
        self.served = self.lifted

    def begins(self) -> None:
        """Notes that its next request begins. To be called before that is charged."""
        self.group.newest_start = max(self.group.newest_start, self.served)

    def hold(self, num_tokens: int) -> None:
        """Counts tokens that its begun requests hold from now on; fewer than 0 are no longer held."""
        self.num_tokens += num_tokens
        self.group.num_tokens += num_tokens

    @property
    def is_behind(self) -> bool:
        """Returns whether it was served less than another for its weight."""
        return len(self.group) > 1 and self.served < self.group.newest_start

    @property
    def headroom(self) -> float:
        """Returns which part of a worker's room it is to leave to others: 0 unless it was served its share of late, and
        holds more than its share of what is placed. One that holds nothing never does."""
        mine, everyones = _millionths(self.weight), self.group.weight
        if self.is_behind or self.num_tokens * everyones <= self.group.num_tokens * mine:
            return 0.0
        return min(HEADROOM, 1.0 - mine / everyones)


class Shares:
    """Keeps the shares of all tenants that have requests, or had some within `RECENT_S`."""

    def __init__(self) -> None:
        self.weight = 0
        """All weights together, in millionths: whole numbers, so that rounding does not add up for years."""
        self.num_tokens = 0
        """What all hold."""
        self.newest_start = 0.0
        """The highest counter with which anybody has begun a request."""
        self._shares: dict[str, Share] = {}
        self._idle: dict[str, None] = {}
        """Tenants without requests, in the order in which their last ones ended."""
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._shares)

    def get(self, tenant: str) -> Share | None:
        return self._shares.get(tenant)

    def enter(self, tenant: str, weight: float, now: float) -> Share:
        """Counts one more request of the tenant, which has this weight from now on."""
        self._now = max(self._now, now)
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share(tenant, weight, self)
            self.weight += _millionths(weight)
        self.weight += _millionths(weight) - _millionths(share.weight)
        share.weight = weight
        share.num_live += 1
        self._idle.pop(tenant, None)
        return share

    def leave(self, share: Share) -> None:
        share.num_live -= 1
        if not share.num_live:
            share.idle_since_s = self._now
            self._idle[share.tenant] = None

    def forget_idle(self, now: float) -> None:
        """Forgets tenants that have had no request for `RECENT_S`. To be called now and then."""
        self._now = max(self._now, now)
        while (tenant := next(iter(self._idle), None)) is not None:
            if self._now - self._shares[tenant].idle_since_s < RECENT_S:
                break
            del self._idle[tenant]
            self.weight -= _millionths(self._shares.pop(tenant).weight)
        if not self._shares:
            self.newest_start = 0.0

    def check(self) -> None:
        """Raises AssertionError if a sum is not what is found anew. For tests and the simulator."""
        shares = self._shares.values()
        assert self.num_tokens == sum(share.num_tokens for share in shares)
        assert self.weight == sum(_millionths(share.weight) for share in shares)
        assert self._idle.keys() == {share.tenant for share in shares if not share.num_live}
        assert not any(share.num_tokens for share in shares if not share.num_live)


def _millionths(weight: float) -> int:
    return max(1, round(weight * 1e6))
