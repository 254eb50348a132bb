"""Tests random lives of a cluster: whatever happens, and whoever wakes up late, every request ends, its output is
right, and nothing is left anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.core.clock import ManualClock
from services.core.errors import (
    BatonError,
    Cancelled,
    InvalidRequest,
    Overloaded,
    StepFailed,
    UnsupportedModel,
    WorkerFailed,
    WorkerIdInUse,
)
from services.router.coordinator import Coordinator
from services.router.coordinator.actions import (
    CancelLeg,
    Defect,
    EmitFailed,
    EmitFinished,
    EmitStarted,
    EmitTokens,
    SendLeg,
    StageEnded,
)
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import LeaseEnd, RequestSpec, WorkerInfo
from services.router.coordinator.placement import can_be_served
from services.router.policy import Fingerprint, Role
from tests.support.examples import num_examples
from tests.support.fake_cluster import (
    BLOCK_SIZE,
    FakeWorker,
    LeaseState,
    Listing,
    finish_of,
    reference,
)
from tests.support.router_bench import check_choice

ROLES = {
    "split": {"p1": Role.PREFILL, "p2": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE},
    "one of each": {"p": Role.PREFILL, "d": Role.DECODE},
    "mixed": {"m1": Role.MIXED, "m2": Role.MIXED},
    "all roles": {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED},
    "two engines": {"p": Role.PREFILL, "d": Role.DECODE, "vllm p": Role.PREFILL, "vllm d": Role.DECODE},
    "two engines, mixed": {"m": Role.MIXED, "vllm m": Role.MIXED},
    "uneven": {"p": Role.PREFILL, "small": Role.DECODE, "d": Role.DECODE},
    "uneven all over": {"p": Role.PREFILL, "small p": Role.PREFILL, "small": Role.DECODE, "m": Role.MIXED},
}
SMALL_BLOCKS = 6
"""Of workers so named: less than the longest request needs."""


class ClusterLife(RuleBasedStateMachine):
    @initialize(
        cluster=st.sampled_from(sorted(ROLES)),
        prefill_blocks=st.integers(10, 20),
        decode_blocks=st.integers(10, 30),
        across=st.booleans(),
    )
    def start(self, cluster: str, prefill_blocks: int, decode_blocks: int, across: bool) -> None:
        self.clock, self.across = ManualClock(), across
        config = CoordinatorConfig(model_context_tokens=10 * BLOCK_SIZE, replay_across_engines=across)
        self.coordinator = Coordinator(config)
        self.engines: dict[str, str] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.expected: dict[str, tuple[list[int], int]] = {}
        self.output: dict[str, list[int]] = {}
        self.finished: dict[str, EmitFinished] = {}
        self.failed: dict[str, BatonError] = {}
        for worker_id, role in ROLES[cluster].items():
            num_blocks = prefill_blocks if role is Role.PREFILL else decode_blocks
            if worker_id.startswith("small"):
                num_blocks = SMALL_BLOCKS
            kind = Fingerprint("V", engine="vllm") if worker_id.startswith("vllm") else Fingerprint("L")
            info = WorkerInfo(worker_id, role, 1, kind, BLOCK_SIZE, num_blocks, 10 * BLOCK_SIZE, max_num_seqs=4)
            self.workers[worker_id] = FakeWorker(info)
            self.connect(worker_id)

    # Clients

    @rule(
        prompt=st.lists(st.integers(0, 99), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
    )
    def submit(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        request_id = f"r{len(self.expected)}"
        self.expected[request_id] = (reference(tuple(prompt), max_tokens), max_tokens)
        self.output[request_id] = []
        try:
            self.coordinator.submit(RequestSpec(request_id, tuple(prompt), max_tokens, priority), self.now)
        except (InvalidRequest, Overloaded) as error:
            self.failed[request_id] = error
        self.absorb()

    @precondition(lambda self: self.live())
    @rule(data=st.data(), stopped=st.booleans())
    def end_by_client(self, data: st.DataObject, stopped: bool) -> None:
        request_id = data.draw(st.sampled_from(self.live()))
        if stopped:
            self.coordinator.finish_stopped(request_id, self.now)
        else:
            self.coordinator.cancel(request_id, self.now)
        self.absorb()

    # The ordinary course of things

    @rule(data=st.data(), num_messages=st.integers(1, 4))
    def deliver_to_worker(self, data: st.DataObject, num_messages: int) -> None:
        worker = self.pick(data)
        for _ in range(min(num_messages, len(worker.inbox))):
            worker.receive()

    @rule(data=st.data(), num_messages=st.integers(1, 4), snapshot=st.booleans())
    def deliver_to_router(self, data: st.DataObject, num_messages: int, snapshot: bool) -> None:
        self.deliver(self.pick(data), num_messages, snapshot)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        worker = self.pick(data)
        worker.prefill()
        worker.decode(self.source_of)

    @rule(rounds=st.integers(1, 3))
    def run_smoothly(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round()

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.3, 1.1, 2.5]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.coordinator.tick(self.now)
        self.absorb()

    # Faults

    @rule(data=st.data(), notices=st.booleans())
    def crash(self, data: st.DataObject, notices: bool) -> None:
        """Crashes a worker. If the router `notices`, it sees the break before the restarted process registers; else it
        refuses it first."""
        worker = self.pick(data)
        if notices:
            self.lose(worker, crashed=True)
        before = worker.info
        self.restart(worker)
        if not notices:
            if self.coordinator.worker(before.worker_id).has_session:
                with pytest.raises(WorkerIdInUse):
                    self.coordinator.worker_joined(worker.info, self.now)
                self.coordinator.worker_lost(before.worker_id, before.incarnation, self.now, crashed=True)
                self.absorb()
            self.connect(worker.info.worker_id)

    @rule(data=st.data(), orderly=st.booleans())
    def lose_session(self, data: st.DataObject, orderly: bool) -> None:
        self.lose(self.pick(data), crashed=not orderly)

    @precondition(lambda self: "small" in self.workers)
    @rule(seconds=st.sampled_from([0.0, 1.1]))
    def a_long_request_waits_for_a_big_worker(self, seconds: float) -> None:
        """Lets the big worker restart while the small ones are there."""
        for worker in self.workers.values():
            if worker.info.roles.can_decode and worker.info.num_blocks > SMALL_BLOCKS:
                self.lose(worker, crashed=False)
        self.submit(list(range(20)), 12, 0)
        self.time_passes(seconds)

    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        self.connect(self.pick(data).info.worker_id)

    @rule(data=st.data(), error=st.sampled_from([StepFailed("injected"), UnsupportedModel("injected")]))
    def fail_a_leg(self, data: st.DataObject, error: BatonError) -> None:
        worker = self.pick(data)
        legs = [*worker.generations, *worker.leases]
        if legs:
            worker.fail_leg(data.draw(st.sampled_from(legs)), error)

    @rule(data=st.data())
    def lose_a_leg(self, data: st.DataObject) -> None:
        """Lets the worker forget a leg: nothing but its next heartbeat can tell."""
        worker = self.pick(data)
        legs = [*worker.waiting, *worker.generations, *worker.leases]
        if legs:
            worker.lose_leg(data.draw(st.sampled_from(legs)))

    @rule(data=st.data())
    def sit_on_a_prompt(self, data: st.DataObject) -> None:
        """Lets the worker begin nothing of all that has been sent to it; its heartbeats list it."""
        worker = self.pick(data)
        while worker.inbox:
            worker.receive()
        worker.stuck |= set(worker.waiting)

    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        self.pick(data).list_legs()

    @rule(data=st.data())
    def expire_a_lease(self, data: st.DataObject) -> None:
        worker = self.pick(data)
        sealed = [leg for leg, lease in worker.leases.items() if lease.state is LeaseState.SEALED]
        if sealed:
            worker.end_lease(data.draw(st.sampled_from(sealed)), LeaseEnd.EXPIRED)

    @rule(data=st.data())
    def migrate(self, data: st.DataObject) -> None:
        worker = self.pick(data)
        if worker.connected:
            self.coordinator.drain(worker.info.worker_id, self.now)
            self.coordinator.migrate(worker.info.worker_id, self.now)
            self.absorb()

    # What must hold

    @invariant()
    def the_book_is_consistent(self) -> None:
        if hasattr(self, "coordinator"):
            self.coordinator.check()

    @invariant()
    def nobody_waits_for_idle_workers(self) -> None:
        """Asserts that what a worker could serve waits only for room, or for the older ones that claim it: if all are
        idle, nobody is queued but those that none of them can hold."""
        if not hasattr(self, "coordinator"):
            return
        book = self.coordinator._book
        views = book.workers.views()
        if not all(view.idle for view in views if view.ready) or any(
            request.prefill for request in book.requests.values()
        ):
            return
        for request in book.queue:
            waits_its_pause = self.now < request.setbacks.not_before_s or request.setbacks.refusals
            assert waits_its_pause or not can_be_served(book, request), f"{request.request_id} waits for nobody"

    def teardown(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        for worker in self.workers.values():
            if self.coordinator.worker(worker.info.worker_id).draining:  # comes back as a new process
                self.lose(worker, crashed=False)
                self.restart(worker)
            self.connect(worker.info.worker_id)
        for _ in range(400):
            if not self.live():
                break
            self.round()
        assert not self.live(), "every request ends in bounded time once faults stop"
        self.round()
        self.coordinator.check_idle()
        for worker in self.workers.values():
            assert worker.used_blocks() == 0, f"{worker.info.worker_id} still holds blocks"
            assert not worker.waiting
        for error in self.failed.values():
            assert isinstance(error, Cancelled | WorkerFailed | InvalidRequest | UnsupportedModel), error

    def check_engine(self, leg: SendLeg) -> None:
        """Asserts that KV stays within an engine, and what has been streamed too, unless that is allowed."""
        request_id, engine = leg.spec.request_id, leg.worker.fingerprint.engine
        if leg.handoff is None and (self.across or not self.output.get(request_id)):
            self.engines[request_id] = engine
        assert self.engines[request_id] == engine

    # The network

    def connect(self, worker_id: str) -> None:
        worker = self.workers[worker_id]
        if not worker.connected and self.coordinator.worker_joined(worker.info, self.now):
            worker.end_session()  # a newer session first ends the older
            worker.connected = True
            self.coordinator.session_opened(worker_id, worker.info.incarnation, self.now)
        self.absorb()

    def lose(self, worker: FakeWorker, *, crashed: bool) -> None:
        worker.end_session()
        self.coordinator.worker_lost(worker.info.worker_id, worker.info.incarnation, self.now, crashed=crashed)
        self.absorb()

    def restart(self, worker: FakeWorker) -> None:
        worker.end_session()
        worker.leases.clear()
        worker.num_snapshots = 0
        worker.info = replace(worker.info, incarnation=worker.info.incarnation + 1)

    def deliver(self, worker: FakeWorker, num_messages: int, snapshot: bool) -> None:
        info = worker.info
        if not worker.connected:
            return
        for _ in range(min(num_messages, len(worker.outbox))):
            event: Any = worker.outbox.popleft()
            if isinstance(event, Listing):
                self.coordinator.live_legs(info.worker_id, info.incarnation, event.newest_leg, event.legs, self.now)
            else:
                self.coordinator.worker_events(info.worker_id, info.incarnation, [event], None, self.now)
            self.absorb()
        if snapshot:
            self.coordinator.worker_events(info.worker_id, info.incarnation, (), worker.load(), self.now)
            self.absorb()

    def round(self) -> None:
        """Moves everything once."""
        for worker in self.workers.values():
            while worker.inbox:
                worker.receive()
            worker.prefill()
            worker.decode(self.source_of)
            worker.list_legs()
        for worker in self.workers.values():
            self.deliver(worker, len(worker.outbox), snapshot=True)
        self.clock.advance(0.1)
        self.coordinator.tick(self.now)
        self.absorb()

    def absorb(self) -> None:
        """Ends a turn of the event loop with one input."""
        while self.coordinator.placement_is_due:
            self.coordinator.place(self.now)
        for action in self.coordinator.take_actions():
            match action:
                case SendLeg() | CancelLeg():
                    if isinstance(action, SendLeg):
                        check_choice(action, self.coordinator)
                        self.check_engine(action)
                    worker = self.workers[action.worker.worker_id]
                    if worker.connected and worker.info.incarnation == action.worker.incarnation:
                        worker.inbox.append(action)
                case EmitTokens():
                    output = self.output[action.request_id]
                    assert action.position == len(output), "lost or repeated tokens"
                    output += action.token_ids
                    assert output == self.expected[action.request_id][0][: len(output)], "wrong tokens"
                    assert self.is_live(action.request_id)
                case EmitFinished():
                    assert self.is_live(action.request_id)
                    self.finished[action.request_id] = action
                    self.check_finish(action)
                case EmitFailed():
                    assert self.is_live(action.request_id)
                    self.failed[action.request_id] = action.error
                case Defect():
                    raise action.error
                case EmitStarted() | StageEnded():
                    pass

    def check_finish(self, action: EmitFinished) -> None:
        expected, max_tokens = self.expected[action.request_id]
        output = self.output[action.request_id]
        if action.stop_token_id is None and action.reason.value == "stop":
            return  # the client's stop string
        assert output == expected
        finish = finish_of(output[-1], len(output) - 1, max_tokens)
        assert finish is not None
        assert (finish.reason, finish.stop_token_id) == (action.reason, action.stop_token_id)

    def source_of(self, command: SendLeg) -> FakeWorker | None:
        """Returns the lease's owner, if it can be reached."""
        assert command.handoff is not None
        return self.workers[str(command.handoff.source)]

    def pick(self, data: st.DataObject) -> FakeWorker:
        return self.workers[data.draw(st.sampled_from(sorted(self.workers)))]

    def is_live(self, request_id: str) -> bool:
        return request_id not in self.finished and request_id not in self.failed

    def live(self) -> list[str]:
        return [request_id for request_id in getattr(self, "expected", {}) if self.is_live(request_id)]

    @property
    def now(self) -> float:
        return self.clock.now()


ClusterLife.TestCase.settings = settings(
    max_examples=num_examples(150), stateful_step_count=50, suppress_health_check=list(HealthCheck)
)
TestClusterLife = ClusterLife.TestCase
