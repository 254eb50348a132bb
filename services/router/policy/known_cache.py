"""Knows what stands in each worker's prefix cache, and whether a prefix had better be brought from there. Pure.

Owns: an index of which workers have told of which *anchors*, so that none need be asked how much of a prompt it has: an
anchor is one block in sixteen, chosen by its hash, so that the index is small. A bounded memory for each worker of what
it tells and of what it was given lately, which policy may look at. It is a guess: the worker alone knows its cache, and
a prompt that is expected there but is not costs what it costs anywhere. And what a bring is expected to take, learnt
from those that were made, and the choice of the source. Never: what becomes of a bring: if nothing comes of it, the
prompt is computed.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from services.core.hashing import PromptHashes, ShortHash, anchor_keys
from services.core.records import record

_MOST_BLOCKS = 1 << 17
"""Of one worker: as many as a worker tells at once. 100 bytes each. Of a worker that has more, those are kept that were
told or used last."""
_MOST_CONVERSATIONS = 4096
_EXPECTED_S = 10.0
"""Seconds, at least, for which a prompt is expected to be in the cache of the worker that was given it, and at most
twice that, so that prompts that begin alike and come together meet; fewer, if the worker is given more blocks meanwhile
than it can cache. After that, what the worker has told counts."""


_FINENESS = 64
"""The parts into which a prompt is divided where many workers are compared."""
_MOST_TIMES = 4
"""The blocks that are kept of prompts that share blocks, as a multiple of what the worker can cache."""
_MOST_ALIKE = 32
"""The most expected prompts with one beginning that are kept, the newest: whoever came before has been told of since,
or waits behind them."""


class PrefixIndex:
    """Keeps, for each anchor, the workers that have it: a bit each. All have blocks of one size."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        """By the anchors' keys. These are objects of their own, beside one another in memory, unlike the hashes."""
        self._taken = 0
        """The bits in use."""

    def __len__(self) -> int:
        """Returns how many anchors some worker has."""
        return len(self._holders)

    @property
    def is_unused(self) -> bool:
        """Returns whether no bit stands for a worker."""
        return not self._taken

    def take_bit(self) -> int:
        """Returns a bit that stands for one worker from now on."""
        bit = ~self._taken & (self._taken + 1)
        self._taken |= bit
        return bit

    def give_back(self, bit: int, hashes: Iterable[ShortHash]) -> None:
        """Frees the bit of a worker. `hashes` are all that it had."""
        self.remove(bit, hashes)
        self._taken &= ~bit

    def add(self, bit: int, hashes: Iterable[ShortHash]) -> None:
        """Notes which of the hashes are anchors."""
        holders = self._holders
        for key in anchor_keys(hashes):
            holders[key] = holders.get(key, 0) | bit

    def remove(self, bit: int, hashes: Iterable[ShortHash]) -> None:
        holders = self._holders
        for key in anchor_keys(hashes):
            if rest := holders.get(key, 0) & ~bit:
                holders[key] = rest
            else:
                holders.pop(key, None)

    def ranges(self, prompt: PromptHashes, bits: int) -> Iterator[tuple[int, int, int]]:
        """Yields (low, high, bits): those of the workers have the anchors among the first `low` blocks of a prompt, the
        last of which is one, and not the one right after the first `high`, unless that is the end.

        Workers that have no anchor come first.
        """
        low, holders_of_each = 0, map(self._holders.get, prompt.anchor_keys, repeat(0))
        for place, holders in zip(prompt.anchors, holders_of_each, strict=True):
            if (rest := bits & holders) != bits:
                yield low, place, bits ^ rest
                if not rest:
                    return
                bits = rest
            low = place + 1
        yield low, len(prompt), bits


class KnownCache:
    """Keeps the short hashes of blocks that one worker has, or is about to have."""

    def __init__(self, most_blocks: int, now: float, index: PrefixIndex | None = None) -> None:
        """`most_blocks` are those of the worker's pool and of what is below: it caches no more. `index` is what
        it shares with the caches of workers whose blocks are as large; without one it is compared with none."""
        self.index = PrefixIndex() if index is None else index
        self.bit = self.index.take_bit()
        self._most_blocks = min(most_blocks, _MOST_BLOCKS)
        self._has_room = most_blocks <= _MOST_BLOCKS
        """Whether all that the worker can have is kept."""
        self._told: dict[ShortHash, None] = {}
        """A set would take up to half as much again. What was told or used last is last."""
        self._expected, self._expected_before = _Prompts(), _Prompts()
        self._turn_s = now + _EXPECTED_S
        """When what is expected becomes what was expected before, and what was is forgotten."""
        self._conversations: dict[str, None] = {}

    def __len__(self) -> int:
        """Returns how many blocks the worker has told of."""
        return len(self._told)

    def __contains__(self, hash: ShortHash) -> bool:
        """Returns whether the worker has told of the block."""
        return hash in self._told

    def tell(self, *, whole: bool, stored: Collection[ShortHash], removed: Iterable[ShortHash]) -> None:
        """Takes over what the worker tells, the newest last; `whole` says that it has nothing else.

        Where it is more than is kept of one worker, what was told or used longest ago is forgotten.
        """
        if whole:
            self.index.remove(self.bit, self._told)
            self._told = {}
        told = self._told
        removed = [hash for hash in removed if hash in told]
        for hash in removed:
            told.pop(hash, None)  # a worker may say it twice
        self.index.remove(self.bit, removed)
        stored = list(itertools.islice(stored, max(0, len(stored) - self._most_blocks), None))
        told.update(dict.fromkeys(stored))
        self.index.add(self.bit, stored)
        if (num_excess := len(told) - self._most_blocks) > 0:
            # Some at once: what has left the front of a dictionary is passed over each time that it is read.
            forgotten = list(itertools.islice(told, num_excess + self._most_blocks // 64))
            for hash in forgotten:
                del told[hash]
            self.index.remove(self.bit, forgotten)

    def close(self) -> None:
        """Forgets what the worker has told. To be called when the worker has gone; nothing may be told after it."""
        self.index.give_back(self.bit, self._told)
        self.bit, self._told = 0, {}

    def expect(self, hashes: Sequence[ShortHash], conversation: str) -> None:
        """Notes that the worker was given a prompt. `hashes` are those of its full blocks, in order; `conversation` is
        empty for none."""
        expected = self._expected
        if max(expected.num_blocks, expected.num_hashes // _MOST_TIMES) + len(hashes) > self._most_blocks:
            self._turn()
        self._expected.add(hashes[: self._most_blocks])
        if not self._has_room:
            self._use(hashes)
        if conversation:
            self._conversations.pop(conversation, None)
            self._conversations[conversation] = None
            if len(self._conversations) > _MOST_CONVERSATIONS:
                del self._conversations[next(iter(self._conversations))]

    def _use(self, hashes: Sequence[ShortHash]) -> None:
        """Has the blocks be forgotten later, those at the beginning of the prompt last: without them the others count
        for nothing. A worker does not tell again of what it has told of."""
        told = self._told
        for hash in reversed(hashes):
            if hash in told:
                del told[hash]
                told[hash] = None

    def tick(self, now: float) -> None:
        """Forgets what was expected long ago. To be called now and then."""
        if now >= self._turn_s:
            self._turn()
            self._turn_s = now + _EXPECTED_S

    def num_blocks(self, hashes: Sequence[ShortHash]) -> int:
        """Returns how many of a prompt's first blocks are known or expected to be there."""
        return self._with_expected(hashes, self._num_told(hashes, 0, len(hashes), 0)) if hashes else 0

    def num_told(self, hashes: Sequence[ShortHash]) -> int:
        """Returns how many of a prompt's first blocks the worker has said that it has."""
        return self._num_told(hashes, 0, len(hashes), 0) if hashes else 0

    def has_conversation(self, conversation: str) -> bool:
        return conversation in self._conversations

    def _num_told(self, hashes: Sequence[ShortHash], low: int, high: int, tolerance: int) -> int:
        """Returns how many of a prompt's first blocks the worker has told of, or up to `tolerance` fewer. It has the
        first `low`, and has not the one after the first `high`."""
        # Whoever has a block has, but for rare cases, those before it: they are evicted later. So there is one place
        # from which on all are missing. Most workers have nothing, or all of it.
        told = self._told
        if not low and hashes[0] not in told:
            return 0
        if high == len(hashes) and hashes[-1] in told:
            return high
        while high - low > tolerance:
            middle = (low + high) // 2
            if hashes[middle] in told:
                low = middle + 1
            else:
                high = middle
        return low

    def _with_expected(self, hashes: Sequence[ShortHash], known: int) -> int:
        """Returns how many of a prompt's first blocks are known or expected, if the worker has told of `known`."""
        first = hashes[0]
        for prompts in (self._expected, self._expected_before):
            if alike := prompts.by_first.get(first):
                known = _extended(hashes, known, alike)
        return known

    def _turn(self) -> None:
        self._expected_before, self._expected = self._expected, _Prompts()


def num_blocks_of(caches: Sequence[KnownCache], hashes: Sequence[ShortHash]) -> list[int]:
    """Returns `num_blocks` of each of the caches, which share an index, or up to a 64th of the prompt less.

    Where a hundred workers know a long prompt to different depths, the exact numbers take a dozen looks at the memory
    of each, and a 64th of a prompt decides nothing. It is exact for a worker that has nothing or all of it, and below
    64 blocks.
    """
    if not hashes:
        return [0] * len(caches)
    prompt = hashes if isinstance(hashes, PromptHashes) else PromptHashes(hashes)
    tolerance = len(prompt) // _FINENESS
    places = {cache.bit: place for place, cache in enumerate(caches)}
    found = [0] * len(caches)
    for low, high, some in caches[0].index.ranges(prompt, sum(places)):
        if not low and high <= tolerance:
            continue  # most workers have nothing of a prompt, and are not looked at one by one
        while some:
            bit = some & -some
            some ^= bit
            place = places[bit]
            found[place] = caches[place]._num_told(prompt, low, high, tolerance)
    first = prompt[0]
    for place, cache in enumerate(caches):
        if first in cache._expected.by_first or first in cache._expected_before.by_first:
            found[place] = cache._with_expected(prompt, found[place])
    return found


def most_told(caches: Sequence[KnownCache], hashes: Sequence[ShortHash], number: int) -> list[tuple[int, int]]:
    """Returns (place, number of the prompt's first blocks) of up to `number` of the caches, which share an index, that
    have told of most of the prompt; none if nobody has anything, or no more than a 64th of it."""
    if not hashes:
        return []
    prompt = hashes if isinstance(hashes, PromptHashes) else PromptHashes(hashes)
    tolerance = len(prompt) // _FINENESS
    places = {cache.bit: place for place, cache in enumerate(caches)}
    *_, (low, high, some) = caches[0].index.ranges(prompt, sum(places))
    found: list[tuple[int, int]] = []
    while some and len(found) < number and (low or high > tolerance):
        bit = some & -some
        some ^= bit
        if num_blocks := caches[places[bit]]._num_told(prompt, low, high, tolerance):
            found.append((places[bit], num_blocks))
    return found


class _Prompts:
    """Keeps the blocks of prompts, by the first of each."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Those that several prompts share are counted once."""
        self.num_hashes = 0
        """Those that are kept: of each prompt its own."""
        self.by_first: dict[ShortHash, deque[Sequence[ShortHash]]] = {}

    def add(self, hashes: Sequence[ShortHash]) -> None:
        if hashes:
            alike = self.by_first.setdefault(hashes[0], deque(maxlen=_MOST_ALIKE))
            self.num_blocks += len(hashes) - _extended(hashes, 0, alike)
            self.num_hashes += len(hashes)
            alike.append(hashes)


def _extended(hashes: Sequence[ShortHash], known: int, prompts: Iterable[Sequence[ShortHash]]) -> int:
    """Returns how many of the first blocks are known if `known` of them are, and those of these prompts."""
    for other in prompts:
        high = min(len(hashes), len(other))
        if known < high and other[known] == hashes[known]:
            known += 1  # a block's hash stands for those before it too, so that equal ones have equal beginnings
            while known < high:
                middle = (known + high) // 2
                if other[middle] == hashes[middle]:
                    known = middle + 1
                else:
                    high = middle
    return known


MARGIN = 1.25
"""A prefix is brought where it would cost less than computing it even if it took this many times what is expected."""
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
        """Adds a bring that was made: its tokens, and the milliseconds that it took."""
        self.num_seen += 1
        self._add(float(num_tokens), ms)

    @property
    def fixed_ms(self) -> float:
        return self._fixed_ms

    @property
    def token_ms(self) -> float:
        return self._token_ms

    def ms(self, num_tokens: int) -> float:
        """Returns the milliseconds that a bring of `num_tokens` is expected to take."""
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


def prefix_break_even(bring: BringTime, compute_token_ms: float) -> float:
    """Returns how many tokens take as long to bring, `MARGIN` included, as to compute; infinite if none do."""
    saved_ms = compute_token_ms - MARGIN * bring.token_ms
    return MARGIN * bring.fixed_ms / saved_ms if saved_ms > 0 else math.inf
