"""Plants deliberate bugs in what several answers to one prompt share, and in what becomes of them after a fault."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.decode import leg
from services.engine.schedule.scheduler import Scheduler
from services.engine.schedule.sequence import BlockCopy, Sequence
from services.kv.pool import Holder
from services.router.coordinator.book import Book
from services.router.coordinator.request import Request
from services.router.workers import wire
from services.worker import commands
from tests.sim.mutation import Bug, Mutant, replaced


def shares_the_partial_block() -> Bug:
    fork = Scheduler._fork

    def share(self: Scheduler, source: Sequence, further: Iterable[Sequence], now: float) -> None:
        fork(self, source, further, now)
        for seq_id, copy in list(self._copies.items()):
            self.pool.release([copy.target], Holder.SEQUENCE)
            self.sequences[seq_id].block_ids[-1] = copy.source  # with the reference that was the copy's
            del self._copies[seq_id]

    return replaced(Scheduler, "_fork", share)


def copies_the_partial_block_too_late() -> Bug:
    """The step computes first, and with it the source's next token."""
    schedule = Scheduler.schedule

    def late(self: Scheduler, now: float, most_prompt_tokens: int | None) -> Any:
        kept: dict[int, BlockCopy] = {} if self._step_number % 2 else dict(self._copies)
        for seq_id in kept:
            del self._copies[seq_id]
        plan = schedule(self, now, most_prompt_tokens)
        self._copies |= {seq_id: copy for seq_id, copy in kept.items() if seq_id in self.sequences}
        return plan

    return replaced(Scheduler, "schedule", late)


def computes_an_answer_again_that_was_complete() -> Bug:
    come_apart = Book._come_apart

    def all_of_it(self: Book, request: Request, now: float) -> None:
        for answer in request.answers:
            answer.over = False
        come_apart(self, request, now)

    return replaced(Book, "_come_apart", all_of_it)


def computes_an_answer_again_with_the_noise_of_the_first() -> Bug:
    return replaced(wire, "answer_seed", lambda seed, index: seed)


def gives_all_answers_the_same_noise() -> Bug:
    return replaced(commands, "answer_seed", lambda seed, index: seed)


def says_tokens_without_their_index() -> Bug:
    tokens_of = leg.tokens_of
    return replaced(leg, "tokens_of", lambda number, event, index=0: tokens_of(number, event))


def counts_a_shared_block_for_each_answer() -> Bug:
    """This has nobody hold a shared block, so whoever leaves frees what the others still read."""

    def fork(self: Scheduler, source: Sequence, further: Iterable[Sequence], now: float) -> None:
        for sequence in further:
            self._register(sequence)
            sequence.block_ids = list(source.block_ids)
            sequence.num_computed, sequence.decoding = source.num_computed, True
            self._admission.adopted.append(sequence)

    return replaced(Scheduler, "_fork", fork)


MUTANTS: list[Mutant] = [
    shares_the_partial_block,
    copies_the_partial_block_too_late,
    computes_an_answer_again_that_was_complete,
    computes_an_answer_again_with_the_noise_of_the_first,
    gives_all_answers_the_same_noise,
    says_tokens_without_their_index,
    counts_a_shared_block_for_each_answer,
]
