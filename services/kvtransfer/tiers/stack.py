"""Makes one tier of several, and leaves out those that fail.

Owns: the order in which tiers are asked, and how each stands. Never: where their blocks are, or which blocks are worth
keeping.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeGuard

from services.core.clock import Clock
from services.core.hashing import BlockHash
from services.kv.regions import Buffer
from services.kv.tier_standing import TierStanding
from services.kvtransfer.tiers.tier import BlockTarget, LocalTier, Tier, TierFailed, TierFull

log = logging.getLogger(__name__)

SILENCE_S = 2.0
"""How long a tier may take to answer a read before it is left out; whoever waits gives up sooner."""
_MOST_KNOWN = 1 << 16
_ITS_SHARE = 0.8
"""The share of the time after which somebody gave up that a tier must have taken to be the one for which they did."""


@dataclass(eq=False)
class Reading:
    """Keeps how long the tiers have taken to answer one who reads, in seconds. It asks one tier at a time."""

    taken_s: dict[TierUse, float] = field(default_factory=dict)


@dataclass(eq=False)
class TierUse:
    """Keeps how one tier stands and what it has done."""

    tier: Tier
    reading: TierStanding = field(default_factory=TierStanding)
    writing: TierStanding = field(default_factory=TierStanding)
    """A full tier is left out of writing only."""
    blocks_read: int = 0
    blocks_written: int = 0
    blocks_refused: int = 0
    """Blocks that the tier was to take while it was left out, or failed to."""
    read_s: float = 0.0
    write_s: float = 0.0
    known: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    """The newest blocks that were written from here, if others use the tier too."""
    asked: dict[Reading, float] = field(default_factory=dict)
    """When each question began that is under way."""


class TierStack:
    """Is a `Tier`: blocks are written to every tier, and each is read from the first that has it.

    A tier that fails, or is silent, is left out for a while. This never raises TierFailed: what no tier gives, no tier
    has.
    """

    name = "tiers"

    def __init__(self, tiers: Sequence[Tier], clock: Clock) -> None:
        """`tiers` are the fastest first. They are closed with this."""
        self.uses = [TierUse(tier) for tier in tiers]
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the uses, never a tier's work."""

    @property
    def num_bytes(self) -> int:
        return sum(use.tier.num_bytes for use in self.uses)

    @property
    def local(self) -> list[LocalTier]:
        """Returns the tiers that know what they hold."""
        return [use.tier for use in self.uses if is_local(use.tier)]

    def readable_locals(self) -> list[bool]:
        """Returns whether each of the `local` tiers would be read now."""
        return [self._readable(use) for use in self.uses if is_local(use.tier)]

    def num_held(self, hashes: Sequence[BlockHash], reading: Reading | None = None) -> int:
        reading, num_held = reading or Reading(), 0
        advancing = True
        while advancing and num_held < len(hashes):
            advancing = False
            for use in self.uses:
                if num_more := self._num_held(use, hashes[num_held:], reading):
                    num_held += num_more
                    advancing = True
        return num_held

    def read(self, hashes: Sequence[BlockHash], memory: BlockTarget, targets: Sequence[int]) -> int:
        return sum(self.read_by_tier(hashes, memory, targets).values())

    def read_by_tier(
        self,
        hashes: Sequence[BlockHash],
        memory: BlockTarget,
        targets: Sequence[int],
        reading: Reading | None = None,
    ) -> dict[str, int]:
        """Reads as `Tier.read` does, and returns how many blocks came from which tier."""
        reading = reading or Reading()
        read: Counter[str] = Counter()
        num_read = 0
        while num_read < len(hashes):
            tier, num_more = self._read_next(hashes[num_read:], memory, targets[num_read:], reading)
            if not num_more:
                break
            read[tier] += num_more
            num_read += num_more
        return dict(read)

    def too_slow(self, reading: Reading, limit_s: float) -> None:
        """Notes that somebody who reads has given up after `limit_s`, which is what computing takes. A tier that took
        nearly all of it is left out for a while. Where no tier did, something else was waited for, such as a turn."""
        now_s = self._clock.now()
        for use in self.uses:
            with self._lock:
                taken_s = reading.taken_s.get(use, 0.0) + now_s - use.asked.get(reading, now_s)
            if taken_s >= _ITS_SHARE * limit_s:
                self._failed(use, TierFailed("it is slower than computing"))

    def write(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> None:
        for use in self.uses:
            if not use.writing.usable(self._clock.now()):
                use.blocks_refused += len(hashes)
                continue
            started_s = self._clock.now()
            try:
                use.tier.write(hashes, blocks)
            except TierFailed as error:
                use.blocks_refused += len(hashes)
                self._failed(use, error)
                continue
            with self._lock:
                if not is_local(use.tier):
                    _remember(use.known, hashes)
                use.blocks_written += len(hashes)
                use.write_s += self._clock.now() - started_s
                if use.writing.succeeded(self._clock.now()):
                    log.info("the %s tier takes blocks again", use.tier.name)

    @property
    def is_writable(self) -> bool:
        """Returns whether any tier takes blocks now."""
        now_s = self._clock.now()
        return any(use.writing.usable(now_s) for use in self.uses)

    def takes(self, hash: BlockHash) -> bool:
        """Returns whether some tier that works lacks the block; of a remote one, whether it was not written lately."""
        now_s = self._clock.now()
        return any(
            use.writing.usable(now_s) and not (use.tier.num_held([hash]) if is_local(use.tier) else hash in use.known)
            for use in self.uses
        )

    def close(self) -> None:
        for use in self.uses:
            use.tier.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _num_held(self, use: TierUse, hashes: Sequence[BlockHash], reading: Reading) -> int:
        if not self._readable(use):
            return 0
        try:
            with self._asked(use, reading):
                num_held = use.tier.num_held(hashes)
        except TierFailed as error:
            self._failed(use, error)
            return 0
        self._are_not_there(use, hashes[num_held:])
        return num_held

    def _are_not_there(self, use: TierUse, hashes: Sequence[BlockHash]) -> None:
        """Notes that the first of the blocks is not in the tier, and so the others are of no use there: all are to be
        written again."""
        with self._lock:
            for hash in hashes if use.known else ():
                use.known.pop(hash, None)

    def _read_next(
        self, hashes: Sequence[BlockHash], memory: BlockTarget, targets: Sequence[int], reading: Reading
    ) -> tuple[str, int]:
        """Reads from the first tier that gives something, up to where a faster one has the next block. Returns its
        name, and how many blocks it gave."""
        faster: list[LocalTier] = []
        for use in self.uses:
            num_held = self._num_held(use, hashes, reading)
            in_faster = (n for n in range(1, num_held) if any(tier.num_held([hashes[n]]) for tier in faster))
            run = hashes[: next(in_faster, num_held)]
            if run and (num_read := self._read(use, run, memory, targets[: len(run)], reading)):
                return use.tier.name, num_read
            if is_local(use.tier) and use.reading.usable(self._clock.now()):
                faster.append(use.tier)
        return "", 0

    def _read(
        self,
        use: TierUse,
        hashes: Sequence[BlockHash],
        memory: BlockTarget,
        targets: Sequence[int],
        reading: Reading,
    ) -> int:
        started_s = self._clock.now()
        try:
            with self._asked(use, reading):
                num_read = use.tier.read(hashes, _Heard(memory, partial(self._heard, use, reading)), targets)
        except TierFailed as error:
            self._failed(use, error)
            return 0
        with self._lock:
            now_s = self._clock.now()
            use.blocks_read += num_read
            use.read_s += now_s - started_s
            if use.reading.succeeded(now_s):
                log.info("the %s tier is read again", use.tier.name)
        self._are_not_there(use, hashes[num_read:])
        return num_read

    def _readable(self, use: TierUse) -> bool:
        """Returns whether the tier may be asked. One that is silent is left out from now on."""
        now_s = self._clock.now()
        with self._lock:
            silent = any(now_s - asked_s > SILENCE_S for asked_s in use.asked.values())
        if silent:
            self._failed(use, TierFailed(f"it has not answered for {SILENCE_S:g} s"))
            return False
        return use.reading.usable(now_s)

    @contextmanager
    def _asked(self, use: TierUse, reading: Reading) -> Iterator[None]:
        with self._lock:
            use.asked[reading] = self._clock.now()
        try:
            yield
        finally:
            self._heard(use, reading)
            with self._lock:
                del use.asked[reading]

    def _heard(self, use: TierUse, reading: Reading) -> None:
        """Notes that the tier has given a block, or its answer: it is not silent."""
        with self._lock:
            now_s = self._clock.now()
            if (asked_s := use.asked.get(reading)) is not None:
                reading.taken_s[use] = reading.taken_s.get(use, 0.0) + now_s - asked_s
                use.asked[reading] = now_s

    def _failed(self, use: TierUse, error: TierFailed) -> None:
        now_s = self._clock.now()
        with self._lock:
            first = use.writing.failed(str(error), now_s)
            if not isinstance(error, TierFull):
                first = use.reading.failed(str(error), now_s) or first
        if first:
            log.warning("the %s tier is left out for a while: %s", use.tier.name, error)


class _Heard:
    """Is a `BlockTarget` that says when it is written to."""

    def __init__(self, memory: BlockTarget, heard: Callable[[], None]) -> None:
        self._memory = memory
        self._heard = heard

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        self._heard()
        self._memory.write_blocks(block_ids, data)


def _remember(known: OrderedDict[BlockHash, None], hashes: Sequence[BlockHash]) -> None:
    for hash in hashes:
        known[hash] = None
        known.move_to_end(hash)
    while len(known) > _MOST_KNOWN:
        known.popitem(last=False)


def is_local(tier: Tier) -> TypeGuard[LocalTier]:
    """Returns whether the tier knows all that it holds."""
    return hasattr(tier, "follow")
