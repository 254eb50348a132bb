"""Computes the masks of a step's constrained sequences on a thread of their own, beside the forward pass.

Owns: that thread, and which tokens a row may have: those of its constraint, with the stop tokens where the output may
end. Never: what a constraint allows, or the logits (`penalties` sets the others to -inf).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from services.core.errors import BatonError, ConstraintUnsatisfied, unforeseen
from services.engine.schedule.constraint import Bits, allow, forbid, keep_only, num_words
from services.engine.schedule.sequence import SampledToken, ScheduledSequence


@dataclass(frozen=True, slots=True)
class Masks:
    """Keeps which tokens the rows of a step may have."""

    rows: tuple[int, ...] = ()
    """The rows that are masked, of all the rows of the step."""
    bits: Bits | None = None
    """The tokens that each of these rows may have, none of them empty; None if no row is masked."""
    num_rows: Mapping[int, int] = field(default_factory=dict)
    """How many rows of a constrained part have a token, by seq_id, where nothing is left after one of its drafts; those
    of other parts all have."""
    failed: Mapping[int, BatonError] = field(default_factory=dict)
    """Why nothing can be sampled for the others, by seq_id."""

    def keep(self, sampled: Mapping[int, tuple[SampledToken, ...]]) -> Mapping[int, tuple[SampledToken, ...]]:
        """Returns the tokens without those of rows that have none. `sampled` has one for each row of each part."""
        if not self.num_rows and not self.failed:
            return sampled
        kept = ((seq_id, tokens) for seq_id, tokens in sampled.items() if seq_id not in self.failed)
        return {seq_id: tokens[: self.num_rows.get(seq_id)] for seq_id, tokens in kept}


NO_MASKS = Masks()


class MaskMaker:
    """Computes masks, one step at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        """Made when it is first needed; it ends with this object."""

    def begin(self, parts: Sequence[ScheduledSequence], vocab_size: int) -> Future[Masks]:
        """Begins to compute the masks of a step, some part of which has a constraint."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-masks")
        return self._thread.submit(masks_of, tuple(parts), vocab_size)


def masks_of(parts: Sequence[ScheduledSequence], vocab_size: int) -> Masks:
    """Returns the masks of a step's parts, whose rows follow each other."""
    num_masked = sum(part.num_sampled for part in parts if part.constraint is not None)
    bits = np.zeros((num_masked, num_words(vocab_size)), np.int32)
    rows: list[int] = []
    counts: dict[int, int] = {}
    failed: dict[int, BatonError] = {}
    first = 0
    for part in parts:
        if part.constraint is not None:
            at = len(rows)
            try:
                num_allowed = _fill(part, bits[at : at + len(part.rows)])
                rows += range(first, first + num_allowed)
                if num_allowed < len(part.rows):
                    counts[part.seq_id] = num_allowed
                else:  # the other answers begin where the first does
                    rows += range(first + num_allowed, first + part.num_sampled)
                    bits[at + num_allowed : len(rows)] = bits[at + num_allowed - 1]
            except Exception as error:  # whatever went wrong, no other sequence of the step is affected
                failed[part.seq_id] = error if isinstance(error, BatonError) else unforeseen(error)
            bits[len(rows) : at + len(part.rows)] = 0  # the next part's
        first += part.num_sampled
    return Masks(tuple(rows), bits[: len(rows)], counts, failed)


def _fill(part: ScheduledSequence, bits: Bits) -> int:
    """Writes the tokens that the part's rows may have; returns the number of rows before the first that has none, or
    that is of no interest since the draft before it is wrong. Raises ConstraintUnsatisfied if the first has none."""
    assert part.constraint is not None
    part.constraint.take(part.untold_token_ids)
    may_end = part.constraint.fill(part.draft_token_ids, bits)
    for at, ends_here in enumerate(may_end):
        # A stop token is no part of the output, also where it looks like one that could follow.
        forbid(bits[at], part.stop_token_ids)
        if ends_here and not part.rows[at].masked_token_ids:
            allow(bits[at], part.stop_token_ids)
        forbid(bits[at], part.rows[at].barred_token_ids)
        if allowed := part.rows[at].sampling.allowed_token_ids:
            keep_only(bits[at], allowed)
        if not bits[at].any():
            if at:
                return at
            raise ConstraintUnsatisfied(_why(part, ends_here))
    return len(may_end)


def _why(part: ScheduledSequence, may_end: bool) -> str:
    row = part.rows[0]
    where = f"after {row.position} tokens the constraint leaves no token"
    if row.barred_token_ids or row.sampling.allowed_token_ids:
        return f"{where} that allowed_token_ids and bad words leave too"
    if not may_end:
        return f"{where}; the request's stop tokens may be what it needs"
    if row.masked_token_ids:
        return f"{where} but one that ends the output, and min_tokens forbids that"
    return f"{where} but one that ends the output, and none does: the output is complete, and ignore_eos is set"
