"""Provides a coordinator on a bench, with or without canaries: tests say what workers report, and look at what it wants
done.

It is the pure one of the three rigs: whatever a router decides is tested here. `cluster.py` has routers and workers in
this process, over gRPC, and with the clock that a test gives; `real_cluster.py` has them as processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeGuard, TypeVar

from services.core.clock import ManualClock
from services.core.errors import BatonError, TransferFailed
from services.router.coordinator import Coordinator
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import (
    Action,
    CancelLeg,
    DecodeAdmitted,
    Defect,
    EmitFailed,
    EmitFinished,
    EmitStarted,
    EmitTokens,
    ExpectedRequest,
    FinishReason,
    ImportFailed,
    ImportReady,
    LegEvent,
    LoadingWorker,
    Parked,
    PrefillStarted,
    RequestSpec,
    SendLeg,
    SequenceEnd,
    Tokens,
    WorkerInfo,
)
from services.router.coordinator.request import Phase
from services.router.policy import Fingerprint, Load, PlacedPhase, Role, Share
from services.router.policy.health import Health, HealthConfig

A = TypeVar("A")
AT_REST = {"num_running": 0, "blocks_active": 0, "blocks_leased": 0, "num_waiting": 1}
BUSY = {"num_running": 1, "blocks_active": 64, "num_waiting": 1, "blocks_free": 0}
"""What a worker reports that works on nothing, and one that has no room; in both somebody waits."""


class Bench:
    def __init__(self, **config: Any) -> None:
        self.clock = ManualClock()
        self.num_waits = 0
        self.coordinator = Coordinator(CoordinatorConfig(**{"model_context_tokens": 1024, **config}))
        self.infos: dict[str, WorkerInfo] = {}
        self.loads: dict[str, Load] = {}
        self.actions: list[Action] = []
        """Since the last `take`."""
        self.output: dict[str, list[int]] = {}
        """What was received of the first answer."""
        self.further: dict[tuple[str, int], list[int]] = {}
        """What was received of the others, by index."""
        self.ended: dict[tuple[str, int], EmitFinished] = {}
        """The end of each answer."""
        self.finished: dict[str, EmitFinished] = {}
        self.failed: dict[str, BatonError] = {}
        self._names = (f"earlier-{number}" for number in itertools.count())

    # Inputs

    def join(self, worker_id: str, role: Role, *, incarnation: int = 1, **facts: Any) -> None:
        """Registers a worker and opens its session."""
        defaults: dict[str, Any] = {
            "fingerprint": Fingerprint("L"),
            "block_size": 16,
            "num_blocks": 64,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "host_id": "h",
        }
        info = WorkerInfo(worker_id, role, incarnation, **{**defaults, **facts})
        self.infos[worker_id] = info
        self.loads[worker_id] = Load(sequence_number=1, blocks_free=info.num_blocks)
        if self.coordinator.worker_joined(info, self.now):
            self.coordinator.session_opened(worker_id, incarnation, self.now)
        self._absorb()

    def loading(self, worker_id: str, role: Role, ready_within_s: float) -> None:
        """Announces a worker that loads."""
        self.coordinator.worker_loading(LoadingWorker(worker_id, role, ready_within_s), self.now)
        self._absorb()

    def submit(self, request_id: str = "r", num_tokens: int = 20, max_tokens: int | None = 8, **spec: Any) -> None:
        self.coordinator.submit(RequestSpec(request_id, tuple(range(num_tokens)), max_tokens, **spec), self.now)
        self._absorb()

    def say(self, worker_id: str, *events: LegEvent) -> None:
        self.coordinator.worker_events(worker_id, self.infos[worker_id].incarnation, events, None, self.now)
        self._absorb()

    def load(self, worker_id: str, **changes: Any) -> None:
        """Reports a newer snapshot."""
        number = self.loads[worker_id].sequence_number + 1
        load = self.loads[worker_id] = replace(self.loads[worker_id], sequence_number=number, **changes)
        incarnation = self.infos[worker_id].incarnation
        self.coordinator.worker_events(worker_id, incarnation, (), load, self.now)
        self._absorb()

    def beat(self, worker_id: str, seconds: float, **load: int) -> None:
        """Heartbeats for so long."""
        for _ in range(round(seconds / 0.5)):
            self.wait(0.5)
            self.load(worker_id, **load)

    def lose(self, worker_id: str, *, crashed: bool = True) -> None:
        self.coordinator.worker_lost(worker_id, self.infos[worker_id].incarnation, self.now, crashed=crashed)
        self._absorb()

    def cancel(self, request_id: str = "r") -> None:
        self.coordinator.cancel(request_id, self.now)
        self._absorb()

    def stop_string(self, request_id: str = "r", index: int = 0) -> None:
        self.coordinator.finish_stopped(request_id, self.now, index)
        self._absorb()

    def migrate(self, worker_id: str) -> int:
        self.coordinator.drain(worker_id, self.now)
        num_moved = self.coordinator.migrate(worker_id, self.now)
        self._absorb()
        return num_moved

    def wait(self, seconds: float) -> None:
        """The router runs meanwhile, but its next tick is at the end."""
        self.num_waits += 1
        assert self.num_waits < 100_000, "a test that waits for something waits for ever"
        for slice_number in range(1 + int(seconds / 0.4)):
            self.coordinator.awake.at(self.now + 0.4 * slice_number)
        self.clock.advance(seconds)
        self.coordinator.tick(self.now)
        self._absorb()

    def stop(self, seconds: float) -> None:
        """The router's process is stopped for so long, and goes on."""
        self.clock.advance(seconds)
        self.coordinator.tick(self.now)
        self._absorb()

    def output_of(self, request_id: str, index: int) -> list[int]:
        return self.further.setdefault((request_id, index), []) if index else self.output[request_id]

    # Scripts

    def come_and_go(self, *lengths: int, **spec: Any) -> None:
        """Has requests come, with prompts of these lengths, and be cancelled before any is placed."""
        for name, num_tokens in zip(self._names, lengths, strict=False):
            self.coordinator.submit(RequestSpec(name, tuple(range(num_tokens)), 8, **spec), self.now)
            self.coordinator.cancel(name, self.now)
            self.coordinator.take_actions()
        self._absorb()

    def serve(self, num_tokens: int, num_output: int) -> None:
        """Has a request come and be answered whole."""
        self.submit(name := next(self._names), num_tokens, num_output)
        for prefill in self.take_legs(Role.PREFILL):
            self.say(prefill.worker_id, started(prefill), tokens(prefill, 0))
        decode = self.take_leg(Role.DECODE)
        done = [ImportReady(decode.leg)] if decode.handoff is not None else []
        end = tokens(decode, *range(num_output), finish=FinishReason.LENGTH)
        self.say(decode.worker_id, DecodeAdmitted(decode.leg), *done, end)
        assert self.finished[name].summary.num_output_tokens == num_output

    def handed_over(self, request_id: str = "r", **spec: Any) -> tuple[SendLeg, SendLeg]:
        """Returns the legs of a request whose prefill runs on "p" and whose handoff was sent to a decode worker."""
        self.submit(request_id, **spec)
        prefill = self.take_leg(Role.PREFILL)
        self.say(prefill.worker_id, started(prefill))
        return prefill, self.take_leg(Role.DECODE)

    def decoding(self, request_id: str = "r", **spec: Any) -> tuple[SendLeg, SendLeg]:
        """Returns the legs of a request that has received token 0, and whose decode worker has the blocks."""
        prefill, decode = self.handed_over(request_id, **spec)
        self.say(decode.worker_id, DecodeAdmitted(decode.leg))
        self.say(prefill.worker_id, tokens(prefill, 100))
        self.say(decode.worker_id, ImportReady(decode.leg), tokens(decode, 100))
        return prefill, decode

    # What it wants done

    def finish(self, prefill: SendLeg, expected: list[int], request_id: str = "r") -> None:
        """Carries a prefill leg through to the end with one token from each role."""
        self.say(prefill.worker_id, started(prefill), tokens(prefill, 201))
        decode = self.take_leg(Role.DECODE)
        base = decode.output_base
        self.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg), tokens(decode, 201))
        self.say(decode.worker_id, tokens(decode, 202, at=base + 1, finish=FinishReason.STOP))
        assert self.output[request_id] == expected
        assert request_id in self.finished
        self.assert_idle()

    @property
    def now(self) -> float:
        return self.clock.now()

    def take(self, kind: type[A]) -> A:
        """Returns the only action of its kind since the last look."""
        found = self.take_all(kind)
        assert len(found) == 1, f"{len(found)} {kind.__name__}: {self.actions}"
        return found[0]

    def take_leg(self, phase: Role) -> SendLeg:
        """Returns the only leg of that phase that was sent since the last look."""
        found = self.take_legs(phase)
        assert len(found) == 1, f"{len(found)} legs: {self.actions}"
        return found[0]

    def take_legs(self, phase: Role) -> list[SendLeg]:
        found = [action for action in self.actions if is_leg(action, phase)]
        self.actions = [action for action in self.actions if not is_leg(action, phase)]
        return found

    def take_all(self, kind: type[A]) -> list[A]:
        found = [action for action in self.actions if isinstance(action, kind)]
        self.actions = [action for action in self.actions if not isinstance(action, kind)]
        return found

    def share(self, tenant: str = "") -> Share:
        """Returns what the tenant was served and holds, as whoever expects a request of it is told."""
        share = self.coordinator.expect(ExpectedRequest(1, 0.0, max_tokens=1, tenant=tenant), self.now)
        self.coordinator.arrived(share)
        return share

    def phase(self) -> Phase | None:
        """Returns the phase of the only live request; None without one."""
        phases = [phase for phase, count in self.coordinator.phases().items() for _ in range(count)]
        assert len(phases) <= 1
        return phases[0] if phases else None

    def assert_idle(self) -> None:
        self.coordinator.check_idle()
        for worker in self.coordinator.workers.all():
            assert not worker.legs
            assert not worker.predictions

    def _absorb(self) -> None:
        """Ends a turn of the event loop that had one input, and the turns that follow from it."""
        self.coordinator.check()
        while self.coordinator.placement_is_due:
            self.coordinator.place(self.now)
            self.coordinator.check()
        actions = self.coordinator.take_actions()
        self.place()
        assert not self.coordinator.take_actions(), "something could be placed, and placement was not due"
        self.actions += actions
        self._client(actions)

    def place(self) -> None:
        """Looks at everything that waits, as after news of any worker."""
        self.coordinator.workers.has_news = True
        self.coordinator.place(self.now)

    def _client(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Defect():
                    raise action.error
                case SendLeg():
                    check_choice(action, self.coordinator)
                case EmitStarted():
                    assert action.request_id not in self.output
                    self.output[action.request_id] = []
                case EmitTokens():
                    output = self.output_of(action.request_id, action.index)
                    assert action.position == len(output), "a gap or a repeat"
                    assert (action.request_id, action.index) not in self.ended, "nothing comes after the end"
                    output += action.token_ids
                case EmitFinished():
                    self._ended(action.request_id)
                    assert (action.request_id, action.index) not in self.ended, "an answer ends once"
                    self.ended[action.request_id, action.index] = action
                    if action.is_last:
                        self.finished[action.request_id] = action
                case EmitFailed():
                    self._ended(action.request_id)
                    self.failed[action.request_id] = action.error
                case _:
                    pass

    def _ended(self, request_id: str) -> None:
        assert request_id not in self.finished
        assert request_id not in self.failed


def check_choice(command: SendLeg, coordinator: Coordinator) -> None:
    """Asserts that a command says why it goes where it goes, and what of the others, unless it is a canary's.

    To be called in the turn of the command.
    """
    choice, phase = command.choice, command.phase
    if choice is None:
        assert command.spec.request_id.startswith("canary"), "why this worker?"
        return
    assert choice.winner.worker_id == command.worker_id
    unsplit = phase is Role.DECODE and command.handoff is None
    named = PlacedPhase.PARK if phase is Role.STORE else PlacedPhase(phase.label)
    assert choice.phase is (PlacedPhase.UNSPLIT if unsplit else named)
    assert len({each.worker_id for each in choice.scored}) == len(choice.scored)
    scored, left_out = {each.worker_id for each in choice.scored}, {each.worker_id for each in choice.left_out.named}
    assert not scored & left_out
    views = coordinator.workers.cluster.everyone.views()
    with_role = {view.worker_id for view in views if phase in view.roles}
    assert scored | left_out <= with_role
    assert max(1, choice.num_candidates) + choice.left_out.number == len(with_role)


def two_of_each() -> Bench:
    """Returns a bench with two prefill and two decode workers; "p1" and "d1" are chosen first."""
    bench = Bench()
    for worker_id, role in (("p1", Role.PREFILL), ("p2", Role.PREFILL), ("d1", Role.DECODE), ("d2", Role.DECODE)):
        bench.join(worker_id, role)
    return bench


def is_leg(action: object, phase: Role) -> TypeGuard[SendLeg]:
    return isinstance(action, SendLeg) and action.phase is phase


def started(command: SendLeg, *, cached_tokens: int = 0) -> PrefillStarted:
    return PrefillStarted(
        command.leg, command.leg.to_bytes(16, "big"), source=command.worker_id, cached_tokens=cached_tokens
    )


def parked(command: SendLeg) -> Parked:
    """Returns what a store says when it has the handoff."""
    return Parked(command.leg, command.leg.to_bytes(16, "big"), source=command.worker_id)


def tokens(
    command: SendLeg, *token_ids: int, at: int | None = None, finish: FinishReason | None = None, index: int = 0
) -> Tokens:
    """Returns tokens of a leg, by default of its first answer and at its first position."""
    position = command.output_base if at is None else at
    return Tokens(command.leg, position, token_ids, finish=SequenceEnd(finish) if finish else None, index=index)


WITH_CANARIES = HealthConfig(canaries=True)
BROKEN = TransferFailed("nothing is offered")


def is_canary(command: SendLeg) -> bool:
    return command.spec.payload is None and command.spec.request_id.startswith("canary-")


class Deep(Bench):
    """Is a bench with canaries; a test says how each of them ends."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**{"health": WITH_CANARIES, **config})

    def canary(self, phase: Role) -> SendLeg:
        command = self.take_leg(phase)
        assert is_canary(command)
        return command

    def pass_generation(self) -> None:
        """Answers the canary generation that is under way."""
        for command in self.take_legs(Role.PREFILL):
            self.say(command.worker_id, started(command), tokens(command, 7, finish=FinishReason.LENGTH))
        for command in self.take_legs(Role.DECODE):
            self.say(command.worker_id, DecodeAdmitted(command.leg))
            self.say(command.worker_id, tokens(command, 7, 8, finish=FinishReason.LENGTH))

    def begin_transfer(self) -> tuple[SendLeg, SendLeg]:
        """Returns the two legs of the next canary transfer, which it takes up to the handoff."""
        prefill = self.canary(Role.PREFILL)
        self.say(prefill.worker_id, started(prefill), tokens(prefill, 7))
        return prefill, self.canary(Role.DECODE)

    def pass_transfer(self) -> SendLeg:
        _, decode = self.begin_transfer()
        self.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg))
        self.say(decode.worker_id, tokens(decode, 7, 8, finish=FinishReason.LENGTH))
        return decode

    def fail_transfer(self, error: BatonError = BROKEN) -> None:
        _, decode = self.begin_transfer()
        self.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportFailed(decode.leg, True, error))

    def add(self, worker_id: str, role: Role, **facts: Any) -> None:
        """Joins, and passes its own check."""
        self.join(worker_id, role, **facts)
        self.pass_generation()

    def health(self, worker_id: str) -> Health:
        return self.coordinator.workers.get(worker_id).health.state

    def pair(self, source_id: str = "p", target_id: str = "d") -> Health:
        source = self.coordinator.workers.get(source_id).info
        pair = self.coordinator.workers.get(target_id).sources.get(source)
        assert pair is not None
        return pair.health.state


def proven_pair() -> Deep:
    """Returns a prefill and a decode worker that have passed everything."""
    bench = Deep()
    bench.add("p", Role.PREFILL)
    bench.add("d", Role.DECODE)
    bench.pass_transfer()
    bench.take_all(CancelLeg)
    return bench
