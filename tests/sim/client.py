"""Keeps a client's request: what is asked, what must come, and the check of every token that does.

Stands for the router's `Answer`, with the real search for stop strings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from baton.v1 import inference_pb2
from services.core.errors import BatonError
from services.core.hashing import block_hashes, short_hashes
from services.router.coordinator.actions import EmitFinished, EmitStarted
from services.router.coordinator.events import FinishReason, RequestSpec
from services.router.text.streaming import TextStream
from tests.sim.model import Expected, Tokens
from tests.sim.world import World


class SimRequest:
    def __init__(
        self,
        world: World,
        message: inference_pb2.GenerateRequest,
        answers: dict[str, Expected],
        *,
        arrival_s: float,
        router: str,
        deadline_s: float | None = None,
        cancel_after_s: float | None = None,
        cancel_at_token: int | None = None,
    ) -> None:
        """`answers`: what each of the weights that are there answers; one of these must come, the whole of it.
        `cancel_at_token`: the client leaves when it has so many tokens."""
        self.message = message
        self.answers = dict(answers)
        """Those that what was received may be the beginning of."""
        self.arrival_s = arrival_s
        self.router = router
        self.deadline_s = deadline_s
        self.cancel_after_s = cancel_after_s
        self.cancel_at_token = cancel_at_token
        self.received: list[int] = []
        self.outcome: str | None = None
        """How it ended: "stop", "length", an error's reason, or "router lost"."""
        self.ended_s: float | None = None
        self.cancelled = False
        self.queue_was_full = False
        """When it was refused or crowded out, or at any other time that it lived."""
        self.stop_string: str | None = None
        tokenizer: Any = Tokens()
        self._text = TextStream(tokenizer, stops=message.stopping.stop)
        self.on_tokens: Any = lambda request: None
        self._world = world

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def num_tokens_at_most(self) -> int:
        return len(self.message.token_ids.ids) + self.message.stopping.max_tokens

    @property
    def over(self) -> bool:
        return self.outcome is not None

    @property
    def num_output_tokens(self) -> int:
        return len(self.received)

    def spec(self, now: float, block_sizes: Collection[int] = ()) -> RequestSpec:
        """Returns the request as `Intake` submits it, with the hashes of its blocks of these sizes."""
        message = self.message
        ids, salt = message.token_ids.ids, message.cache_salt
        return RequestSpec(
            request_id=message.request_id,
            token_ids=tuple(message.token_ids.ids),
            max_tokens=message.stopping.max_tokens,
            priority=message.priority,
            deadline_s=None if self.deadline_s is None else now + self.deadline_s,
            cache_salt=message.cache_salt,
            conversation=message.session,
            block_hashes={size: short_hashes(block_hashes(ids, size, salt)) for size in block_sizes},
            model="sim",
            payload=message,
        )

    # What the conductor tells.

    def started(self, action: EmitStarted) -> None:
        self._require(not self.received, "was announced after its first token")

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[Any]) -> bool:
        self._require(not self.over, "gets tokens after its end")
        if self.stop_string is not None:
            return False
        piece = self._text.push(token_ids)
        own, at = tuple(token_ids[: piece.num_tokens]), len(self.received)
        wanted = {name: answer.token_ids[at : at + len(own)] for name, answer in self.answers.items()}
        self.answers = {name: answer for name, answer in self.answers.items() if wanted[name] == own}
        self._require(self.answers, f"got {list(own)} at {at} instead of {wanted}")
        self.received += own
        self.stop_string = piece.stop
        self.on_tokens(self)
        return piece.stop is not None

    def finished(self, action: EmitFinished) -> None:
        self._require(not self.over, "ends twice")
        whole = [answer for answer in self.answers.values() if answer.token_ids == tuple(self.received)]
        self._require(whole, f"ends early: {len(self.received)} tokens")
        expected = whole[0]
        self._require(self.stop_string == expected.stop_string, f"ends with {self.stop_string!r}")
        if self.stop_string is not None:
            self._end("stop")
            return
        stops = expected.stop_token_id is not None
        self._require(action.reason is (FinishReason.STOP if stops else FinishReason.LENGTH), f"ends: {action.reason}")
        self._require(action.stop_token_id == expected.stop_token_id, "ends with another stop token")
        self._end(action.reason.value)

    def failed(self, error: BatonError) -> None:
        self._require(not self.over, "ends twice")
        self._end(error.reason)

    def router_lost(self) -> None:
        if not self.over:
            self._end("router lost")

    def refused(self, error: BatonError) -> None:
        self._end(error.reason)

    def _end(self, outcome: str) -> None:
        self.outcome, self.ended_s = outcome, self._world.now_s
        self._world.note("request ended", self.request_id, outcome, len(self.received))

    def _require(self, condition: object, what: str) -> None:
        self._world.require(condition, f"request {self.request_id} {what}")
