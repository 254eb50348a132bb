"""Checks at load that the paged forward pass computes the same logits as transformers' own eager attention.

Two sequences run in chunks and single tokens, mixed in a batch, over a small pool. Their logits are compared with those
of plain passes over each sequence, which were made before any part of the model was replaced.
Owns: the tokens of the check and its tolerance. Never: which models are checked, or what follows from a failure.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.core.errors import UnsupportedModel
from services.core.hashing import num_blocks_for
from services.engine.model.inputs import flatten
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.model.paged_model import PagedModel, register_attention
from services.engine.schedule.sequence import SampleRow, SamplingParams, ScheduledSequence

logger = logging.getLogger(__name__)

_LENGTH = 40
"""Tokens of the longer sequence, beyond the sliding window if there is one."""
_WINDOW_LIMIT = 600
"""Largest sliding window, in tokens, for which the longer sequence is made longer than the window. For a larger one the
check would take too long, so its window hides nothing."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.4, torch.float16: 0.1}
"""Largest root mean square of the difference, relative to the spread (standard deviation) of the logits. Wrong
attention gives about 1.4; in bfloat16 transformers' own kinds of attention differ from each other by up to 0.2 on
random tokens."""
_OF_ROUNDED_KV = 0.2
"""The tolerance where keys and values are rounded to 8 bits."""
_OF_ROUNDED_INPUTS = 0.2
"""The tolerance where inputs are rounded to 8 bits: the least difference takes a few of them to the next value, and
after some layers what is left is the difference that the rounding itself makes."""


@dataclass(frozen=True, slots=True)
class PlainLogits:
    """Keeps two sequences of random tokens, and the unchanged model's logits after each token."""

    long: list[int]
    """Token ids of the longer sequence."""
    short: list[int]
    """Token ids of the shorter sequence."""
    of_long: Tensor
    """Logits of the longer sequence: [len(long), vocab_size]."""
    of_short: Tensor
    """Logits of the shorter sequence: [len(short), vocab_size]."""


def plain_logits(model: PreTrainedModel, vocab_size: int) -> PlainLogits:
    """Returns the logits of eager attention over two sequences. Call it before any part of the model is replaced."""
    long, short = _token_ids(vocab_size, _long_length(model)), _token_ids(vocab_size, _LENGTH // 2)
    return PlainLogits(long, short, _eager_logits(model, long), _eager_logits(model, short))


def verify(model: PagedModel, kv_shape: KVShape, plain: PlainLogits, *, rounds_inputs: bool = False) -> float:
    """Runs both sequences over a small pool of such blocks and compares the logits with `plain`.

    rounds_inputs: whether linear layers round their inputs to 8 bits, which makes small differences larger. Returns the
    root mean square of the difference, relative to the spread of the logits. Raises UnsupportedModel if it is beyond
    the tolerance.
    """
    expected = {0: plain.of_long, 1: plain.of_short}
    block_size = kv_shape.block_size
    num_blocks = num_blocks_for(len(plain.long), block_size) + num_blocks_for(len(plain.short), block_size)
    cache = KVCache(kv_shape, num_blocks, model.module.device)
    found, wanted = [], []
    try:
        for step in _steps(plain.long, plain.short, block_size):
            found.append(model.forward(flatten(step, block_size, model.module.device), cache))
            wanted += [expected[part.seq_id][part.start + part.num_tokens - 1] for part in step]
    finally:
        cache.close()
    what = "paged logits differ from eager ones"
    difference = require_agreement(
        torch.cat(found), torch.stack(wanted), model, kv_shape, what, rounds_inputs=rounds_inputs
    )
    logger.info("paged logits differ from eager ones by %.1e of their spread", difference)
    return difference


def require_agreement(
    found: Tensor, expected: Tensor, model: PagedModel, kv_shape: KVShape, what: str, *, rounds_inputs: bool = False
) -> float:
    """Returns the root mean square of the difference of two sets of logits of the model, relative to their spread.

    found, expected: [num_rows, vocab_size]. what: the beginning of the error message, which says what differs from
    what. rounds_inputs: see `verify`. Raises UnsupportedModel if the difference is beyond the tolerance.
    """
    difference = _difference(found, expected)
    computed_in = kv_shape.computed_in(model.shape.dtype)
    tolerance = max(_TOLERANCE[model.shape.dtype], _TOLERANCE[computed_in], _OF_ROUNDED_INPUTS * rounds_inputs)
    if kv_shape.dtype == torch.int8:
        tolerance = max(tolerance, _OF_ROUNDED_KV)
    if not difference <= tolerance:  # written so that NaN fails too
        kind = model.module.config.model_type
        raise UnsupportedModel(f"{kind}: {what} by {difference:.2g} of their spread")
    return difference


def _long_length(model: PreTrainedModel) -> int:
    text = model.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None) or 0
    length = window + _LENGTH if window <= _WINDOW_LIMIT else _LENGTH
    longest: int = text.max_position_embeddings
    return min(length, longest)


def _token_ids(vocab_size: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    tokens: list[int] = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    return tokens


def _steps(long: list[int], short: list[int], block_size: int) -> list[tuple[ScheduledSequence, ...]]:
    """Returns three steps: the longer sequence runs as two chunks and one token, the shorter as one chunk and two
    tokens."""
    half = len(long) // 2
    blocks_of_long = num_blocks_for(len(long), block_size)

    def part(seq_id: int, tokens: list[int], start: int, end: int) -> ScheduledSequence:
        first_block = 0 if seq_id == 0 else blocks_of_long
        blocks = range(first_block, first_block + num_blocks_for(end, block_size))
        row = SampleRow(0, SamplingParams())
        return ScheduledSequence(seq_id, start, tuple(tokens[start:end]), tuple(blocks), (row,))

    def both(ends: tuple[int, int, int, int]) -> tuple[ScheduledSequence, ...]:
        return part(1, short, ends[0], ends[1]), part(0, long, ends[2], ends[3])

    return [
        both((0, len(short) - 2, 0, half)),
        both((len(short) - 2, len(short) - 1, half, len(long) - 1)),
        both((len(short) - 1, len(short), len(long) - 1, len(long))),
    ]


@torch.inference_mode()
def _eager_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Returns the logits of transformers' eager attention: [len(token_ids), vocab_size]."""
    model.set_attn_implementation("eager")
    try:
        tokens = torch.tensor([token_ids], device=model.device)
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(register_attention())
    return logits


def _difference(found: Tensor, expected: Tensor) -> float:
    """Returns the root mean square of the difference, relative to the spread of `expected`. Both are [num_rows,
    vocab_size]."""
    found, expected = found.float(), expected.float()
    return ((found - expected).square().mean().sqrt() / expected.std(-1).mean()).item()
