"""Takes a handoff's KV in: reserves blocks or refuses at once, then fetches them, or adopts this worker's own lease.

Owns: the references to blocks between the pool and the sequence that will use them. Never: the session, or the sequence
once its blocks are complete.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import types_pb2, worker_pb2
from services.core.config import DAY_S
from services.core.errors import BatonError, LayoutMismatch, LeaseInvalid, ProtocolViolation
from services.engine.schedule.sequence import Sequence
from services.kv.handoff_admission import AdmissionPolicy, EngineRoom, Refusal
from services.kv.imports import Import, ImportState
from services.kv.lease import FetchEnd, LeaseState
from services.kv.pool import Holder
from services.kvtransfer.client import FetchOrder, FetchOutcome
from services.kvtransfer.wire import layout_from_proto
from services.worker.host import WorkerHost


@dataclass(slots=True)
class Held:
    """Keeps the blocks of one handoff, from `reserve` or `adopt` until they are passed to `enter` or `give_up`."""

    prefix: list[int]
    """The blocks found in the prefix cache; SEQUENCE references to them are held."""
    block_ids: tuple[int, ...]
    """The blocks after the prefix; references of kind `holder` to them are held."""
    holder: Holder
    import_: Import | None = None
    """The import, whose table keeps the references to `block_ids` until it is READY or FREED; None after `adopt`."""
    over: bool = False
    """Whether the blocks were passed on, so that nothing is held any more."""


class Refused(BatonError):
    """Says that there is no room for the handoff now."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class ImportIntake:
    """Takes handoffs in: reserves their blocks, and imports their KV."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._policy = AdmissionPolicy()

    def is_local(self, handoff: worker_pb2.Handoff) -> bool:
        return handoff.source.incarnation == self._host.incarnation

    def reserve(self, command: worker_pb2.DecodeCommand, sequence: Sequence) -> Held:
        """Reserves the blocks of a handoff and adds its import. It never waits.

        Raises Refused if there is no room, and LayoutMismatch if the source's layout is another.
        """
        mismatch = self._host.layout.mismatch(layout_from_proto(command.handoff.source.layout))
        if mismatch is not None:
            raise LayoutMismatch(mismatch)
        host, age_s = self._host, min(max(0.0, command.age_ms / 1000), DAY_S)

        def check(num_fresh: int, room: EngineRoom) -> None:
            # One block more than the handoff brings, since the token after token 0 needs a slot.
            refusal = self._policy.decide(
                command.handoff.lease_id, num_fresh + 1, age_s, room, len(host.imports), host.awake.now()
            )
            if refusal is not None:
                raise Refused(refusal)

        blocks = host.engine.reserve(sequence, check)
        held = Held(blocks.prefix, tuple(blocks.fresh), Holder.IMPORT)
        try:
            held.import_ = host.imports.reserve(held.block_ids, host.clock.now())
        except BaseException:
            self.give_up(held)
            raise
        return held

    async def fetch(self, command: worker_pb2.DecodeCommand, held: Held) -> FetchOutcome:
        """Fetches the blocks. Whether it returns or raises, the caller then calls `enter` or `give_up`.

        Raises what `BlockFetcher.fetch` does, and ProtocolViolation if the seal contradicts the command.
        """
        assert held.import_ is not None, "nothing to copy into"
        outcome = await self._host.fetcher.fetch(
            FetchOrder(
                source=command.handoff.source,
                lease_id=command.handoff.lease_id,
                leg=command.leg,
                import_=held.import_,
                first_block=len(held.prefix),
                targets=held.block_ids,
                checksums=self._host.config.checksums,
            )
        )
        if outcome.ready and (contradiction := self._contradiction(command, outcome)) is not None:
            raise ProtocolViolation(contradiction)
        return outcome

    def give_up(self, held: Held) -> None:
        """Frees the prefix now, and the import once no copy can still write it. Without effect after `enter`."""
        if held.over:
            return
        held.over = True
        if held.import_ is not None:
            self._host.imports.drain(held.import_, self._host.clock.now())
        if held.import_ is None or held.import_.state is ImportState.READY:
            self._host.engine.release(held.block_ids, held.holder)
        self._host.engine.release(held.prefix, Holder.SEQUENCE)

    async def adopt(self, command: worker_pb2.DecodeCommand) -> tuple[types_pb2.SequenceTokens, Held | None]:
        """Waits until this worker's own lease is sealed, and takes its blocks over in place, without a copy.

        Returns token 0, and the blocks unless that token ended the sequence. Raises LeaseInvalid if the lease ends
        first, and ProtocolViolation if it has another number of tokens than the command.
        """
        leases, awake = self._host.leases, self._host.awake
        lease = leases.get(command.handoff.lease_id)
        if lease is not None and lease.num_tokens != len(command.token_ids):
            raise ProtocolViolation(f"the lease is of {lease.num_tokens} tokens, not of {len(command.token_ids)}")
        ticket = leases.open_fetch(command.handoff.lease_id, command.leg, 0, awake.now())
        with self._host.board.follow(ticket) as changed:
            # Nothing is announced to this fetch, so it cannot stall.
            while ticket.ended is None and ticket.lease.state is LeaseState.OPEN:
                await changed.wait()
                changed.clear()
            ended = ticket.ended
        first_token = ticket.lease.first_token
        if ended is not None and ended.broken:
            raise LeaseInvalid(ended.value)
        assert first_token is not None, "whoever adopts has waited for the seal"
        if ended is FetchEnd.FINISHED:  # token 0 ended the sequence
            return first_token, None
        lease = leases.adopt(command.handoff.lease_id, command.leg, awake.now())
        return first_token, Held([], lease.block_ids, Holder.LEASE)

    def enter(self, sequence: Sequence, first_token: types_pb2.SequenceTokens, held: Held) -> None:
        """Passes the sequence to the engine with token 0 and its blocks, all of them valid.

        If it raises, the caller still has the blocks.
        """
        token_id = first_token.token_ids[0]
        self._host.engine.adopt(sequence, held.prefix, held.block_ids, token_id, held.holder)
        held.over = True

    def _contradiction(self, command: worker_pb2.DecodeCommand, outcome: FetchOutcome) -> str | None:
        """Returns what is wrong with a source's seal, or None if nothing is.

        A wrong token or length would fail a step, and with it other sequences.
        """
        if outcome.num_tokens != len(command.token_ids):
            return f"the lease is of {outcome.num_tokens} tokens, not of {len(command.token_ids)}"
        token_ids = outcome.first_token.token_ids
        if len(token_ids) != 1 or not 0 <= token_ids[0] < self._host.engine.info.vocab_size:
            return "the seal does not bring one token of the vocabulary"
        return None
