"""Chooses what a simulated worker's next step computes, by the rules of the engine's scheduler, and counts blocks.

Running sequences grow first, by priority and arrival, and the last of them are preempted for that; then prompts go on,
and others are admitted while the step has room for their tokens. `tests/unit/sim/test_as_the_engine.py` compares it
with `services/engine/schedule`, step by step: that one names each block and token, which would take too long here.
Owns: a worker's queues, batch and blocks. Never: time, messages, handoffs (`worker`), the prefix cache (`pool`).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from services.core.records import record
from services.sim.pool import Hits, Part, PromptParts, Remnant, SimPool
from services.sim.profile import WorkerProfile

_MAX_EXAMINED = 8
_OVERTAKE_LIMIT_S = 1.0
"""Both as in `services/engine/schedule/queues.py`."""


@dataclass(frozen=True)
class WorkerRules:
    """Says how workers compute. What Baton's do is the default; the others are what is compared with."""

    prefix_caching: bool = True
    chunked: bool = True
    """Whether a long prompt is computed in several steps, together with decodes. Otherwise all of it is in one step,
    and others are beside it only within the limit of a step's tokens."""
    static: bool = False
    """Whether sequences are computed in batches that nobody joins or leaves: the next begins when the last sequence of
    one has ended, and until then each step costs what it does with all of them (request-level batching)."""


@dataclass(eq=False, slots=True)
class Stream:
    """Keeps what the legs of one request have in common: its output."""

    newest_s: float | None = None
    """When its newest token was computed; None if it has none."""


@dataclass(eq=False, slots=True)
class SimLeg:
    """Keeps one leg at a worker."""

    leg: int
    num_tokens: int
    """Prompt and replayed output: what is computed before the leg's first token."""
    position: int
    """The output position of the leg's first token."""
    most_output: int
    only_prefill: bool
    prompt: PromptParts
    stream: Stream
    priority: int = 0
    number: int = 0
    """Its place in the order of arrival."""
    arrival_s: float = 0.0
    num_computed: int = 0
    """Tokens whose KV is there; of a sequence that decodes, all but the newest are."""
    num_output: int = 0
    num_reported: int = 0
    reported_s: float = 0.0
    num_blocks: int = 0
    """Its own."""
    held: list[Part] = field(default_factory=list)
    """Parts of its prompt in blocks that others may use too."""
    num_held_blocks: int = 0
    """Blocks of these parts."""
    remnant: Remnant | None = None
    """What was left of it in the cache when it was preempted."""
    decoding: bool = False
    cancelled: bool = False
    in_place: bool = False
    """Whether it takes over a lease of its own worker."""
    sealed_s: float | None = None
    on_sealed: Callable[[], None] | None = None
    """What a destination does that fetches the lease."""
    on_lost: Callable[[], None] | None = None
    """What it does if the lease is lost meanwhile."""
    ended: bool = False
    """Whether the lease is over."""

    @property
    def context(self) -> int:
        return self.num_tokens + self.num_output

    @property
    def all_blocks(self) -> int:
        return self.num_blocks + self.num_held_blocks

    @property
    def to_compute(self) -> int:
        """Returns the tokens whose KV is missing, of one that does not decode: a preempted sequence computes its output
        again too."""
        return self.num_tokens + self.num_output - self.num_computed

    @property
    def rank(self) -> tuple[int, int]:
        """Returns a sort key that puts higher priority first, then earlier arrival."""
        return -self.priority, self.number

    def take_blocks_of(self, other: SimLeg) -> None:
        self.num_blocks, self.num_held_blocks, self.held = other.num_blocks, other.num_held_blocks, other.held
        other.num_blocks, other.num_held_blocks, other.held = 0, 0, []


_rank = attrgetter("rank")


@record
class SimStep:
    """Says what a step computes: a token of each of `decodes`, and a number of tokens of each prompt in `parts`."""

    decodes: list[SimLeg]
    parts: list[tuple[SimLeg, int]]
    admitted: list[SimLeg]
    """Sequences that got their blocks for the first time."""


class SimScheduler:
    def __init__(
        self, profile: WorkerProfile, rules: WorkerRules, pool: SimPool, *, limits_leased_blocks: bool
    ) -> None:
        """`limits_leased_blocks` says whether leases may hold half of the pool at most, except a worker's only one."""
        self.running: dict[int, SimLeg] = {}
        """Sequences of the batch by leg, in order of admission."""
        self.adopted: deque[SimLeg] = deque()
        self.preempted: list[SimLeg] = []
        self.waiting: list[SimLeg] = []
        self.leases: dict[int, SimLeg] = {}
        self.num_preemptions = 0
        self.batch_size = 0
        """Sequences that began together, with static batching."""
        self._profile = profile
        self._rules = rules
        self._pool = pool
        self._most_running = min(profile.max_num_seqs, profile.max_num_batched_tokens)
        self._most_leased = profile.num_blocks // 2 if limits_leased_blocks else None

    # What comes and goes

    def add(self, work: SimLeg) -> None:
        insort(self.waiting, work, key=_rank)

    def remove(self, leg: int) -> None:
        """Takes out a leg that no step computes now, if it is here."""
        for line in (self.waiting, self.preempted, self.adopted):
            for work in [work for work in line if work.leg == leg]:
                line.remove(work)
                self.give_back(work)
        if leg in self.running:
            self.leave(self.running[leg])

    def leave(self, work: SimLeg) -> None:
        """Takes a sequence out of the batch. Blocks under a lease stay the lease's."""
        del self.running[work.leg]
        if not (work.only_prefill and work.leg in self.leases):
            self.give_back(work)

    @property
    def full(self) -> bool:
        return len(self.running) >= self._most_running

    @property
    def num_waiting(self) -> int:
        return len(self.adopted) + len(self.preempted) + len(self.waiting)

    @property
    def queued_tokens(self) -> int:
        """Returns how many tokens must be computed before their sequences decode. Of what was cancelled it is at most a
        step, which is under way."""
        most = self._profile.max_num_batched_tokens
        running = sum(
            min(work.to_compute, most) if work.cancelled else work.to_compute
            for work in self.running.values()
            if not work.decoding
        )
        return running + sum(work.to_compute for work in chain(self.preempted, self.waiting))

    # Steps

    def schedule(self, now: float) -> SimStep:
        """Returns the next step, with nothing in it if there is nothing to compute."""
        begins = not self.running
        may_join = begins or not self._rules.static
        while True:
            while may_join and self.adopted and not self.full:
                work = self.adopted.popleft()
                self.running[work.leg] = work
            self._grow()
            if not may_join or not self.adopted or self.full:
                break  # otherwise a preemption has made room for one that holds blocks
        if self._rules.static and not begins and not self.running:
            return self.schedule(now)  # all of a static batch was preempted: the next one begins
        admitted: list[SimLeg] = []
        newcomers = self._admissions(now, admitted)
        if self._rules.static:
            if begins:
                list(newcomers)  # the whole batch, whatever a step has room for
                self.batch_size = 0
            newcomers = iter(())
            self.batch_size = max(self.batch_size, len(self.running))
        decodes = [work for work in self.running.values() if work.decoding]
        prefills = [work for work in self.running.values() if not work.decoding]
        if self._rules.static and prefills:
            decodes = []  # all prompts of a batch come first
        budget = self._profile.max_num_batched_tokens - len(decodes)
        return SimStep(decodes, self._parts(chain(prefills, newcomers), budget), admitted)

    def _parts(self, prompts: Iterator[SimLeg], budget: int) -> list[tuple[SimLeg, int]]:
        """Returns which prompts the step computes, and how many tokens of each. It asks for the next one only if the
        step has room, since that one holds blocks from then on."""
        parts: list[tuple[SimLeg, int]] = []
        while budget > 0 and (work := next(prompts, None)) is not None:
            count = min(budget, work.to_compute) if self._rules.chunked else work.to_compute
            if parts and count > budget:
                break
            parts.append((work, count))
            budget -= count
        return parts

    def num_steps_ahead(self, decodes: list[SimLeg], most: int) -> int:
        """Returns for how many steps in a row there are blocks if nobody else takes any, at most `most`; at least 1."""
        while most > 1 and self.num_missing(decodes, most) > self._pool.available:
            most //= 2
        return max(1, most)

    def num_missing(self, decodes: list[SimLeg], num_steps: int) -> int:
        """Returns how many blocks `num_steps` steps in a row need that are not there yet. The token that a step samples
        needs none before the step after it."""
        size, more = self._profile.block_size, num_steps - 1
        return sum(max(0, -(-(work.context + more) // size) - work.all_blocks) for work in decodes)

    def cover(self, decodes: list[SimLeg], num_more: int = 0) -> None:
        """Gives sequences the blocks of their tokens and of `num_more` tokens, which must be available."""
        size = self._profile.block_size
        for work in decodes:
            num_tokens = work.num_tokens + work.num_output + num_more
            lacking = -(-num_tokens // size) - work.num_blocks - work.num_held_blocks
            if lacking > 0:
                self._pool.take(lacking)
                work.num_blocks += lacking

    def _grow(self) -> None:
        """Gives decodes the blocks that they lack, by rank. Those that are last by rank are preempted for that."""
        size = self._profile.block_size
        short = [
            work
            for work in self.running.values()
            if work.num_tokens + work.num_output > size * (work.num_blocks + work.num_held_blocks)
        ]
        for work in sorted(short, key=_rank):
            while work.leg in self.running:
                lacking = -(-work.context // size) - work.all_blocks
                if lacking <= self._pool.available:
                    self._pool.take(lacking)
                    work.num_blocks += lacking
                    break
                # A peer copies the blocks of those under a lease.
                self._preempt(max((each for each in self.running.values() if not each.only_prefill), key=_rank))

    def _preempt(self, work: SimLeg) -> None:
        self.num_preemptions += 1
        del self.running[work.leg]
        work.remnant = self.give_back(work)
        work.num_computed, work.decoding = 0, False
        insort(self.preempted, work, key=_rank)

    # Admission

    def _admissions(self, now: float, admitted: list[SimLeg]) -> Iterator[SimLeg]:
        """Admits and yields one sequence after the other, while there is room; those for the first time are added to
        `admitted`. Preempted ones were admitted before all that wait."""
        while not self.full:
            comes_back = bool(self.preempted)
            work = self._take_preempted() if comes_back else self._take_waiting(now)
            if work is None:
                return
            self.running[work.leg] = work
            if not comes_back:
                admitted.append(work)
                if work.only_prefill:
                    self.leases[work.leg] = work
            yield work

    def _take_preempted(self) -> SimLeg | None:
        hits = self._room(self.preempted[0])
        if hits is None:
            return None
        work = self.preempted.pop(0)
        self._enter(work, hits)
        return work

    def _take_waiting(self, now: float) -> SimLeg | None:
        """Takes the first that has room. One that has waited long is not overtaken, but by others than leases if it is
        the limit of leases that keeps it out."""
        num_examined, leases_in_order = 0, False
        for at, work in enumerate(self.waiting):
            if leases_in_order and work.only_prefill:
                continue
            hits = self._room(work)
            within_limit = hits is None or self._within_lease_limit(work, hits)
            if hits is not None and within_limit:
                del self.waiting[at]
                self._enter(work, hits)
                return work
            num_examined += 1
            aged = now - work.arrival_s > _OVERTAKE_LIMIT_S
            if num_examined == _MAX_EXAMINED or (aged and within_limit):
                return None
            leases_in_order = leases_in_order or aged
        return None

    def _room(self, work: SimLeg) -> Hits | None:
        """Returns what the cache has of a sequence if there are blocks for all its tokens, and None otherwise."""
        available, needed = self._pool.available, self._needed(work)
        if needed - (work.context - 1) // self._profile.block_size > available:
            return None  # it would not fit with all its blocks cached
        hits = self._pool.find(work.prompt, work.context, work.remnant)
        return hits if needed - hits.num_blocks + hits.num_unused <= available else None

    def _needed(self, work: SimLeg) -> int:
        """Returns the blocks of a sequence's tokens, and of the one that it samples unless it ends with that."""
        goes_on = not work.only_prefill and work.most_output - work.num_output > 1
        return min(-(-(work.context + goes_on) // self._profile.block_size), self._profile.num_blocks)

    def _within_lease_limit(self, work: SimLeg, hits: Hits) -> bool:
        if not work.only_prefill or self._most_leased is None or not self.leases:
            return True
        num_leased = sum(lease.all_blocks for lease in self.leases.values())
        return num_leased + self._needed(work) <= self._most_leased

    def _enter(self, work: SimLeg, hits: Hits) -> None:
        self.hold(work, hits, self._needed(work) - hits.num_blocks)
        work.num_computed = hits.num_blocks * self._profile.block_size

    # Blocks

    def hold(self, work: SimLeg, hits: Hits, num_fresh: int) -> None:
        """Gives a sequence what the cache has of it, and `num_fresh` blocks more."""
        self._pool.hold(hits, work.remnant)
        self._pool.take(num_fresh)
        work.held, work.num_held_blocks = hits.parts, hits.num_part_blocks
        work.num_blocks, work.remnant = hits.num_remnant_blocks + num_fresh, None

    def keep(self, work: SimLeg) -> None:
        """Lets the prefix cache have the parts of the leg's prompt, which are computed."""
        new = self._pool.keep(work.prompt, work.num_tokens)
        num_blocks = sum(part.num_blocks for part in new)
        work.num_blocks -= num_blocks
        work.num_held_blocks += num_blocks
        work.held += new

    def give_back(self, work: SimLeg) -> Remnant | None:
        """Takes all blocks from a sequence. Returns what of it stays in the cache beside the parts of its prompt."""
        num_computed = work.context - 1 if work.decoding else work.num_computed
        num_full = min(num_computed // self._profile.block_size - work.num_held_blocks, work.num_blocks)
        num_full = max(0, num_full)
        self._pool.give(work.num_blocks - num_full)
        remnant = self._pool.leave(work.num_held_blocks, num_full)
        self._pool.let_go(work.held)
        work.num_blocks, work.num_held_blocks, work.held = 0, 0, []
        return remnant
