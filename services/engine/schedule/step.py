"""Makes one sequence's part of a step, and decides whether the token it sampled ends the sequence. Pure functions, but
that `next_part` notes in the sequence what its constraint is told."""

from __future__ import annotations

from services.core.hashing import num_blocks_for
from services.engine.schedule.sequence import (
    Finish,
    Mode,
    PromptScoring,
    SampleRow,
    ScheduledSequence,
    Sequence,
)


def next_part(sequence: Sequence, num_tokens: int, block_size: int) -> ScheduledSequence:
    """Returns a part with the next `num_tokens` uncomputed tokens. It samples if they reach the end of the sequence."""
    start = sequence.num_computed
    end = start + num_tokens
    samples = end == len(sequence.token_ids)
    constraint = sequence.constraint if samples else None
    return ScheduledSequence(
        seq_id=sequence.seq_id,
        start=start,
        token_ids=tuple(sequence.token_ids[start:end]),
        block_ids=tuple(sequence.block_ids[: num_blocks_for(end, block_size)]),
        rows=tuple(map(_row, (sequence, *sequence.further))) if samples else (),
        is_decode=sequence.decoding,
        scoring=_scoring(sequence, start, end),
        constraint=constraint,
        untold_token_ids=() if constraint is None else _untold(sequence),
        stop_token_ids=() if constraint is None else tuple(sequence.stopping.stop_token_ids),
    )


def ending(sequence: Sequence, token_id: int, max_model_len: int) -> tuple[Finish | None, int | None]:
    """Returns how `token_id`, which is about to be appended, ends the sequence: (finish, stop token id).

    Both are None if it does not. STOP comes before LENGTH. `max_model_len` does not end a PREFILL_ONLY sequence: it
    continues in another pool, which may be larger.
    """
    position = sequence.next_position
    if position >= sequence.stopping.min_tokens and token_id in sequence.stopping.stop_token_ids:
        return Finish.STOP, token_id
    full = sequence.mode is Mode.GENERATE and len(sequence.token_ids) + 1 >= max_model_len
    if full or position + 1 >= sequence.stopping.max_tokens:
        return Finish.LENGTH, None
    return None, None


def _scoring(sequence: Sequence, start: int, end: int) -> PromptScoring | None:
    """Returns what the logits of the tokens from `start` to `end` tell of the prompt and was not reported before."""
    if sequence.is_scored:
        return None
    num_prompt = sequence.num_prompt_tokens - sequence.output_base
    first, last = max(sequence.num_scored, start + 1), min(end, num_prompt - 1)
    if first > last:
        return None
    assert first == sequence.num_scored, "it was computed from there on"
    assert sequence.num_prompt_logprobs is not None, "they are wanted"
    return PromptScoring(first, tuple(sequence.token_ids[first : last + 1]), sequence.num_prompt_logprobs)


def _untold(sequence: Sequence) -> tuple[int, ...]:
    """Returns the output tokens that the sequence's constraint was not told of, and notes that it will be now."""
    first = sequence.num_prompt_tokens + sequence.num_told
    sequence.num_told = sequence.num_new_tokens
    return tuple(sequence.token_ids[first:])


def _row(sequence: Sequence) -> SampleRow:
    prompt, output = _penalised_tokens(sequence)
    return SampleRow(
        position=sequence.next_position,
        sampling=sequence.sampling,
        prompt_token_ids=prompt,
        output_token_ids=output,
        masked_token_ids=_masked_tokens(sequence, sequence.next_position),
        barred_token_ids=_barred_tokens(sequence),
    )


def _masked_tokens(sequence: Sequence, position: int) -> tuple[int, ...]:
    if position >= sequence.stopping.min_tokens:
        return ()
    return tuple(sorted(sequence.stopping.stop_token_ids))


def _barred_tokens(sequence: Sequence) -> tuple[int, ...]:
    bad = sequence.sampling.bad_token_ids
    if not bad:
        return ()
    num_looked_at = max(map(len, bad)) - 1
    first = max(_num_given(sequence), len(sequence.token_ids) - num_looked_at)
    return sequence.sampling.barred_after(sequence.token_ids[first:])


def _num_given(sequence: Sequence) -> int:
    """Returns the length of the client's prompt. Replayed output was given with it, but counts as output."""
    return sequence.num_prompt_tokens - sequence.output_base


def _penalised_tokens(sequence: Sequence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (prompt, output); both are empty without penalties, since copying all tokens at every step takes time."""
    if not sequence.sampling.has_penalties:
        return (), ()
    num_prompt = _num_given(sequence)
    return tuple(sequence.token_ids[:num_prompt]), tuple(sequence.token_ids[num_prompt:])
