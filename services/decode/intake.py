"""How a handoff's KV comes in: reserve or refuse at once, then pull the blocks, or adopt a lease of this very worker.

Owns: the references of blocks between the pool and the sequence that will use them. Never: the session, or the sequence
once its blocks are complete.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import decode_pb2, types_pb2
from services.core.errors import BatonError, LayoutMismatch, LeaseInvalid, ProtocolViolation
from services.core.hashing import block_hashes, num_blocks_for
from services.decode.admission import AdmissionPolicy, Refusal, Room
from services.engine.block_pool import Holder
from services.engine.sequence import Sequence
from services.kvtransfer.client import FetchOrder, FetchOutcome
from services.kvtransfer.imports import Import
from services.kvtransfer.lease import FetchEnd, LeaseState
from services.kvtransfer.wire import layout_from_proto
from services.worker.host import WorkerHost


@dataclass(slots=True)
class Reservation:
    """Blocks set aside for one handoff: the prompt's cached prefix, and fresh ones to import into."""

    prefix: list[int]
    """SEQUENCE references are held."""
    import_: Import
    """Its block_ids follow the prefix; IMPORT references are held until READY or FREED."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A handoff's KV, valid and complete. To be passed to `enter` or `discard` before the next await."""

    first_token: types_pb2.SequenceTokens
    """With `finish` if it ended the sequence; there are no blocks then."""
    prefix: list[int]
    """SEQUENCE references are held."""
    block_ids: tuple[int, ...]
    """What follows the prefix; references of kind `holder` are held."""
    holder: Holder


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
        return Reservation(prefix, import_)

    async def fetch(self, command: decode_pb2.DecodeCommand, reservation: Reservation) -> tuple[FetchOutcome, Arrival]:
        """Pulls the blocks. When it raises, the reservation is given up, as it is when token 0 ended the sequence."""
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
            return outcome, Arrival(outcome.first_token, [], (), Holder.IMPORT)
        prefix, reservation.prefix = reservation.prefix, []  # no longer the reservation's to give up
        arrival = Arrival(outcome.first_token, prefix, reservation.import_.block_ids, Holder.IMPORT)
        if (nonsense := self._nonsense(command, outcome)) is not None:
            self.discard(arrival)
            raise ProtocolViolation(nonsense)
        return outcome, arrival

    def give_up(self, reservation: Reservation) -> None:
        """Frees the prefix now, and the import when no copy can still write it. Idempotent; not after a hand-over."""
        self._host.imports.drain(reservation.import_, self._host.clock.now())
        prefix, reservation.prefix = reservation.prefix, []
        if prefix:
            self._host.release_blocks(prefix, Holder.SEQUENCE)

    async def adopt(self, command: decode_pb2.DecodeCommand) -> Arrival:
        """Takes this worker's own lease over in place, once it is sealed: references change hands, nothing moves.

        Raises LeaseInvalid when the lease ends first.
        """
        leases, clock = self._host.leases, self._host.clock
        lease = leases.get(command.handoff.lease_id)
        if lease is not None and lease.num_tokens != len(command.token_ids):
            raise ProtocolViolation(f"the lease is of {lease.num_tokens} tokens, not of {len(command.token_ids)}")
        ticket = leases.open_fetch(command.handoff.lease_id, command.leg, 0, clock.now())
        with self._host.board.follow(ticket) as changed:
            # Nothing is announced to this fetch, so it cannot stall.
            while ticket.ended is None and ticket.lease.state is LeaseState.OPEN:
                await changed.wait()
                changed.clear()
            first_token = ticket.lease.first_token
            if ticket.ended is not None and ticket.ended.broken:
                raise LeaseInvalid(ticket.ended.value)
            assert isinstance(first_token, types_pb2.SequenceTokens)
            if ticket.ended is FetchEnd.FINISHED:  # token 0 ended the sequence
                return Arrival(first_token, [], (), Holder.LEASE)
            lease = leases.adopt(command.handoff.lease_id, command.leg, clock.now())
        return Arrival(first_token, [], lease.block_ids, Holder.LEASE)

    def enter(self, sequence: Sequence, arrival: Arrival) -> None:
        """The sequence joins the batch with its blocks and token 0."""
        sequence.block_ids = [*arrival.prefix, *arrival.block_ids]
        sequence.num_cached = len(arrival.prefix) * self._host.engine.info.block_size
        sequence.num_computed = len(sequence.token_ids)
        sequence.token_ids.append(arrival.first_token.token_ids[0])
        self._host.engine.adopt(sequence, arrival.block_ids, arrival.holder)

    def discard(self, arrival: Arrival) -> None:
        """Nobody wants it any more."""
        self._host.release_blocks(arrival.prefix, Holder.SEQUENCE)
        self._host.release_blocks(arrival.block_ids, arrival.holder)

    def _nonsense(self, command: decode_pb2.DecodeCommand, outcome: FetchOutcome) -> str | None:
        """What is wrong with a source's seal; such a token or length would fail a step, and others with it."""
        if outcome.num_tokens != len(command.token_ids):
            return f"the lease is of {outcome.num_tokens} tokens, not of {len(command.token_ids)}"
        token_ids = outcome.first_token.token_ids
        if len(token_ids) != 1 or not 0 <= token_ids[0] < self._host.engine.info.vocab_size:
            return "the seal does not bring one token of the vocabulary"
        return None

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
