"""Keeps a client's request: what is asked, what must come, and the check of every token that does.

Stands for the router's `Answer`, with the real search for stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.v1 import inference_pb2
from services.core.errors import BatonError, ConstraintUnsatisfied
from services.core.hashing import block_hashes, salt_in, short_hashes
from services.router.coordinator.events import EmitFinished, EmitPromptTokens, EmitStarted, FinishReason, RequestSpec
from services.router.tenants.tenant import TokenUsage
from services.router.text.streaming import TextStream
from tests.sim.model import Expected, Tokens
from tests.sim.world import World


@dataclass
class SimAnswer:
    """Keeps what was received of one of the answers."""

    expected: dict[str, Expected]
    """What it may be the beginning of, by weights."""
    text: TextStream
    received: list[int] = field(default_factory=list)
    stop_string: str | None = None
    over: bool = False

    @property
    def whole(self) -> list[Expected]:
        """Returns the answers that were received whole."""
        return [answer for answer in self.expected.values() if answer.token_ids == tuple(self.received)]


class SimRequest:
    def __init__(
        self,
        world: World,
        message: inference_pb2.GenerateRequest,
        answers: Sequence[dict[str, Expected]],
        *,
        arrival_s: float,
        router: str,
        deadline_s: float | None = None,
        cancel_after_s: float | None = None,
        cancel_at_token: int | None = None,
    ) -> None:
        """`answers`: for each answer that is asked for, what each of the weights that are there answers; all of one of
        them must come, the whole of it. `cancel_at_token`: the client leaves when it has so many tokens."""
        self.message = message
        tokenizer: Any = Tokens()
        self.parts = [
            SimAnswer(dict(expected), TextStream(tokenizer, stops=message.stopping.stop)) for expected in answers
        ]
        self.arrival_s = arrival_s
        self.router = router
        self.deadline_s = deadline_s
        self.cancel_after_s = cancel_after_s
        self.cancel_at_token = cancel_at_token
        self.scores: list[float] = []
        self.outcome: str | None = None
        """How it ended: "stop", "length", an error's reason, or "router lost"."""
        self.ended_s: float | None = None
        self.cancelled = False
        self.queue_was_full = False
        """When it was refused or crowded out, or at any other time that it lived."""
        self.reason = FinishReason.STOP
        self.on_tokens: Any = lambda request: None
        self.may_be_wrong: Callable[[], bool] = lambda: False
        """Returns whether what comes now may come from a worker that computes wrong and was not found yet."""
        self.is_wrong = False
        """Something has come that is not what must come."""
        self._world = world

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def answers(self) -> dict[str, Expected]:
        """Returns those of the first answer, by weights, of which all that was received may be the beginning."""
        names = set[str].intersection(*(set(part.expected) for part in self.parts))
        return {name: answer for name, answer in self.parts[0].expected.items() if name in names}

    @property
    def received(self) -> list[int]:
        """Returns the tokens of all answers, one answer after the other."""
        return [token_id for part in self.parts for token_id in part.received]

    @property
    def num_tokens_at_most(self) -> int:
        return len(self.message.token_ids.ids) + self.message.stopping.max_tokens

    @property
    def is_scored(self) -> bool:
        """Returns whether the prompt's log-probabilities are asked for."""
        return self.message.response.HasField("prompt_logprobs")

    @property
    def has_begun(self) -> bool:
        return bool(self.received or self.scores)

    @property
    def over(self) -> bool:
        return self.outcome is not None

    @property
    def kept_text(self) -> str:
        return ""

    @property
    def num_output_tokens(self) -> int:
        return len(self.received)

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(len(self.message.token_ids.ids), 0, len(self.received)) if self.has_begun else TokenUsage()

    def spec(self, now: float, block_sizes: Collection[int] = (), epoch: str = "") -> RequestSpec:
        """Returns the request as `Intake` submits it, with the hashes of its blocks of these sizes."""
        message = self.message
        ids, salt = message.token_ids.ids, salt_in(epoch, message.cache_salt)
        if self.is_scored:
            block_sizes = ()  # no cache is of use
        return RequestSpec(
            request_id=message.request_id,
            label=message.request_id,
            token_ids=tuple(message.token_ids.ids),
            max_tokens=message.stopping.max_tokens,
            priority=message.priority,
            deadline_s=None if self.deadline_s is None else now + self.deadline_s,
            cache_salt=message.cache_salt,
            epoch=epoch,
            conversation=message.session,
            block_hashes={size: short_hashes(block_hashes(ids, size, salt)) for size in block_sizes},
            model="sim",
            scores_prompt=self.is_scored,
            num_answers=len(self.parts),
            payload=message,
        )

    # What the conductor tells.

    def started(self, action: EmitStarted) -> None:
        self._require(not self.received, "was announced after its first token")

    def prompt_scored(self, action: EmitPromptTokens) -> None:
        self._require(self.is_scored, "gets log-probabilities that it did not ask for")
        self._require(not self.over and not self.received, "gets its prompt's log-probabilities late")
        self._require(action.position == 1 + len(self.scores), f"is scored at {action.position}")
        own, at = tuple(entry.logprob for entry in action.logprobs), len(self.scores)
        wanted = {name: answer.scores[at : at + len(own)] for name, answer in self.answers.items()}
        first = self.parts[0]
        first.expected = {name: answer for name, answer in self.answers.items() if wanted[name] == own}
        self._require_right(f"got {own} at {at} instead of {wanted}")
        self.scores += own

    def tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[Any], index: int, *, is_stopped: bool = False
    ) -> bool:
        self._require(not self.over, "gets tokens after its end")
        whole = len(self.message.token_ids.ids) - 1 if self.is_scored else 0
        self._require(
            len(self.scores) == whole, f"gets tokens after {len(self.scores)} log-probabilities of its prompt"
        )
        part = self.parts[index]
        self._require(not part.over, f"gets tokens of {index} after its end")
        if part.stop_string is not None:
            return False
        piece = part.text.push(token_ids, is_stopped=is_stopped)
        own, at = tuple(token_ids[: piece.num_tokens]), len(part.received)
        wanted = {name: answer.token_ids[at : at + len(own)] for name, answer in part.expected.items()}
        part.expected = {name: answer for name, answer in part.expected.items() if wanted[name] == own}
        self._require_right(f"got {list(own)} of {index} at {at} instead of {wanted}")
        part.received += own
        part.stop_string = piece.stop
        self.on_tokens(self)
        return piece.stop is not None

    def finished(self, action: EmitFinished) -> None:
        part = self.parts[action.index]
        self._require(not self.over and not part.over, "ends twice")
        part.over = True
        if self.is_wrong:
            self._require_right("ends with what is wrong")
            if action.is_last:
                self._end(action.reason.value)
            return
        whole = [answer for answer in part.whole if not answer.unsatisfied]
        self._require(whole, f"ends early: {len(part.received)} tokens")
        expected = whole[0]
        self._require(part.stop_string == expected.stop_string, f"ends with {part.stop_string!r}")
        if part.stop_string is None:
            stops = expected.stop_token_id is not None
            reason = FinishReason.STOP if stops else FinishReason.LENGTH
            self._require(action.reason is reason, f"ends: {action.reason}")
            self._require(action.stop_token_id == expected.stop_token_id, "ends with another stop token")
        self._require(action.is_last == all(each.over for each in self.parts), f"{action.index} is not the last")
        if action.is_last:
            self.reason = FinishReason.STOP if part.stop_string is not None else action.reason
            self._end(self.reason.value)

    def failed(self, error: BatonError) -> None:
        self._require(not self.over, "ends twice")
        if isinstance(error, ConstraintUnsatisfied) and not self.is_wrong:
            whole = (answer for part in self.parts if not part.over for answer in part.whole)
            nothing_left = any(answer.unsatisfied for answer in whole)
            self._require(nothing_left, f"is not satisfied after {len(self.received)} tokens")
        self._end(error.reason)

    def router_lost(self) -> None:
        if not self.over:
            self._end("router lost")

    def refused(self, error: BatonError) -> None:
        self._end(error.reason)

    def _end(self, outcome: str) -> None:
        self.outcome, self.ended_s = outcome, self._world.now_s
        self._world.note("request ended", self.request_id, outcome, len(self.received))

    def _require_right(self, what: str) -> None:
        """Requires that all that has come so far can be right, or that nobody has found the wrong worker yet."""
        self.is_wrong = self.is_wrong or not self.answers
        self._require(not self.is_wrong or self.may_be_wrong(), what)

    def _require(self, condition: object, what: str) -> None:
        self._world.require(condition, f"request {self.request_id} {what}")
