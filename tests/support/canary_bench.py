"""Provides a coordinator with canaries switched on, and workers that answer its canaries."""

from __future__ import annotations

from typing import Any

from services.core.errors import BatonError, TransferFailed
from services.router.coordinator.actions import CancelLeg, SendLeg
from services.router.coordinator.events import (
    DecodeAdmitted,
    FinishReason,
    ImportFailed,
    ImportReady,
)
from services.router.policy import Role
from services.router.policy.health import Health, HealthConfig
from tests.support.router_bench import Bench, started, tokens

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
        return self.coordinator.worker(worker_id).health.state

    def pair(self, source_id: str = "p", target_id: str = "d") -> Health:
        source = self.coordinator.worker(source_id).info
        pair = self.coordinator.worker(target_id).sources.get(source)
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
