"""Leases blocks of the prefix cache out to other workers that ask for them by their hashes.

Owns: how much is lent at once, and the references to what is lent until its lease ends. Never: what is in the cache, a
rule about leases, or what the borrower does with the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from services.core.clock import Clock
from services.core.errors import Overloaded
from services.core.hashing import BlockHash
from services.core.ids import new_lease_id
from services.kv.lease import Lease
from services.kv.lease_table import LeaseTable

MOST_LENDS = 16
"""The most leases at once: a prefix that everybody wants at the same moment is not everybody's to fetch from here."""
MOST_LENT_SHARE = 0.25
"""The most of the pool that may be lent at once: nothing can be evicted while it is."""
UNFETCHED_S = 3.0
"""How long what is lent waits for its fetch, also after one that broke off. Whoever has asked for it wants it within as
long, or computes it; if he has died meanwhile, nobody tells."""
MOST_LENT_S = 30.0
"""How long a lease may last, ten times what a borrower gives a prefix. One that copies slowly on purpose, or fetches
again and again, never lets the lease's clocks run out."""


class Lender:
    """Lends what `lend(hashes)` finds: pool blocks with a reference each, which `give_back(block_ids)` drops.

    Nobody holds such a lease, so that it expires unless it is fetched, and after MOST_LENT_S in any case: no session
    ends it. It is sealed from the start, without a first token.
    `clock` is that of the lease table.
    """

    def __init__(
        self,
        leases: LeaseTable,
        clock: Clock,
        *,
        lend: Callable[[Sequence[BlockHash]], list[int]],
        give_back: Callable[[Sequence[int]], None],
        block_size: int,
        num_blocks: int,
    ) -> None:
        self._leases = leases
        self._clock = clock
        self._lend = lend
        self._give_back = give_back
        self._block_size = block_size
        self._most_blocks = max(1, int(num_blocks * MOST_LENT_SHARE))
        self._num_leases_of: Counter[int] = Counter()
        """How many of the leases each lent block is in."""
        self.num_lends = 0
        """Leases that are not over."""
        self.lends = 0
        """All leases so far."""
        self.tokens_lent = 0
        """Tokens of all leases so far."""

    @property
    def num_lent_blocks(self) -> int:
        """Returns how many blocks are lent now; one in several leases counts once."""
        return len(self._num_leases_of)

    def lend(self, hashes: Sequence[BlockHash]) -> Lease | None:
        """Leases the longest run of these blocks, from the first on, that is here and may be lent now; None if that is
        none of them. Raises Overloaded if too much is lent already."""
        if self.num_lends >= MOST_LENDS:
            raise Overloaded(f"{MOST_LENDS} prefixes are lent, and no more may be at once")
        found = self._lend(hashes[: self._most_blocks])  # one that is repeated counts each time
        num_lendable = self._num_lendable(found)
        if num_lendable < len(found):
            self._give_back(found[num_lendable:])
        if not num_lendable:
            if found:
                raise Overloaded(f"{self.num_lent_blocks} blocks are lent, and no more may be at once")
            return None
        block_ids, now = found[:num_lendable], self._clock.now()
        try:
            lease = self._leases.open(
                new_lease_id(),
                owner=None,
                block_ids=block_ids,
                num_tokens=num_lendable * self._block_size,
                now=now,
                listener=self,
                ttl_s=UNFETCHED_S,
                most_s=MOST_LENT_S,
            )
        except BaseException:
            self._give_back(block_ids)
            raise
        self._num_leases_of.update(block_ids)
        self.num_lends += 1
        self.lends += 1
        self.tokens_lent += lease.num_tokens
        self._leases.seal(lease.lease_id, None, now)
        return lease

    def close(self) -> None:
        """Ends what is still lent, when nobody can fetch it any more: the server has stopped."""
        for lease in self._leases.owned_by(None):
            self._leases.abort(lease.lease_id, self._clock.now())

    def lease_ended(self, lease: Lease) -> None:
        """Drops the references to what was lent."""
        for block_id in lease.block_ids:
            self._num_leases_of[block_id] -= 1
            if not self._num_leases_of[block_id]:
                del self._num_leases_of[block_id]
        self.num_lends -= 1
        self._give_back(lease.block_ids)

    def _num_lendable(self, block_ids: Sequence[int]) -> int:
        """Returns how many of the blocks, from the first on, may be lent beside what is lent already."""
        room = self._most_blocks - self.num_lent_blocks
        for number, block_id in enumerate(block_ids):
            room -= block_id not in self._num_leases_of
            if room < 0:
                return number
        return len(block_ids)
