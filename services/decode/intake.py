"""How a handoff's KV comes in: reserve or refuse at once, then pull the blocks, or adopt a lease of this very worker.

Owns: the references of blocks between the pool and the sequence that will use them. Never: the session, or the sequence
once its blocks are complete.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import decode_pb2, types_pb2
from services.core.errors import BatonError, LayoutMismatch, LeaseInvalid
from services.core.hashing import BlockHash, block_hashes, num_blocks_for
from services.decode.admission import AdmissionPolicy, Refusal, Room
from services.engine.block_pool import Holder
from services.engine.sequence import Sequence
from services.kvtransfer.client import FetchOrder, FetchOutcome
from services.kvtransfer.imports import Import
from services.kvtransfer.lease import LeaseState
from services.kvtransfer.wire import layout_from_proto
from services.worker.host import WorkerHost


@dataclass(slots=True)
class Reservation:
    """Blocks set aside for one handoff: the prompt's cached prefix, and fresh ones to import into."""

    prefix: list[int]
    """SEQUENCE references are held."""
    import_: Import
    """Its block_ids follow the prefix; IMPORT references are held until READY or FREED."""
    hashes: list[BlockHash]

    @property
    def block_ids(self) -> list[int]:
        return [*self.prefix, *self.import_.block_ids]


class Refused(BatonError):
    """No room now."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class Intake:
    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._policy = AdmissionPolicy()

    def is_local(self, handoff: decode_pb2.Handoff) -> bool:
        return handoff.source.incarnation == self._host.incarnation

    def reserve(self, command: decode_pb2.DecodeCommand, owner: object) -> Reservation:
        """Takes the blocks, or raises Refused or LayoutMismatch. Never waits."""
        mismatch = self._host.layout.mismatch(layout_from_proto(command.handoff.source.layout))
        if mismatch is not None:
            raise LayoutMismatch(mismatch)
        host, num_tokens = self._host, len(command.token_ids)
        block_size = host.engine.info.block_size
        hashes = block_hashes(command.token_ids, block_size, command.cache_salt)
        with host.engine.lock:
            pool = host.engine.pool
            # The last token's block is always imported: its KV is what the first step here continues from.
            prefix = pool.match_prefix(hashes[: (num_tokens - 1) // block_size])
            pool.acquire(prefix, Holder.SEQUENCE)
            num_fresh = num_blocks_for(num_tokens, block_size) - len(prefix)
            refusal = self._policy.decide(
                command.handoff.lease_id, num_fresh + 1, command.age_ms / 1000, self._room(), host.clock.now()
            )
            if refusal is not None:
                pool.release(prefix, Holder.SEQUENCE)
                raise Refused(refusal)
            fresh = pool.allocate(num_fresh, Holder.IMPORT)
        import_ = host.imports.reserve(owner=owner, block_ids=fresh, now=host.clock.now())
        return Reservation(prefix, import_, hashes)

    async def fetch(
        self, command: decode_pb2.DecodeCommand, reservation: Reservation, sequence: Sequence
    ) -> FetchOutcome:
        """Pulls the blocks; afterwards they are the sequence's, but for its last token, which it now has.

        When it raises, the reservation is given up. `ready` False: token 0 ended the sequence, and so did the import.
        """
        try:
            outcome = await self._host.fetcher.fetch(
                FetchOrder(
                    source=command.handoff.source,
                    lease_id=command.handoff.lease_id,
                    leg=command.leg,
                    import_=reservation.import_,
                    first_block=len(reservation.prefix),
                    targets=reservation.import_.block_ids,
                    transport=self._host.config.transport,  # type: ignore[arg-type]  # checked: one of the choices
                    checksums=self._host.config.checksums,
                )
            )
        except BaseException:
            self.give_up(reservation)
            raise
        if not outcome.ready:
            self.give_up(reservation)
            return outcome
        with self._host.engine.lock:
            self._host.engine.pool.transfer(reservation.import_.block_ids, Holder.IMPORT, Holder.SEQUENCE)
        sequence.num_cached = len(reservation.prefix) * self._host.engine.info.block_size
        _hand_over(sequence, reservation.block_ids, outcome.first_token)
        reservation.prefix = []  # the sequence's now: a later give_up must not touch them
        return outcome

    def give_up(self, reservation: Reservation) -> None:
        """Frees the prefix now, and the import when no copy can still write it. Idempotent; not after a hand-over."""
        self._host.imports.drain(reservation.import_, self._host.clock.now())
        prefix, reservation.prefix = reservation.prefix, []
        if prefix:
            self._host.release_blocks(prefix, Holder.SEQUENCE)

    async def adopt(self, command: decode_pb2.DecodeCommand, sequence: Sequence) -> types_pb2.SequenceTokens:
        """Takes this worker's own lease over in place, once it is sealed: references change hands, nothing moves.

        Returns token 0. Raises LeaseInvalid when the lease ends first.
        """
        host = self._host
        ticket = host.leases.open_fetch(command.handoff.lease_id, command.leg, 0, host.clock.now())
        with host.board.follow(ticket) as changed:
            while ticket.ended is None and ticket.lease.state is LeaseState.OPEN:
                await changed.wait()
                changed.clear()
                host.leases.ack(ticket, ticket.lease.num_published, host.clock.now())
            first_token = ticket.lease.first_token
            if ticket.ended is not None:
                if not ticket.ended.broken and isinstance(first_token, types_pb2.SequenceTokens):
                    return first_token
                raise LeaseInvalid(ticket.ended.value)
            lease = host.leases.adopt(command.handoff.lease_id, command.leg, host.clock.now())
        with host.engine.lock:
            host.engine.pool.transfer(lease.block_ids, Holder.LEASE, Holder.SEQUENCE)
        assert isinstance(first_token, types_pb2.SequenceTokens)
        _hand_over(sequence, list(lease.block_ids), first_token)
        return first_token

    def _room(self) -> Room:
        """Under the engine's lock."""
        engine = self._host.engine
        return Room(
            num_available=engine.pool.num_available,
            num_blocks=engine.pool.num_blocks,
            num_sequences=engine.scheduler.num_running + engine.scheduler.num_waiting + len(self._host.imports),
            max_num_seqs=engine.scheduler.config.max_num_seqs,
            num_preempted=engine.scheduler.num_preempted,
        )


def _hand_over(sequence: Sequence, block_ids: list[int], first_token: types_pb2.SequenceTokens) -> None:
    sequence.block_ids = block_ids
    sequence.num_computed = len(sequence.token_ids)
    sequence.token_ids.append(first_token.token_ids[0])
