"""Counts wrong keys by the peer that sends them, and says how long a peer that sends many should wait. Pure.

A right key is looked up whoever sends it: many clients may have one address, of a proxy or a NAT, and one of them that
has forgotten to change its key must not keep the others out. So nothing is refused here that would have been let in;
a peer beyond its budget is only told to come later, and told late. No budget is needed to keep keys from being guessed:
they have 256 random bits. Owns: the table of peers, which is bounded. Never: a clock, or what a key is.
"""

from __future__ import annotations

from services.router.tenants.token_bucket import TokenBucket

BURST = 20
"""Wrong keys of a peer that are only refused: somebody tries out what was pasted."""
PER_S = 0.2
MOST_PEERS = 4096
"""How many are remembered. Beyond them the one that has been quiet for longest is forgotten: it has a budget again, and
that is all."""


class WrongKeys:
    def __init__(self) -> None:
        self._peers: dict[str, TokenBucket] = {}
        """The one that sent a wrong key last stands last."""

    def __len__(self) -> int:
        return len(self._peers)

    def count(self, peer: str, now: float) -> float:
        """Counts a wrong key. Returns in how many seconds the peer's next one is within its budget again; 0 if this one
        is."""
        budget = self._peers.pop(peer, None) or TokenBucket(PER_S, BURST, now)
        self._peers[peer] = budget
        if len(self._peers) > MOST_PEERS:
            del self._peers[next(iter(self._peers))]
        wait_s = budget.wait_s(1, now)
        if not wait_s:
            budget.take(1, now)
        return wait_s
