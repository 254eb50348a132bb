"""Takes a handoff's KV in: reserves blocks or refuses at once, then fetches them, or adopts this worker's own lease.

Owns: the references to blocks between the pool and the sequence that will use them. Never: the session, or the sequence
once its blocks are complete.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from baton.v1 import worker_pb2
from services.core.errors import LeaseInvalid, ProtocolViolation
from services.engine.schedule.sequence import Sequence
from services.kv.handoff_admission import AdmissionPolicy, EngineRoom
from services.kv.imports import Import, ImportState
from services.kv.lease import FetchEnd, LeaseState
from services.kv.pool import Holder
from services.kvtransfer.client import FetchOrder, FetchOutcome
from services.worker.commands import num_answers_of
from services.worker.handoffs import Expected, FirstTokens, HandoffIntake
from services.worker.host import WorkerHost


@dataclass(slots=True)
class Held:
    """Keeps the blocks of one handoff, from `reserve` or `adopt` until they are passed to `enter` or `give_up`."""

    prefix: list[int]
    """The blocks found in the prefix cache; SEQUENCE references to them are held."""
    block_ids: tuple[int, ...]
    """The blocks after the prefix; references of kind `holder` to them are held."""
    holder: Holder
    spare: tuple[int, ...] = ()
    """Blocks set aside for further answers; references of kind `holder` to them are held."""
    import_: Import | None = None
    """The import, whose table keeps the references to `block_ids` and `spare` until it is READY or FREED; None after
    `adopt`."""
    over: bool = False
    """Whether the blocks were passed on, so that nothing is held any more."""


class ImportIntake:
    """Takes handoffs in: reserves their blocks, and imports their KV."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._handoffs = HandoffIntake(host, AdmissionPolicy())

    def is_local(self, handoff: worker_pb2.Handoff) -> bool:
        return handoff.source.incarnation == self._host.incarnation

    def reserve(self, command: worker_pb2.DecodeCommand, sequence: Sequence) -> Held:
        """Reserves the blocks of a handoff, for all its answers, and adds its import. It never waits.

        Raises Refused if there is no room, and LayoutMismatch if the source's layout is another.
        """
        self._handoffs.demand_layout(command.handoff)
        host, num_answers = self._host, num_answers_of(command)

        def check(num_fresh: int, room: EngineRoom) -> None:
            # One block more than the handoff brings, since the token after token 0 needs a slot.
            self._handoffs.check(command.handoff, num_fresh + 1, command.age_ms, room, num_answers)

        blocks = host.engine.reserve(sequence, check, num_answers - 1)
        held = Held(blocks.prefix, tuple(blocks.fresh), Holder.IMPORT, tuple(blocks.spare))
        try:
            held.import_ = host.imports.reserve(held.block_ids + held.spare, host.clock.now())
        except BaseException:
            self.give_up(held)
            raise
        return held

    async def fetch(self, command: worker_pb2.DecodeCommand, held: Held) -> FetchOutcome:
        """Fetches the blocks. Whether it returns or raises, the caller then calls `enter` or `give_up`.

        Raises what `HandoffIntake.fetch` does.
        """
        assert held.import_ is not None, "nothing to copy into"
        order = FetchOrder(
            source=command.handoff.source,
            lease_id=command.handoff.lease_id,
            leg=command.leg,
            import_=held.import_,
            first_block=len(held.prefix),
            targets=held.block_ids,
        )
        expected = Expected(len(command.token_ids), num_answers_of(command), command.output_base)
        return await self._handoffs.fetch(order, expected)

    def give_up(self, held: Held) -> None:
        """Frees the prefix now, and the import once no copy can still write it. Without effect after `enter`."""
        if held.over:
            return
        held.over = True
        if held.import_ is not None:
            self._host.imports.drain(held.import_, self._host.clock.now())
        if held.import_ is None or held.import_.state is ImportState.READY:
            self._host.engine.release(held.block_ids + held.spare, held.holder)
        self._host.engine.release(held.prefix, Holder.SEQUENCE)

    async def adopt(self, command: worker_pb2.DecodeCommand) -> tuple[FirstTokens, Held | None]:
        """Waits until this worker's own lease is sealed, and takes its blocks over in place, without a copy.

        Returns the first tokens, and the blocks unless these ended all answers. Raises LeaseInvalid if the lease ends
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
        first_token, others = ticket.lease.first_token, ticket.lease.other_first_tokens
        if ended is not None and ended.broken:
            raise LeaseInvalid(ended.value)
        if first_token is None:
            raise ProtocolViolation("blocks that are lent from the prefix cache are no handoff")
        first_tokens = (first_token, *others)
        if len(first_tokens) != num_answers_of(command):
            raise ProtocolViolation(f"the lease is of {len(first_tokens)} answers, not of {num_answers_of(command)}")
        if ended is FetchEnd.FINISHED:  # token 0 ended every answer
            return first_tokens, None
        lease = leases.adopt(command.handoff.lease_id, command.leg, awake.now())
        return first_tokens, Held([], lease.block_ids, Holder.LEASE)

    def enter(self, sequences: Many[tuple[Sequence, int]], held: Held) -> None:
        """Passes the sequences, each with its first token, to the engine with the blocks of their prompt, all of them
        valid.

        If it raises, the caller still has the blocks.
        """
        (first, token_id), *further = sequences
        self._host.engine.adopt(
            first, held.prefix, held.block_ids, token_id, held.holder, further=further, spare=held.spare
        )
        held.over = True
