"""Provides a tiny cluster under a real coordinator: workers with pools, leases and legs, and a network that delivers
when told.

Messages of one session keep their order; those of different workers overtake each other freely. Tokens are a
function of all before them, so a request's whole output has one right value whatever happens to its legs.
"""

from __future__ import annotations

import enum
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.core.errors import BatonError, LeaseInvalid
from services.core.hashing import num_blocks_for
from services.router.coordinator.actions import Action, CancelLeg, SendLeg
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    FinishReason,
    ImportFailed,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegEvent,
    LegFailed,
    PrefillStarted,
    SequenceEnd,
    Tokens,
    WorkerInfo,
)
from services.router.policy import Load, Role

BLOCK_SIZE = 4


def next_token(token_ids: tuple[int, ...]) -> int:
    return zlib.crc32(repr(token_ids).encode()) % 50


def finish_of(token: int, position: int, max_tokens: int) -> SequenceEnd | None:
    if token % 11 == 0:
        return SequenceEnd(FinishReason.STOP, stop_token_id=token)
    return SequenceEnd(FinishReason.LENGTH) if position + 1 >= max_tokens else None


def reference(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    output: list[int] = []
    while True:
        output.append(next_token(prompt + tuple(output)))
        if finish_of(output[-1], len(output) - 1, max_tokens):
            return output


class LeaseState(enum.Enum):
    OPEN = "open"
    SEALED = "sealed"
    CLOSED = "closed"
    """Token 0 ended the sequence."""
    OVER = "over"


@dataclass
class FakeLease:
    lease_id: bytes
    command: SendLeg
    state: LeaseState = LeaseState.OPEN
    token: int = -1
    highest_leg: int = 0


@dataclass
class Generation:
    command: SendLeg
    token_ids: tuple[int, ...]
    importing: bool


@dataclass(frozen=True)
class Listing:
    """Carries what a heartbeat says of the legs, after all that was said before it."""

    newest_leg: int
    legs: frozenset[int]


@dataclass
class FakeWorker:
    info: WorkerInfo
    connected: bool = False
    inbox: deque[Action] = field(default_factory=deque)
    outbox: deque[LegEvent | Listing] = field(default_factory=deque)
    waiting: dict[int, SendLeg] = field(default_factory=dict)
    leases: dict[int, FakeLease] = field(default_factory=dict)
    generations: dict[int, Generation] = field(default_factory=dict)
    num_snapshots: int = 0
    newest_leg: int = 0
    """The highest received in the session."""
    stuck: set[int] = field(default_factory=set)
    """Legs it has accepted and never begins."""

    # What it holds

    def used_blocks(self) -> int:
        tokens = [len(lease.command.token_ids) for lease in self._held_leases()]
        tokens += [len(generation.token_ids) + 1 for generation in self.generations.values()]
        return sum(num_blocks_for(num_tokens, BLOCK_SIZE) for num_tokens in tokens)

    def load(self) -> Load:
        self.num_snapshots += 1
        used = min(self.used_blocks(), self.info.num_blocks)
        return Load(
            sequence_number=self.num_snapshots,
            blocks_active=used,
            blocks_free=self.info.num_blocks - used,
            num_running=len(self.generations),
            num_waiting=len(self.waiting),
        )

    def _held_leases(self) -> list[FakeLease]:
        return [lease for lease in self.leases.values() if lease.state in (LeaseState.OPEN, LeaseState.SEALED)]

    def _has_room(self, num_tokens: int) -> bool:
        return self.used_blocks() + num_blocks_for(num_tokens, BLOCK_SIZE) <= self.info.num_blocks

    def list_legs(self) -> None:
        """Sends a heartbeat."""
        prefills = frozenset(self.waiting) | {lease.command.leg for lease in self._held_leases()}
        self.outbox.append(Listing(self.newest_leg, prefills | frozenset(self.generations)))

    # What the router says

    def receive(self) -> None:
        command = self.inbox.popleft()
        match command:
            case SendLeg(phase=Role.PREFILL):
                self.newest_leg = command.leg
                self.waiting[command.leg] = command
            case SendLeg():
                self.newest_leg = command.leg
                self._admit(command)
            case CancelLeg():
                self.lose_leg(command.leg)
            case _:
                raise AssertionError(command)

    def _admit(self, command: SendLeg) -> None:
        in_place = command.handoff is not None and command.handoff.source == self.info.worker_id
        if in_place or self._has_room(len(command.token_ids) + 1):
            self.generations[command.leg] = Generation(command, command.token_ids, command.handoff is not None)
            self.outbox.append(DecodeAdmitted(command.leg))
        else:
            self.outbox.append(DecodeRefused(command.leg))

    # What its engine does

    def prefill(self) -> None:
        """Starts all prompts that fit, and finishes those that run."""
        for lease in [lease for lease in self.leases.values() if lease.state is LeaseState.OPEN]:
            self._seal(lease)
        for leg, command in list(self.waiting.items()):
            if leg not in self.stuck and self._has_room(len(command.token_ids)):
                del self.waiting[leg]
                self.leases[leg] = FakeLease(leg.to_bytes(16, "big"), command)
                self.outbox.append(PrefillStarted(leg, self.leases[leg].lease_id, source=self.info.worker_id))

    def _seal(self, lease: FakeLease) -> None:
        command = lease.command
        lease.token = next_token(command.token_ids)
        finish = finish_of(lease.token, command.output_base, command.max_tokens)
        lease.state = LeaseState.CLOSED if finish else LeaseState.SEALED
        self.outbox.append(Tokens(command.leg, command.output_base, (lease.token,), finish=finish))

    def end_lease(self, leg: int, reason: LeaseEnd | None) -> None:
        lease = self.leases.get(leg)
        if lease is not None and lease.state in (LeaseState.OPEN, LeaseState.SEALED):
            lease.state = LeaseState.OVER
            if reason is not None:
                self.outbox.append(LeaseEnded(leg, lease.lease_id, reason))

    def decode(self, source_of: Callable[[SendLeg], FakeWorker | None]) -> None:
        """Advances every import and every sequence by one step."""
        for leg, generation in list(self.generations.items()):
            if generation.importing:
                self._import(leg, generation, source_of(generation.command))
            else:
                self._emit(leg, generation, next_token(generation.token_ids))

    def _import(self, leg: int, generation: Generation, source: FakeWorker | None) -> None:
        handoff = generation.command.handoff
        assert handoff is not None
        lease = source.leases.get(int.from_bytes(handoff.lease_id, "big")) if source else None
        if source is None or lease is None or lease.state is LeaseState.OVER or lease.highest_leg > leg:
            del self.generations[leg]
            self.outbox.append(ImportFailed(leg, lease_alive=source is None, error=LeaseInvalid("gone")))
            return
        lease.highest_leg = leg
        if lease.state is LeaseState.OPEN:
            return
        if lease.state is LeaseState.SEALED:
            source.end_lease(lease.command.leg, LeaseEnd.RELEASED)
            self.outbox.append(ImportReady(leg))
        generation.importing = False
        self._emit(leg, generation, lease.token)

    def _emit(self, leg: int, generation: Generation, token: int) -> None:
        command = generation.command
        position = command.output_base + len(generation.token_ids) - len(command.token_ids)
        generation.token_ids += (token,)
        finish = finish_of(token, position, command.max_tokens)
        if finish:
            del self.generations[leg]
        self.outbox.append(Tokens(leg, position, (token,), finish=finish))

    # What goes wrong

    def fail_leg(self, leg: int, error: BatonError) -> None:
        if leg in self.generations:
            generation = self.generations.pop(leg)
            failed = ImportFailed(leg, True, error) if generation.importing else LegFailed(leg, error)
            self.outbox.append(failed)
        elif leg in self.leases and self.leases[leg].state is LeaseState.OPEN:
            self.end_lease(leg, None)
            self.outbox.append(LegFailed(leg, error))

    def lose_leg(self, leg: int) -> None:
        """Drops a leg without a word to anybody."""
        self.waiting.pop(leg, None)
        self.generations.pop(leg, None)
        self.end_lease(leg, None)

    def end_session(self) -> None:
        """Ends everything that the session started."""
        self.connected = False
        self.newest_leg = 0
        self.stuck.clear()
        self.inbox.clear()
        self.outbox.clear()
        self.waiting.clear()
        self.generations.clear()
        for leg in list(self.leases):
            self.end_lease(leg, None)
        self.outbox.clear()
