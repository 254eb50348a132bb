"""Names the source from which a leg brings a part of its prompt's KV. Pure.

Owns: which brings are under way, and what the workers have found them to take. Never: what speaks for a source
(`services.router.policy.known_cache`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from services.router import policy
from services.router.coordinator.events import PrefixBrought, SendLeg
from services.router.coordinator.request import Request
from services.router.coordinator.workers import Worker, WorkerState, WorkerTable
from services.router.policy import PlacementChoice, PrefixOffer, PrefixOutcome, PrefixSource, Role


class PrefixSources:
    """Chooses sources among the workers, by what these have told of their caches."""

    def __init__(self, enabled: bool, workers: WorkerTable, legs: Container[int]) -> None:
        """`legs` are the current ones."""
        self._enabled = enabled
        self._workers = workers
        self._legs = legs
        self._brings: dict[int, tuple[str, PlacementChoice | None]] = {}
        """The source, by the leg that brings, or is about to, and the choice that tells of it."""

    def choose(self, request: Request, worker: Worker) -> PrefixSource | None:
        """Returns from whom the worker had better bring a part of the request's prompt, or why it had better not; None
        if nobody has more of it."""
        load = worker.load
        if not self._enabled or worker.cache is None or load is None or request.awaits_scores:
            return None
        block_size = worker.info.block_size
        hashes = request.spec.block_hashes.get(block_size, ())[: (len(request.leg_tokens()) - 1) // block_size]
        if not hashes or not load.saved_ms_per_token:
            return None
        return policy.choose_source(self._offers(worker, hashes), load.saved_ms_per_token)

    def add(self, command: SendLeg, source: PrefixSource | None, keeper: Worker | None) -> SendLeg:
        """Returns the command with its source and its store, and notes that the leg brings from that source."""
        if keeper is not None:
            command = replace(command, keep_at=keeper.info)
        if source is None:
            return command
        if command.choice is not None:
            command.choice.prefix = source
        if source.why_computed is not None:
            return command
        self._brings = {leg: bring for leg, bring in self._brings.items() if leg in self._legs}
        self._brings[command.leg] = source.worker_id, command.choice
        return replace(command, prefix_source=self._workers.get(source.worker_id).info)

    def keeper(self, request: Request, worker: Worker) -> Worker | None:
        """Returns the store that is to be offered what the worker computes for the request.

        It is None if there is none, or one has the prompt. One on the worker's host is best, then the one with the
        largest share of its memory left."""
        hashes = request.spec.block_hashes.get(worker.info.block_size, ())
        if not self._enabled or not hashes:
            return None

        def worth(store: Worker) -> tuple[bool, float, str]:
            load, info = store.load, store.info
            share = load.available_blocks / info.num_blocks if load is not None else 0.0
            return info.host_id != worker.info.host_id, -share, info.worker_id

        kept = (other for other in self._workers.all() if other.info.roles is Role.STORE)
        stores = list(self._peers(worker, kept))
        if any(store.cache is not None and store.cache.num_told(hashes) == len(hashes) for store in stores):
            return None
        return min(stores, key=worth, default=None)

    def brought(self, worker: Worker, event: PrefixBrought) -> None:
        """Takes over how long it took. One that failed tells nothing of how long one takes."""
        source_id = self._ended(event.leg, PrefixOutcome(event.num_tokens, event.ms))
        if source_id is not None and event.num_tokens:
            worker.bring_times[source_id].observe(event.num_tokens, event.ms)

    def over(self, leg: int) -> None:
        """Notes that the leg brings nothing, or nothing more."""
        self._ended(leg, PrefixOutcome(0, 0.0))

    def _ended(self, leg: int, outcome: PrefixOutcome) -> str | None:
        """Returns the source of a bring that was under way."""
        source_id, choice = self._brings.pop(leg, (None, None))
        if choice is not None:
            choice.brought = outcome
        return source_id

    def break_even(self, target: Worker) -> policy.PrefixBreakEven | None:
        """Returns from where on the worker brings prefixes from its best source; None if there is none, or it does not
        know yet what a prompt costs."""
        token_ms = target.load.saved_ms_per_token if target.load is not None else 0.0
        if not self._enabled or target.cache is None or not token_ms:
            return None
        sources = self._peers(target, self._workers.all())
        times = {source.info.worker_id: target.bring_times[source.info.worker_id] for source in sources}
        found = {name: policy.prefix_break_even(time, token_ms) for name, time in times.items()}
        best = min(found, key=lambda name: (not times[name].num_seen, found[name], name), default=None)
        if best is None:
            return None
        time = times[best]
        tokens = found[best] if found[best] < 1 << 40 else math.inf
        return policy.PrefixBreakEven(best, target.info.worker_id, tokens, time.fixed_ms, time.token_ms, time.num_seen)

    def _peers(self, target: Worker, others: Iterable[Worker]) -> Iterator[Worker]:
        """Yields those of the others that can be sources for the worker."""
        barred = target.sources.barred()
        for other in others:
            if (
                other is not target
                and other.state is WorkerState.READY
                and other.health.usable
                and other.cache is not None
                and other.info.worker_id not in barred
                and other.info.fingerprint.kv == target.info.fingerprint.kv
                and other.info.description is not None
            ):
                yield other

    def _offers(self, target: Worker, hashes: tuple[int, ...]) -> Iterator[PrefixOffer]:
        assert target.cache is not None
        num_here, block_size = target.cache.num_told(hashes), target.info.block_size
        if num_here == len(hashes):
            return
        lending = Counter(source_id for leg, (source_id, _) in self._brings.items() if leg in self._legs)
        # Most have nothing more, which one look tells: the rest of this is done for few.
        more = (each for each in self._workers.all() if each.cache is not None and hashes[num_here] in each.cache)
        for other in self._peers(target, more):
            assert other.cache is not None
            if (num_more := other.cache.num_told(hashes) - num_here) > 0:
                name, num_tokens = other.info.worker_id, num_more * block_size
                yield PrefixOffer(name, num_tokens, target.bring_times[name].ms(num_tokens), lending[name])
