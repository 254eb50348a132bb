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
from services.engine.schedule.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Masks:
    """Keeps which tokens the rows of a step may have."""

    rows: tuple[int, ...] = ()
    """Places of the rows that are masked, among all the rows of the step."""
    bits: Bits | None = None
    """The tokens that each of these rows may have, none of them empty; None if no row is masked."""
    failed: Mapping[int, BatonError] = field(default_factory=dict)
    """Why nothing can be sampled for other constrained parts, by seq_id."""


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
    num_masked = sum(len(part.rows) for part in parts if part.constraint is not None)
    bits = np.zeros((num_masked, num_words(vocab_size)), np.int32)
    rows: list[int] = []
    failed: dict[int, BatonError] = {}
    first = 0
    for part in parts:
        if part.constraint is not None:
            at = len(rows)
            try:
                _fill(part, bits[at])
            except Exception as error:  # whatever went wrong, no other sequence of the step is affected
                failed[part.seq_id] = error if isinstance(error, BatonError) else unforeseen(error)
                bits[at] = 0  # the next part's
            else:
                rows += range(first, first + len(part.rows))
                bits[at + 1 : len(rows)] = bits[at]  # the other answers begin where the first does
        first += len(part.rows)
    return Masks(tuple(rows), bits[: len(rows)], failed)


def _fill(part: ScheduledSequence, bits: Bits) -> None:
    """Writes the tokens that the part's rows may have, one row. Raises ConstraintUnsatisfied if there are none."""
    assert part.constraint is not None
    row = part.rows[0]
    part.constraint.take(part.untold_token_ids)
    may_end = part.constraint.fill(bits)
    # A stop token is no part of the output, also where it looks like one that could follow.
    forbid(bits, part.stop_token_ids)
    if may_end and not row.masked_token_ids:
        allow(bits, part.stop_token_ids)
    forbid(bits, row.barred_token_ids)
    if row.sampling.allowed_token_ids:
        keep_only(bits, row.sampling.allowed_token_ids)
    if not bits.any():
        raise ConstraintUnsatisfied(_why(part, may_end))


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
