"""Decides which rows, blocks and keys of a step go into which product of `dense`, and makes their masks.

`Products` are made once per step and sliding window, and the layers share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.attention.paged import StepLayout

_SLACK_BLOCKS = 8
"""Blocks of padding up to which a shorter decode may share a batch with a longer one; padding up to its own length is
allowed too."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Holds some sequences with one new token each, padded to the same number of blocks."""

    rows: slice | Tensor
    """Rows of the sequences in the step: [batch]."""
    blocks: Tensor
    """Blocks to gather: [batch * blocks_each]. Padding repeats the sequence's own last block and is masked."""
    bias: Tensor
    """Mask that is added to the scores: [batch, 1, keys], 0 where a key is visible, -inf elsewhere."""
    only_keys: slice | None
    """Visible keys in a batch of one sequence; None in larger batches."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Holds one sequence with several new tokens. Keys are counted from the first gathered token that some query
    sees."""

    rows: slice
    blocks: Tensor
    keys: slice
    """The gathered tokens that some query sees."""
    query_len: int
    sliding_window: int | None
    like: Tensor
    """A tensor with the dtype and device that the masks get."""
    _biases: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    @property
    def num_keys(self) -> int:
        first: int = self.keys.start
        end: int = self.keys.stop
        return end - first

    @property
    def starts_fresh(self) -> bool:
        """Returns whether attention is plainly causal: every key is of a query's token, and no window hides any."""
        return self.query_len == self.num_keys and (self.sliding_window is None or self.sliding_window >= self.num_keys)

    def seen(self, start: int, end: int) -> slice:
        """Returns the keys that any of the queries start … end - 1 sees."""
        before = self.num_keys - self.query_len
        first = 0 if self.sliding_window is None else max(0, before + start - self.sliding_window + 1)
        return slice(first, before + end)

    def masked(self, start: int, end: int) -> slice:
        """Returns the keys that need a mask for the queries start … end - 1: those that some but not all of them see;
        with a sliding window, all keys that any of them sees."""
        if self.sliding_window is None:
            return slice(self.num_keys - self.query_len + start + 1, self.num_keys - self.query_len + end)
        return self.seen(start, end)

    def bias(self, start: int, end: int, keys: slice) -> Tensor:
        """Returns the mask of queries start … end - 1 over `keys`: [end - start, keys], 0 where visible, else -inf."""
        first_query = self.num_keys - self.query_len + start
        # Without a window only the distance to the queries matters, so that all tiles share one mask.
        key = (end - start, keys.stop - keys.start, first_query - keys.start)
        if key not in self._biases:
            device = self.like.device
            queries = torch.arange(first_query, first_query + end - start, device=device)
            distance = queries[:, None] - torch.arange(keys.start, keys.stop, device=device)
            hidden = distance < 0 if self.sliding_window is None else (distance < 0) | (distance >= self.sliding_window)
            self._biases[key] = _bias(hidden, self.like)
        return self._biases[key]


@dataclass(frozen=True, slots=True)
class Products:
    """Holds the products of a step, for layers of one sliding window."""

    decodes: list[DecodeGroup]
    chunks: list[Chunk]


def products_of(layout: StepLayout, block_size: int, sliding_window: int | None, like: Tensor) -> Products:
    """Returns the products of a step. Masks get the dtype and device of `like`."""
    decodes: list[tuple[int, Sequence[int], slice]] = []  # row, visible blocks, visible keys in them
    chunks = []
    row = 0
    for table, query_len, context_len in layout.sequences():
        first = 0 if sliding_window is None else max(0, context_len - query_len - sliding_window + 1)
        skipped = first // block_size
        keys = slice(first - skipped * block_size, context_len - skipped * block_size)
        visible = table[skipped : -(-context_len // block_size)]
        if query_len == 1:
            decodes.append((row, visible, keys))
        else:
            blocks = torch.tensor(visible, device=like.device)
            chunks.append(Chunk(slice(row, row + query_len), blocks, keys, query_len, sliding_window, like))
        row += query_len
    return Products([_group(members, block_size, like) for members in _similar(decodes)], chunks)


def _similar(decodes: list[tuple[int, Sequence[int], slice]]) -> list[list[tuple[int, Sequence[int], slice]]]:
    """Divides decodes into groups of similar length, so that padding costs little (`_SLACK_BLOCKS`)."""
    groups: list[list[tuple[int, Sequence[int], slice]]] = []
    longest = 0
    for decode in sorted(decodes, key=lambda decode: (-len(decode[1]), decode[0])):
        length = len(decode[1])
        if not groups or longest > max(2 * length, length + _SLACK_BLOCKS):
            groups.append([])
            longest = length
        groups[-1].append(decode)
    return [sorted(group) for group in groups]


def _group(members: list[tuple[int, Sequence[int], slice]], block_size: int, like: Tensor) -> DecodeGroup:
    width = max(len(blocks) for _, blocks, _ in members)
    padded = [[*blocks, *[blocks[-1]] * (width - len(blocks))] for _, blocks, _ in members]
    first = torch.tensor([[keys.start] for _, _, keys in members], device=like.device)
    stop = torch.tensor([[keys.stop] for _, _, keys in members], device=like.device)
    position = torch.arange(width * block_size, device=like.device)
    hidden = (position < first) | (position >= stop)
    rows = [row for row, _, _ in members]
    together = rows[-1] - rows[0] + 1 == len(rows)
    return DecodeGroup(
        rows=slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows, device=like.device),
        blocks=torch.tensor(padded, device=like.device).flatten(),
        bias=_bias(hidden, like)[:, None],
        only_keys=members[0][2] if len(members) == 1 else None,
    )


def _bias(hidden: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
