"""Provides a router's conductor over fakes of all that is outside it; any of them raises for one request when a test
says so.

It is no cluster, and not `router_bench`: that has no conductor, and what is proved here is that the conductor goes on
with the rest of a batch. It speaks the wire's messages, so that one that cannot be read or sent is among what raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from services.core.clock import ManualClock
from services.core.errors import BatonError
from services.router.conductor import Conductor
from services.router.coordinator import Coordinator
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import EmitFinished, FinishReason, RequestSpec, WorkerInfo
from services.router.policy import Fingerprint, Role
from services.router.policy.health import HealthConfig
from services.router.workers.sessions import SessionTimes
from services.rpc import channels

INNOCENT = ("a", "b")
POISONED = "bad"
ALL = (INNOCENT[0], POISONED, INNOCENT[1])
"""The poison is in the middle of every batch."""


class Poison(Exception):
    pass


class Recorder:
    """Stands for an answer, a trace or a record: notes each call, and raises at one."""

    def __init__(self, poison: str = "") -> None:
        self.calls: list[str] = []
        self.poison = poison

    def note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.poison:
            raise Poison(name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self.note(name)


class FakeAnswer(Recorder):
    def __init__(self, poison: str) -> None:
        super().__init__(poison)
        self.token_ids: list[int] = []
        self.num_output_tokens = 0
        self.error: BatonError | None = None
        self.reason: FinishReason | None = None

    @property
    def over(self) -> bool:
        return self.error is not None or self.reason is not None

    def tokens(self, token_ids: tuple[int, ...], logprobs: Any, index: int, *, is_stopped: bool) -> bool:
        assert not self.over, "nothing comes after the end"
        self.note("tokens")
        self.token_ids += token_ids
        self.num_output_tokens = len(self.token_ids)
        return False

    def finished(self, action: EmitFinished) -> None:
        self.note("finished")
        assert not self.over, "ends once"
        self.reason = action.reason

    def failed(self, error: BatonError) -> None:
        assert not self.over, "ends once"
        self.error = error
        self.note("failed")


class FakeTrace(Recorder):
    traceparent = ""
    log_ids = MappingProxyType[str, str]({})

    def leg_sent(self, command: Any, now: float) -> str:
        self.note("leg_sent")
        return ""


class FakeLink:
    """Stands for a worker's session: notes the kinds of what it is sent, and the legs of commands, and raises at what a
    test says."""

    def __init__(self, info: WorkerInfo, commands: dict[str, dict[str, int]]) -> None:
        self.info = info
        self.was_open = True
        self.sent: list[Any] = []
        self.poison: Callable[[Any], bool] = lambda message: False
        self._commands = commands

    def send(self, message: Any) -> None:
        if self.poison(message):
            raise Poison("link")
        kind = message.WhichOneof("message")
        self.sent.append(kind)
        if kind in self._commands:
            command = getattr(message, kind)
            self._commands[kind][command.request_id] = command.leg

    def send_leave(self, within_s: float) -> None:
        pass

    async def close(self) -> None:
        pass


class FakeMetrics:
    def __init__(self) -> None:
        self.internal_errors: Counter[str] = Counter()
        self.requests = Recorder()

    def internal_error(self, where: str) -> None:
        self.internal_errors[where] += 1

    def observe(self, coordinator: Coordinator) -> None:
        pass


class Bench:
    """Is a conductor over a real coordinator: one prefill worker, one decode worker, and whatever is poisoned."""

    def __init__(self, *, canaries: bool = False, dial: channels.Dial = channels.dial) -> None:
        self.clock = ManualClock()
        self.metrics = FakeMetrics()
        self.turns: list[Callable[[], None]] = []
        """What the event loop is to do next."""
        config = CoordinatorConfig(model_context_tokens=1024, health=HealthConfig(canaries=canaries))
        self.coordinator = Coordinator(config)
        self.conductor = Conductor(
            self.coordinator,
            clock=self.clock,
            metrics=as_any(self.metrics),
            times=SessionTimes(0.5, 2.0),
            dial=dial,
            call_soon=self.turns.append,
            incarnation=1,
        )
        self.answers: dict[str, FakeAnswer] = {}
        self.traces: dict[str, FakeTrace] = {}
        self.records: dict[str, Recorder] = {}
        self.commands: dict[str, dict[str, int]] = {"prefill": {}, "decode": {}}
        """The leg of the last command of each kind that reached a worker, by the request's id."""
        self.links = {"p": self.join("p", Role.PREFILL), "d": self.join("d", Role.DECODE)}

    def join(self, name: str, role: Role) -> FakeLink:
        info = WorkerInfo(name, role, 1, Fingerprint("L"), 16, 64, 1024, 8, host_id="h")
        link = FakeLink(info, self.commands)
        self.coordinator.worker_joined(info, self.clock.now())
        self.conductor.links[name] = as_any(link)
        self.conductor.link_opened(as_any(link))
        self.turn()
        return link

    def submit(self, request_id: str, *, answer: str = "", trace: str = "", record: str = "", **spec: Any) -> None:
        self.answers[request_id] = FakeAnswer(answer)
        self.traces[request_id] = FakeTrace(trace)
        self.records[request_id] = Recorder(record)
        payload = inference_pb2.GenerateRequest(request_id=request_id)
        self.conductor.submit(
            RequestSpec(request_id, tuple(range(20)), 3, label=request_id, payload=payload, **spec),
            as_any(self.answers[request_id]),
            as_any(self.traces[request_id]),
            as_any(self.records[request_id]),
        )

    def lose(self, worker_id: str) -> None:
        """The worker's session breaks."""
        self.conductor.link_lost(as_any(self.links[worker_id]), "cut", crashed=True)

    def rejoin(self, worker_id: str, role: Role) -> None:
        """A worker that was lost has another session, and requests that it had may be placed again."""
        self.links[worker_id] = self.join(worker_id, role)
        self.clock.advance(1.5)
        self.conductor.tick()
        self.turn()

    def turn(self) -> None:
        """The event loop goes on, until it has nothing to do."""
        while self.turns:
            self.turns.pop(0)()

    def leg(self, kind: str, request_id: str) -> int | None:
        """Returns the leg of the last command of the kind that was sent for the request."""
        self.turn()
        return self.commands[kind].get(request_id)

    def say(self, worker_id: str, events: Iterable[worker_pb2.LegEvent]) -> None:
        """Sends a worker's events, all in one message."""
        self.hear(worker_id, worker_pb2.SessionResponse(events=events))

    def hear(self, worker_id: str, message: worker_pb2.SessionResponse) -> None:
        self.conductor.worker_message(as_any(self.links[worker_id]), message)
        self.turn()

    def run(self, request_ids: tuple[str, ...] = ALL, stages: Sequence[str] | None = None) -> None:
        """Takes requests through stages of their lives, all by default, in batches that hold them all."""
        for stage in STAGES if stages is None else stages:
            self.say(*self.batch(stage, request_ids))

    def batch(self, stage: str, request_ids: tuple[str, ...]) -> tuple[str, list[worker_pb2.LegEvent]]:
        """Returns the worker that speaks in a stage, and its events: one or more for each request with such a leg."""
        phase, worker_id = ("prefill", "p") if stage in PREFILL_STAGES else ("decode", "d")
        legs = [leg for request_id in request_ids if (leg := self.leg(phase, request_id))]
        return worker_id, [event for leg in legs for event in EVENTS[stage](leg)]

    def assert_only_the_poisoned_suffers(self, *, may_finish: bool = False, end: str = "") -> None:
        """`end`: why the innocent fail, if they do not finish."""
        for request_id in INNOCENT:
            answer = self.answers[request_id]
            if end:
                assert answer.error is not None
                assert answer.error.reason == end
                continue
            assert answer.error is None, answer.error
            assert (answer.reason, answer.token_ids) == (FinishReason.LENGTH, [7, 8, 9])
            assert self.records[request_id].calls.count("finished") == 1
            assert self.traces[request_id].calls.count("finished") == 1
        bad = self.answers[POISONED]
        if not (may_finish and bad.reason is FinishReason.LENGTH):
            assert bad.error is not None
            assert bad.error.reason in ("INTERNAL", "CANCELLED", end)
            assert bad.token_ids == [7, 8, 9][: len(bad.token_ids)], "no gap before the end"
        assert sum(self.metrics.internal_errors.values()) >= 1
        self.assert_idle()

    def assert_idle(self) -> None:
        """Asserts that no request is left anywhere. The workers leave for it."""
        self.coordinator.check_idle()
        assert not any(worker.legs for worker in self.coordinator.workers.all())
        self.leave()
        assert not self.conductor.in_use, "the conductor keeps a request"

    def leave(self) -> None:
        """The workers end their sessions in order, and are forgotten."""
        for worker_id, link in self.links.items():
            self.conductor.link_lost(as_any(link), "", crashed=False)
            self.conductor.withdraw(worker_id)


def started(leg: int) -> worker_pb2.LegEvent:
    lease_id = leg.to_bytes(16, "big")
    return worker_pb2.LegEvent(
        started=worker_pb2.PrefillStarted(leg=leg, lease_id=lease_id, source=types_pb2.KVSource())
    )


def prefill_token(leg: int) -> worker_pb2.LegEvent:
    sequence = types_pb2.SequenceTokens(leg=leg, token_ids=[7], timings=types_pb2.PhaseTimings())
    return worker_pb2.LegEvent(tokens=sequence)


def lease_ended(leg: int, reason: Any = worker_pb2.LEASE_END_REASON_RELEASED) -> worker_pb2.LegEvent:
    return worker_pb2.LegEvent(lease_ended=worker_pb2.LeaseEnded(leg=leg, reason=reason))


def admitted(leg: int) -> worker_pb2.LegEvent:
    return worker_pb2.LegEvent(admitted=worker_pb2.DecodeAdmitted(leg=leg))


def ready(leg: int) -> worker_pb2.LegEvent:
    return worker_pb2.LegEvent(ready=worker_pb2.ImportReady(leg=leg))


def tokens(leg: int, position: int, token_ids: list[int], *, finish: bool = False) -> worker_pb2.LegEvent:
    sequence = types_pb2.SequenceTokens(leg=leg, position=position, token_ids=token_ids)
    if finish:
        sequence.finish.reason = types_pb2.FINISH_REASON_LENGTH
    return worker_pb2.LegEvent(tokens=sequence)


EVENTS: dict[str, Callable[[int], list[worker_pb2.LegEvent]]] = {
    "prefill begins": lambda leg: [started(leg)],
    "prefill ends": lambda leg: [prefill_token(leg)],
    "decode is admitted": lambda leg: [admitted(leg)],
    "import ends": lambda leg: [ready(leg), tokens(leg, 0, [7])],
    "decode goes on": lambda leg: [tokens(leg, 1, [8])],
    "decode ends": lambda leg: [tokens(leg, 2, [9], finish=True)],
    "lease ends": lambda leg: [lease_ended(leg)],
}
"""What a worker says of one leg in each stage of a request's life, by the stage's name."""
STAGES = tuple(EVENTS)
PREFILL_STAGES = ("prefill begins", "prefill ends", "lease ends")


def as_any(value: object) -> Any:
    return value
