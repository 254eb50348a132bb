"""Decides by vote among workers of one fingerprint which answer to a canary is right. Pure.

All canaries have the same prompt, so workers that compute the same give the same answer, except for rounding: the rest
of the batch decides in which order sums are taken. So two answers agree if each is as good as tied with the other, by
the log-probabilities that come with both. Positions are judged one by one, each with the tokens before it as its
context: after two workers have chosen differently in a tie, they continue different prompts.

A process has one vote, its first answer. The answer with the most votes is right; of answers with equally many, the one
that was given first. So a new worker that disagrees with one other is right only if a third agrees with it, a process
whose answer changes is wrong, and one vote does not outweigh two.

A process on which there is a verdict, from before this router started or from another one, cannot give the first
answer: it is right only if it says what another has said. Nor does its vote come back if it had one.

Votes are counted when one is given, and only those of processes that are there. So the answer of a worker that is gone
is not held against one that comes later; yet an answer that was found wrong does not become right only because a worker
has gone. If the worker comes back with its answer, that one is still the earlier of the two.

Owns: votes, and which answers agree. Never: what follows for a worker (`canaries.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.router.coordinator.events import Tokens, WorkerInfo
from services.router.policy import Fingerprint

if TYPE_CHECKING:
    from baton.v1 import types_pb2

NUM_LIKELIEST = 20
"""How many of the likeliest tokens at each position are asked for, with their log-probabilities."""
_MARGINS = (("bfloat16", 1.0), ("float16", 0.5), ("rounded to 8 bits", 0.5))
_LEAST_MARGIN = 0.1
"""How far behind the likeliest token another may be and still tie with it, in nats.

The margin is several times what was measured for the type that `numerics` names. Without one of these names the type is
float32, which rounds less.
"""


@dataclass(frozen=True, slots=True)
class Said:
    """Keeps what a worker answered at one position."""

    token_id: int
    likeliest: dict[int, float] = field(default_factory=dict)
    """Log-probabilities in nats, by token id; empty if the worker gave none."""


def said(tokens: Tokens) -> list[Said]:
    """Returns the positions of an answer that one event brings."""
    logprobs = [*tokens.logprobs, *[None] * (len(tokens.token_ids) - len(tokens.logprobs))]
    return [Said(token_id, _likeliest(each)) for token_id, each in zip(tokens.token_ids, logprobs, strict=True)]


def _likeliest(logprobs: types_pb2.TokenLogprobs | None) -> dict[int, float]:
    return {each.token_id: each.logprob for each in logprobs.top} if logprobs is not None else {}


def agree(one: Said, other: Said, margin: float) -> bool:
    """Returns whether each worker could as well have chosen the other's token. `margin` is in nats.

    Both are asked, since a worker with damaged weights may find any token as likely as any other, and a healthy one
    does not. Without log-probabilities only equal tokens agree; NaN agrees with nothing.

    The log-probabilities themselves are not compared: in bfloat16 the batch alone moved one of the 20 likeliest by
    1.8 nats, while no token that was chosen instead was more than 0.25 behind.
    """
    if any(math.isnan(each) for each in (*one.likeliest.values(), *other.likeliest.values())):
        return False
    if not one.likeliest or not other.likeliest:
        return one.token_id == other.token_id
    return max(_behind(one, other.token_id), _behind(other, one.token_id)) <= margin


def _behind(said: Said, token_id: int) -> float:
    """Returns how far the token is behind the likeliest, in nats; for one not listed, the least that it can be."""
    least, best = min(said.likeliest.values()), max(said.likeliest.values())
    return best - said.likeliest.get(token_id, least)


def margin_of(fingerprint: Fingerprint) -> float:
    return next((margin for name, margin in _MARGINS if name in fingerprint.numerics), _LEAST_MARGIN)


@dataclass(eq=False, slots=True)
class _Answer:
    said: Said
    number: int
    """The answer's place in the order in which answers were first given, from 1."""


@dataclass(slots=True)
class _Vote:
    incarnation: int
    answer: _Answer
    gone: bool = False
    """Whether its process has ended or has no session; one that answers again has its vote again."""


class _Tally:
    """Counts the votes of one fingerprint's workers for the token that follows one context."""

    def __init__(self, margin: float) -> None:
        self.votes: dict[str, _Vote] = {}
        self._margin = margin
        self._num_answers = 0
        self._right: _Answer | None = None

    def hear(self, worker: WorkerInfo, answer: Said, *, may_vote: bool) -> str | None:
        mine = next((known for known in self._answers() if agree(known.said, answer, self._margin)), None)
        voted = self.votes.get(worker.worker_id)
        if voted is None or voted.incarnation != worker.incarnation:
            if not may_vote and (mine is None or mine is not self._right):
                return f"token {answer.token_id}, from a worker that was found wrong, and no other says so"
            if mine is None:
                self._num_answers += 1
                mine = _Answer(answer, self._num_answers)
            self.votes[worker.worker_id] = _Vote(worker.incarnation, mine)
            self._right = self._count()
        elif voted.gone and may_vote:
            voted.gone = False
            self._right = self._count()
        right = self._right
        assert right is not None, "there is a vote"
        if mine is right:
            return None
        num_agreed = sum(vote.answer is right for vote in self.votes.values())
        return f"token {answer.token_id} instead of {right.said.token_id}, as {num_agreed} would say"

    def forget(self, is_known: Callable[[str], bool]) -> None:
        self.votes = {worker_id: vote for worker_id, vote in self.votes.items() if is_known(worker_id)}
        if self.votes and not any(vote.answer is self._right for vote in self.votes.values()):
            self._right = self._count()

    def outvoted(self) -> list[str]:
        """Returns the workers whose vote is not for the answer that is right now."""
        return [worker_id for worker_id, vote in self.votes.items() if vote.answer is not self._right]

    def _answers(self) -> list[_Answer]:
        return sorted({vote.answer for vote in self.votes.values()}, key=lambda answer: answer.number)

    def _count(self) -> _Answer:
        return max(self._answers(), key=lambda answer: (self._num_votes(answer), -answer.number))

    def _num_votes(self, answer: _Answer) -> int:
        return sum(vote.answer is answer and not vote.gone for vote in self.votes.values())


class KnownAnswers:
    def __init__(self, distrusted: Container[int] = frozenset()) -> None:
        """`distrusted` has the incarnations on which there are verdicts: without a vote from before, each needs another
        worker that says what it says."""
        self._distrusted = distrusted
        self._tallies: dict[tuple[Fingerprint, tuple[int, ...]], _Tally] = {}

    def wrong(self, worker: WorkerInfo, context: tuple[int, ...], answer: Sequence[Said]) -> str | None:
        """Returns how the answer is wrong, or None if it is right or has no other to compare it with.

        `context` holds the prompt's token ids and those of the answer's positions before `answer`.
        """
        for each in answer:
            key = (worker.fingerprint, context)
            tally = self._tallies.setdefault(key, _Tally(margin_of(worker.fingerprint)))
            may_vote = worker.incarnation not in self._distrusted
            if (reason := tally.hear(worker, each, may_vote=may_vote)) is not None:
                return f"wrong answer: {reason}"
            context = (*context, each.token_id)
        return None

    def outvoted(self, fingerprint: Fingerprint) -> set[str]:
        """Returns the workers whose answers are wrong by the votes as they now are; they are to be checked again."""
        tallies = [tally for (kind, _), tally in self._tallies.items() if kind == fingerprint]
        return {worker_id for tally in tallies for worker_id in tally.outvoted()}

    def gone(self, worker_id: str) -> None:
        """Suspends a worker's votes: its process has ended, or has no session for now."""
        for tally in self._tallies.values():
            if (vote := tally.votes.get(worker_id)) is not None:
                vote.gone = True

    def forget(self, is_known: Callable[[str], bool]) -> None:
        """Drops the votes of workers that are no longer known."""
        for key, tally in list(self._tallies.items()):
            tally.forget(is_known)
            if not tally.votes:
                del self._tallies[key]
