"""One sequence's part of a step: what runs of it, and whether the token it sampled ends it. Pure functions."""

from __future__ import annotations

from services.core.hashing import num_blocks_for
from services.engine.sequence import Finish, Mode, SamplingParams, ScheduledSequence, Sequence


def next_part(sequence: Sequence, num_tokens: int, block_size: int) -> ScheduledSequence:
    """The next `num_tokens` uncomputed tokens. Samples if they reach the end of its tokens."""
    start = sequence.num_computed
    end = start + num_tokens
    samples = end == len(sequence.token_ids)
    prompt, output = _penalised_tokens(sequence) if samples else ((), ())
    return ScheduledSequence(
        seq_id=sequence.seq_id,
        start=start,
        token_ids=tuple(sequence.token_ids[start:end]),
        block_ids=tuple(sequence.block_ids[: num_blocks_for(end, block_size)]),
        samples=samples,
        position=sequence.next_position,
        sampling=sequence.sampling,
        prompt_token_ids=prompt,
        output_token_ids=output,
        masked_token_ids=_masked_tokens(sequence) if samples else (),
    )


def ending(sequence: Sequence, token_id: int, max_model_len: int) -> tuple[Finish | None, int | None]:
    """How `token_id`, about to be appended, ends the sequence: (finish, stop token id). STOP wins over LENGTH.

    This pool's context does not end a PREFILL_ONLY sequence: it goes on in another one, which may be larger.
    """
    position = sequence.next_position
    if position >= sequence.stopping.min_tokens and token_id in sequence.stopping.stop_token_ids:
        return Finish.STOP, token_id
    full = sequence.mode is Mode.GENERATE and len(sequence.token_ids) + 1 >= max_model_len
    if full or position + 1 >= sequence.stopping.max_tokens:
        return Finish.LENGTH, None
    return None, None


def _masked_tokens(sequence: Sequence) -> tuple[int, ...]:
    if sequence.next_position >= sequence.stopping.min_tokens:
        return ()
    return tuple(sorted(sequence.stopping.stop_token_ids))


def _penalised_tokens(sequence: Sequence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prompt, output); empty without penalties, since copying the context at every step is not free."""
    if not _has_penalties(sequence.sampling):
        return (), ()
    # Replayed output was given with the prompt, but counts as output.
    num_prompt = sequence.num_prompt_tokens - sequence.output_base
    return tuple(sequence.token_ids[:num_prompt]), tuple(sequence.token_ids[num_prompt:])


def _has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
