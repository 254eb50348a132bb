"""Connects a fetch to its source by one of the transports that both have.

Owns: the destination's ends of this worker's transports, which of them is taken, and the probes that compare them.
Never: what is copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping, Sequence

from baton.v1 import types_pb2
from services.core.clock import Clock, timeout_after
from services.core.errors import BatonError
from services.kv.layout import Layout
from services.kvtransfer.transport_choice import TransportChoice
from services.kvtransfer.transports import Copier, DestinationEnd, FetchName, ProbedEnd, TransportUnavailable
from services.kvtransfer.wire import require_whole
from services.rpc.plain import enum_word

log = logging.getLogger(__name__)

RETRY_S = 600.0
"""Seconds after which transports that a probe found not to work are tried again: it may have been a bad moment."""


class Connector:
    """Takes, of `transports` that a source offers and that work from here, the fastest, by a short probe when the two
    have met; before that, the first. `silence_s`, measured by `awake`, bounds each probe."""

    def __init__(self, transports: Sequence[DestinationEnd], layout: Layout, *, awake: Clock, silence_s: float) -> None:
        self.transports = transports
        self.choice = TransportChoice()
        self._layout = layout
        self._awake = awake
        self._silence_s = silence_s
        self._probing: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Gives up a probe under way."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])

    def close(self) -> None:
        """Closes the transports, after copies under way have ended."""
        for end in self.transports:
            end.close()

    async def connect(self, source: types_pb2.KVSource, fetch: FetchName) -> Copier:
        """Returns a copier for the fetch. Raises what the transports' ends do, and TransportUnavailable if there is
        none that both have."""
        offers = {offer.transport: offer for offer in source.offers}
        ends = [end for end in self.transports if end.transport in offers]
        for end in ends:
            require_whole(offers[end.transport].shards, self._layout)
        if not ends:
            raise TransportUnavailable("the source offers no transport that this worker pulls by")
        ends = self.choice.in_order(source.incarnation, ends)
        for end in ends[:-1]:
            try:
                return await end.connect(source, offers[end.transport], fetch)
            except TransportUnavailable as error:
                self.choice.unusable(source.incarnation, end.transport)
                log.info("kv transfer from %s takes another transport: %s", source.address, error)
        return await ends[-1].connect(source, offers[ends[-1].transport], fetch)

    def fetched(
        self, source: types_pb2.KVSource, transport: types_pb2.Transport, num_bytes: int, copy_s: float
    ) -> None:
        """Notes what a fetch has shown, and begins to compare the source's transports if they were not."""
        self.choice.fetched(source.incarnation, transport, num_bytes, copy_s)
        self._compare(source)

    def _compare(self, source: types_pb2.KVSource) -> None:
        """Begins to compare the source's transports, unless they were, or there is nothing to compare. No fetch waits
        for it: the first from a source goes by the first that works."""
        offers = {offer.transport: offer for offer in source.offers}
        ends = [end for end in self.transports if end.transport in offers and isinstance(end, ProbedEnd)]
        is_due = len(ends) > 1 or (ends and self.choice.has_unusable(source.incarnation))
        if is_due and not self.choice.knows(source.incarnation) and self._probing is None:
            self._probing = asyncio.create_task(self._probe(source, ends, offers), name="kv-probe")
            self._probing.add_done_callback(self._probe_ended)

    def _probe_ended(self, probe: asyncio.Task[None]) -> None:
        self._probing = None
        if not probe.cancelled() and (error := probe.exception()) is not None:
            log.error("internal error (kv probe)", exc_info=error)

    async def _probe(
        self,
        source: types_pb2.KVSource,
        ends: Sequence[ProbedEnd],
        offers: Mapping[types_pb2.Transport, types_pb2.KVOffer],
    ) -> None:
        rates: dict[Hashable, float] = {}
        for end in ends:
            try:
                async with timeout_after(self._silence_s, self._awake):
                    rates[end.transport] = await end.probe(source, offers[end.transport])
            except (BatonError, TimeoutError) as error:
                log.info("kv transfer from %s: a transport does not work: %s", source.address, error or "no answer")
                rates[end.transport] = 0.0
        self.choice.probed(source.incarnation, rates)
        if not all(rates.values()):
            asyncio.get_running_loop().call_later(RETRY_S, self.choice.failed, source.incarnation)
        words = ", ".join(
            f"{enum_word(types_pb2.Transport.DESCRIPTOR, end.transport)} {rates[end.transport] / 1e9:.2f} GB/s"
            for end in self.choice.in_order(source.incarnation, ends)
        )
        log.info("kv transfer from %s: a probe says %s; the first is taken", source.address, words)
