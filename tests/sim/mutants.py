"""Deliberate bugs, put into the real code while a simulation runs. Each must be found: they show that it bites.

A mutant is a context manager; `MUTANTS` names them. Bugs of the handoff's tables come first, then workers, then the
router.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from baton.v1 import decode_pb2, kvtransfer_pb2, types_pb2
from services.core.errors import LeaseInvalid
from services.core.hashing import block_hashes, num_blocks_for
from services.decode.intake import Intake, Reservation
from services.decode.leg import DecodeLeg
from services.engine import batch, prefix
from services.engine.block_pool import Holder
from services.engine.engine import Engine
from services.engine.scheduler import Scheduler
from services.engine.sequence import Admitted, StepPlan
from services.engine.sequence import Sequence as EngineSequence
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.client import BlockFetcher, FetchOrder
from services.kvtransfer.imports import Import, ImportState, ImportTable
from services.kvtransfer.lease import FetchEnd, FetchTicket, Lease, LeaseState
from services.kvtransfer.lease_table import LeaseTable, ReleaseAnswer
from services.kvtransfer.transports.shm_mapping import Mapping, MappingCache
from services.prefill.leg import PrefillLeg
from services.router.coordinator import coordinator, dispatch, failures, handoff
from services.router.conductor import Conductor
from services.router.coordinator.requests import Request
from services.worker.host import WorkerHost
from services.worker.session import RouterSession

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def replaced(owner: Any, name: str, new: Any) -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(owner, name, new)


# The lease.


def uses_blocks_without_a_valid_release() -> contextlib.AbstractContextManager[Any]:
    async def release(self: BlockFetcher, order: FetchOrder, stub: Any) -> None:
        with contextlib.suppress(Exception):
            request = kvtransfer_pb2.ReleaseRequest(lease_id=order.lease_id, leg=order.leg)
            await stub.Release(request, timeout=self._silence_s)

    return replaced(BlockFetcher, "_release", release)


def frees_a_lease_twice() -> contextlib.AbstractContextManager[Any]:
    leave = LeaseTable._leave

    def leave_twice(self: LeaseTable, lease: Lease, to: LeaseState, why: FetchEnd, now: float) -> None:
        leave(self, lease, to, why, now)
        self._on_end(lease)

    return replaced(LeaseTable, "_leave", leave_twice)


def forgets_expiry_when_idle() -> contextlib.AbstractContextManager[Any]:
    return replaced(LeaseBoard, "_arm", lambda self, deadline_s: None)


def hands_a_lease_to_an_old_leg() -> contextlib.AbstractContextManager[Any]:
    """Neither fetch nor release looks at the leg, and one fetch goes on beside the other."""

    def open_fetch(self: LeaseTable, lease_id: bytes, leg: int, first_block: int, now: float) -> FetchTicket:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseInvalid("unknown")
        lease.fetch = FetchTicket(lease, leg, first_block, copied=first_block, opened_s=now)
        self._changed(lease, now)
        return lease.fetch

    def release(self: LeaseTable, lease_id: bytes, leg: int, now: float) -> ReleaseAnswer:
        lease = self._leases.get(lease_id) or self._ended.get(lease_id)
        if lease is None or lease.state not in (LeaseState.SEALED, LeaseState.RELEASED):
            return ReleaseAnswer(False, "unknown")
        if lease.state is LeaseState.SEALED:
            lease.fetch = None  # whoever else fetches goes on
            self._leave(lease, LeaseState.RELEASED, FetchEnd.RELEASED, now)
        return ReleaseAnswer(True)

    return _both(replaced(LeaseTable, "open_fetch", open_fetch), replaced(LeaseTable, "release", release))


def announces_blocks_before_they_are_computed() -> contextlib.AbstractContextManager[Any]:
    admitted = PrefillLeg._admitted

    def announce(self: PrefillLeg, event: Admitted) -> None:
        admitted(self, event)
        if self._lease is not None:
            self._host.leases.publish(self._lease.lease_id, self._lease.num_tokens, self._host.clock.now())

    return replaced(PrefillLeg, "_admitted", announce)


def announces_a_partial_block() -> contextlib.AbstractContextManager[Any]:
    def publish(self: LeaseTable, lease_id: bytes, num_computed_tokens: int, now: float) -> bool:
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.num_published = num_blocks_for(num_computed_tokens, self._block_size)
            self._changed(lease, now)
        return lease is not None

    return replaced(LeaseTable, "publish", publish)


# The import.


def frees_blocks_under_a_copy() -> contextlib.AbstractContextManager[Any]:
    def drain(self: ImportTable, import_: Import, now: float) -> bool:
        if import_.given_up or import_.state is ImportState.READY:
            return False
        import_.advance(ImportState.DRAINING, now)
        import_.advance(ImportState.FREED, now)
        del self._imports[import_]
        self._on_freed(import_)
        return True

    return replaced(ImportTable, "drain", drain)


def frees_an_import_twice() -> contextlib.AbstractContextManager[Any]:
    free = ImportTable._free_if_quiet

    def free_twice(self: ImportTable, import_: Import, now: float) -> None:
        free(self, import_, now)
        if import_.state is ImportState.FREED:
            self._on_freed(import_)

    return replaced(ImportTable, "_free_if_quiet", free_twice)


def indexes_an_import_before_it_is_valid() -> contextlib.AbstractContextManager[Any]:
    reserve = Intake.reserve

    def reserve_and_index(self: Intake, command: decode_pb2.DecodeCommand, owner: object) -> Reservation:
        reservation = reserve(self, command, owner)
        pool = self._host.engine.pool
        hashes = block_hashes(command.token_ids, pool.block_size, command.cache_salt)[len(reservation.prefix) :]
        for block_id, hash in zip(reservation.import_.block_ids, hashes, strict=False):
            pool.acquire([block_id], Holder.SEQUENCE)
            pool.index(block_id, hash)
            pool.release([block_id], Holder.SEQUENCE)
        return reservation

    return replaced(Intake, "reserve", reserve_and_index)


def keeps_a_mapping_over_a_restart() -> contextlib.AbstractContextManager[Any]:
    get = MappingCache.get

    async def get_by_address(self: MappingCache, source: types_pb2.KVSource) -> Mapping:
        kept: dict[str, Mapping] = self.__dict__.setdefault("kept", {})
        if source.address not in kept:
            kept[source.address] = await get(self, source)
        return kept[source.address]

    return _both(
        replaced(MappingCache, "get", get_by_address), replaced(MappingCache, "_drop", lambda self, incarnation: None)
    )


def leaks_an_import_that_fails() -> contextlib.AbstractContextManager[Any]:
    return replaced(WorkerHost, "_import_freed", lambda self, import_: None)


# The engine.


def frees_blocks_under_a_step() -> contextlib.AbstractContextManager[Any]:
    abort = Scheduler.abort

    def abort_at_once(self: Scheduler, seq_id: int) -> bool:
        sequence = self.sequences.get(seq_id)
        if sequence is not None and seq_id in self._in_flight:
            batch.release_blocks(self.pool, sequence)
        return abort(self, seq_id)

    return replaced(Scheduler, "abort", abort_at_once)


def indexes_blocks_of_a_failed_step() -> contextlib.AbstractContextManager[Any]:
    fail = Scheduler.fail

    def fail_and_index(self: Scheduler, plan: StepPlan, error: Exception, now: float) -> Any:
        for part in plan.sequences:
            sequence = self.sequences[part.seq_id]
            before, sequence.num_computed = sequence.num_computed, sequence.num_computed + part.num_tokens
            prefix.index_computed(self.pool, sequence, before)
        return fail(self, plan, error, now)

    return replaced(Scheduler, "fail", fail_and_index)


def shares_blocks_between_salts() -> contextlib.AbstractContextManager[Any]:
    root_hash = prefix.root_hash
    return replaced(prefix, "root_hash", lambda cache_salt="": root_hash(""))


def preempts_leased_sequences() -> contextlib.AbstractContextManager[Any]:
    def grow(self: batch.Batch, sequence: EngineSequence) -> list[EngineSequence]:
        num_missing = num_blocks_for(len(sequence.token_ids), self._pool.block_size) - len(sequence.block_ids)
        victims: list[EngineSequence] = []
        while self._pool.num_available < num_missing:
            victim = max(self, key=batch.rank)
            self.leave(victim)
            victim.num_computed, victim.state = 0, batch.State.PREEMPTED
            victims.append(victim)
            if victim is sequence:
                return victims
        sequence.block_ids += self._pool.allocate(num_missing, Holder.SEQUENCE)
        return victims

    return replaced(batch.Batch, "grow", grow)


def does_not_wake_who_waits_for_blocks() -> contextlib.AbstractContextManager[Any]:
    def abort(self: Engine, seq_id: int) -> None:
        with self.lock:
            self.scheduler.abort(seq_id)

    return _both(replaced(Engine, "wake", lambda self: None), replaced(Engine, "abort", abort))


# The worker's legs and sessions.


def keeps_legs_after_the_session() -> contextlib.AbstractContextManager[Any]:
    def end(self: RouterSession) -> None:
        self.ended.set()
        self._wake.set()

    return replaced(RouterSession, "end", end)


def forgets_the_references_of_a_cancelled_prefill() -> contextlib.AbstractContextManager[Any]:
    admitted = PrefillLeg._admitted

    def admitted_or_forgotten(self: PrefillLeg, event: Admitted) -> None:
        if self._given_up:
            self._close()
        else:
            admitted(self, event)

    return replaced(PrefillLeg, "_admitted", admitted_or_forgotten)


def does_not_stop_a_cancelled_decode() -> contextlib.AbstractContextManager[Any]:
    def cancel(self: DecodeLeg) -> None:
        self._over = True
        if self._task is None:
            self._close()

    return replaced(DecodeLeg, "cancel", cancel)


def does_not_repeat_the_first_token() -> contextlib.AbstractContextManager[Any]:
    """The decode session may be quicker than the prefill session, or the only one left."""

    def emit(self: DecodeLeg, event: decode_pb2.DecodeEvent) -> None:
        if not event.HasField("tokens") or event.tokens.HasField("finish"):
            self._session.emit(event)
        self._session.flush()

    return replaced(DecodeLeg, "_emit", emit)


# The router.


def emits_repeated_tokens() -> contextlib.AbstractContextManager[Any]:
    def receive(book: Any, request: Any, event: Any, now: float) -> bool:
        have = len(request.output)
        request.output.extend(event.token_ids)
        book.emit_tokens(request, have, event.token_ids, event.logprobs)
        return True

    return replaced(handoff, "receive", receive)


def asks_a_worker_that_refused_never_again() -> contextlib.AbstractContextManager[Any]:
    """No parking: a refused handoff has nowhere to go."""
    return replaced(dispatch, "_may_ask", lambda request, view, now: view.worker_id not in request.refusals)


def does_not_try_again_on_heartbeats() -> contextlib.AbstractContextManager[Any]:
    def take_load(self: coordinator.Coordinator, worker: Any, load: Any, now: float) -> None:
        if load is not None:
            self._book.workers.set_load(worker, load, now)

    return _both(
        replaced(coordinator.Coordinator, "_take_load", take_load),
        replaced(coordinator.Coordinator, "tick", lambda self, now: None),
    )


def keeps_legs_on_a_lost_worker() -> contextlib.AbstractContextManager[Any]:
    return replaced(failures, "worker_gone", lambda *_, **__: None)


def does_not_cancel_at_the_worker() -> contextlib.AbstractContextManager[Any]:
    return replaced(Conductor, "_send_cancel", lambda self, action: None)


def replays_without_the_received_tokens() -> contextlib.AbstractContextManager[Any]:
    return replaced(Request, "leg_tokens", lambda self: self.spec.token_ids)


@contextlib.contextmanager
def _both(*managers: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


MUTANTS: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        uses_blocks_without_a_valid_release,
        frees_a_lease_twice,
        forgets_expiry_when_idle,
        hands_a_lease_to_an_old_leg,
        announces_blocks_before_they_are_computed,
        announces_a_partial_block,
        frees_blocks_under_a_copy,
        frees_an_import_twice,
        indexes_an_import_before_it_is_valid,
        keeps_a_mapping_over_a_restart,
        leaks_an_import_that_fails,
        frees_blocks_under_a_step,
        indexes_blocks_of_a_failed_step,
        shares_blocks_between_salts,
        preempts_leased_sequences,
        does_not_wake_who_waits_for_blocks,
        keeps_legs_after_the_session,
        forgets_the_references_of_a_cancelled_prefill,
        does_not_stop_a_cancelled_decode,
        does_not_repeat_the_first_token,
        emits_repeated_tokens,
        asks_a_worker_that_refused_never_again,
        does_not_try_again_on_heartbeats,
        keeps_legs_on_a_lost_worker,
        does_not_cancel_at_the_worker,
        replays_without_the_received_tokens,
    )
}
