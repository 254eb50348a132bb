"""Makes one sequence's part of a step, and decides which of the tokens it sampled are output and which one ends the
sequence. Pure functions, but that `next_part` notes in the sequence what its constraint is told."""

from __future__ import annotations

from services.core.hashing import num_blocks_for
from services.engine.schedule.queues import tokens_left
from services.engine.schedule.sequence import (
    Finish,
    Mode,
    PromptScoring,
    SampledToken,
    SampleRow,
    SamplingParams,
    ScheduledSequence,
    Sequence,
)


def next_part(sequence: Sequence, num_tokens: int, block_size: int, num_drafts: int = 0) -> ScheduledSequence:
    """Returns a part with the next `num_tokens` uncomputed tokens.

    It samples if they reach the end of the sequence. Only then may `num_drafts` of its drafts follow them.
    """
    start = sequence.num_computed
    end = start + num_tokens
    samples = end == len(sequence.token_ids)
    assert samples or not num_drafts, "drafts follow the newest token"
    drafts = sequence.draft_token_ids[:num_drafts]
    constraint = sequence.constraint if samples else None
    return ScheduledSequence(
        seq_id=sequence.seq_id,
        start=start,
        token_ids=(*sequence.token_ids[start:end], *drafts),
        block_ids=tuple(sequence.block_ids[: num_blocks_for(end + num_drafts, block_size)]),
        rows=_rows(sequence, drafts) if samples else (),
        further_rows=tuple(_rows(each, ())[0] for each in sequence.further) if samples else (),
        is_decode=sequence.decoding,
        scoring=_scoring(sequence, start, end),
        constraint=constraint,
        untold_token_ids=() if constraint is None else _untold(sequence),
        stop_token_ids=() if constraint is None else tuple(sequence.stopping.stop_token_ids),
    )


def num_checkable_drafts(sequence: Sequence, block_size: int, max_model_len: int) -> int:
    """Returns how many of the sequence's drafts its next step may check.

    They take slots of blocks that the sequence has anyway, so that a guess never takes a block from anybody; and with
    the token sampled after the last of them, the sequence does not grow beyond its limits.
    """
    free_slots = len(sequence.block_ids) * block_size - len(sequence.token_ids)
    return max(0, min(len(sequence.draft_token_ids), free_slots, tokens_left(sequence, max_model_len) - 1))


def accepted(part: ScheduledSequence, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
    """Returns the sampled tokens that are output: up to and including the first that its draft did not foretell.

    The noise of a token is keyed by its position, so these are the tokens that steps of one token would have sampled,
    whatever the drafts were: speculative decoding (Leviathan et al., arXiv 2211.17192) without a rejection rule.
    """
    num_accepted = 1
    for draft, token in zip(part.draft_token_ids, sampled, strict=False):
        if draft != token.token_id:
            break
        num_accepted += 1
    return sampled[:num_accepted]


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


def _rows(sequence: Sequence, drafts: tuple[int, ...]) -> tuple[SampleRow, ...]:
    """Returns a row for the newest token of the sequence and one for each draft."""
    prompt, output = _penalised_tokens(sequence)
    penalised = _has_penalties(sequence.sampling)
    return tuple(
        SampleRow(
            position=position,
            sampling=sequence.sampling,
            prompt_token_ids=prompt,
            output_token_ids=output + drafts[:place] if penalised else (),
            masked_token_ids=_masked_tokens(sequence, position),
            barred_token_ids=_barred_tokens(sequence, drafts[:place]),
        )
        for place, position in enumerate(range(sequence.next_position, sequence.next_position + len(drafts) + 1))
    )


def _masked_tokens(sequence: Sequence, position: int) -> tuple[int, ...]:
    if position >= sequence.stopping.min_tokens:
        return ()
    return tuple(sorted(sequence.stopping.stop_token_ids))


def _barred_tokens(sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
    bad = sequence.sampling.bad_token_ids
    if not bad:
        return ()
    num_looked_at = max(map(len, bad)) - 1
    first = max(_num_given(sequence), len(sequence.token_ids) - num_looked_at)
    return sequence.sampling.barred_after((*sequence.token_ids[first:], *drafts))


def _num_given(sequence: Sequence) -> int:
    """Returns the length of the client's prompt. Replayed output was given with it, but counts as output."""
    return sequence.num_prompt_tokens - sequence.output_base


def _penalised_tokens(sequence: Sequence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (prompt, output); both are empty without penalties, since copying all tokens at every step takes time."""
    if not _has_penalties(sequence.sampling):
        return (), ()
    num_prompt = _num_given(sequence)
    return tuple(sequence.token_ids[:num_prompt]), tuple(sequence.token_ids[num_prompt:])


def _has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
