"""A canary: a small request of the router's own, on the ordinary way, that shows what a heartbeat cannot. Pure.

A *generation* is pinned to one worker: a prompt on a prefill worker, a whole tiny sequence on the others. A *transfer*
is pinned to a pair: a prompt of a block and a token on the one, its handoff to the other, and a token decoded from it
there. Its cache salt is its own, so that it finds nothing cached and all its blocks are moved. What it asks is always
the same, so that answers can be compared.

Owns: what a canary asks for and how far it has come. Never: when one is sent, or what its end means (`canaries.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.coordinator.actions import HandoffRef, SendDecode, SendPrefill
from services.router.coordinator.events import Tokens, WorkerInfo
from services.router.coordinator.known_answers import Said, said
from services.router.coordinator.requests import RequestSpec

_PRIORITY = 100
"""Before all others: it is over in a step or two, and its time to answer is not spent in a queue."""
_NUM_TOKENS = 2
_NUM_TOKEN_IDS = 8
"""Any model has at least so many tokens."""


@dataclass(slots=True)
class Canary:
    spec: RequestSpec
    source: WorkerInfo | None
    """Runs the prompt; with a target, that one takes its lease over."""
    target: WorkerInfo | None
    """Decodes; without a source, it runs the prompt too."""
    started_s: float
    asked_s: float
    """`started_s` in awake time: how long it has waited for what could be heard."""
    prefill_leg: int = 0
    decode_leg: int = 0
    begun: bool = False
    """The worker that is at work has admitted it: the source, later the target."""
    sealed: bool = False
    imported: bool = False
    answer: list[Said] = field(default_factory=list)
    """From the first position on."""

    def hear(self, tokens: Tokens) -> None:
        """The first token of a handoff is said twice."""
        if tokens.position <= len(self.answer):
            self.answer += said(tokens)[len(self.answer) - tokens.position :]

    @property
    def num_asked(self) -> int:
        """Tokens of its answer: it is never over before its length. A prompt alone ends with its first."""
        return 1 if self.target is None else _NUM_TOKENS

    def involves(self, worker_id: str) -> bool:
        return any(worker is not None and worker.worker_id == worker_id for worker in (self.source, self.target))


def new_canary(
    name: str, source: WorkerInfo | None, target: WorkerInfo | None, now: float, awake_s: float = 0.0
) -> Canary:
    """`name`: of its own, also its salt. `awake_s`: `now` in awake time."""
    workers = [worker for worker in (source, target) if worker is not None]
    room = min(worker.max_model_len for worker in workers) - _NUM_TOKENS
    num_tokens = max(1, min(workers[0].block_size + 1, room))
    token_ids = tuple(1 + index % (_NUM_TOKEN_IDS - 1) for index in range(num_tokens))
    return Canary(RequestSpec(name, token_ids, _NUM_TOKENS, _PRIORITY, cache_salt=name), source, target, now, awake_s)


def prefill_command(canary: Canary, timeout_s: float) -> SendPrefill:
    """For its source. Alone, its first token is its last."""
    assert canary.source is not None
    return SendPrefill(
        canary.source.worker_id,
        canary.source.incarnation,
        canary.prefill_leg,
        canary.spec,
        canary.num_asked,
        canary.spec.token_ids,
        output_base=0,
        remaining_s=timeout_s,
        attempt=1,
    )


def decode_command(canary: Canary, handoff: HandoffRef | None, timeout_s: float) -> SendDecode:
    """For its target."""
    assert canary.target is not None
    return SendDecode(
        canary.target.worker_id,
        canary.target.incarnation,
        canary.decode_leg,
        canary.spec,
        _NUM_TOKENS,
        canary.spec.token_ids,
        output_base=0,
        remaining_s=timeout_s,
        attempt=1,
        handoff=handoff,
        age_s=0.0,
    )
