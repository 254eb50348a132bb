"""Runs steps of decodes as captured graphs: their kernels are launched by one call instead of hundreds.

A graph (CUDA graphs: docs.nvidia.com/cuda, "CUDA Graphs") is captured for a number of rows and of blocks per row, and
keeps the addresses of its inputs. A step of fewer sequences fills the other rows with a token whose KV goes to a block
that nobody reads, and the logits of these rows are dropped.
Owns: which graphs there are, their inputs, and which steps run as one. Never: how a graph is captured (`cuda_graph`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from services.core.hashing import num_blocks_for
from services.engine.attention.decode import DecodeAttention, DecodeTables
from services.engine.attention.paged import Scoring
from services.engine.model.inputs import StepTokens, flatten
from services.engine.model.kv_cache import KVCache
from services.engine.model.paged_model import PagedModel
from services.engine.model.verification import require_agreement
from services.engine.schedule.sequence import SampleRow, SamplingParams, ScheduledSequence

logger = logging.getLogger(__name__)

_TOKEN, _POSITION, _TABLE = 0, 1, 2
"""Columns of the inputs: the token's id, its position, and from the third on the sequence's blocks."""
_FEWEST_BLOCKS, _GROWTH = 8, 4
"""Blocks of the narrowest graph, and how many times as many the next one has."""
_MOST_GATHERED_BYTES = 256 << 20
"""Most bytes of keys and values that the attention of a graph copies in one layer. A step that needs more runs without
a graph, which copies only what its sequences have."""


class Captured(Protocol):
    """Is a computation that was captured."""

    @property
    def output(self) -> Tensor:
        """Returns the tensor that `launch` writes."""
        ...

    def launch(self) -> None:
        """Starts the computation on the inputs as they are now. On a CUDA device it runs on the current stream."""
        ...


Capture: TypeAlias = Callable[[Callable[[], Tensor]], Captured]
"""Captures a function, which it may call more than once. Raises what the function raises, and RuntimeError if it does
what cannot be captured."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Says for which steps a graph is: the most sequences, and the most blocks of each."""

    num_rows: int
    width: int


def graph_shapes(max_num_seqs: int, most_blocks: int, most_gathered: int | None) -> list[GraphShape]:
    """Returns the shapes of the graphs of a worker, the largest first, since the later ones reuse its memory.

    most_blocks: blocks of the longest sequence. most_gathered: blocks over all rows that attention may gather; with
    None it reads only what sequences have, so that graphs of one width do.
    """
    widths = [most_blocks] if most_gathered is None else [*_powers(_FEWEST_BLOCKS, _GROWTH, most_blocks)]
    rows = [*_powers(1, 2, max_num_seqs)]
    shapes = [GraphShape(num_rows, width) for num_rows in rows for width in widths]
    kept = [each for each in shapes if most_gathered is None or each.num_rows * each.width <= most_gathered]
    return sorted(kept, key=lambda each: each.num_rows * each.width, reverse=True)


def _powers(first: int, factor: int, last: int) -> Iterator[int]:
    """Yields first, first * factor, … as long as they are smaller than `last`, and then `last`."""
    while first < last:
        yield first
        first *= factor
    yield last


def is_decode_step(parts: Sequence[ScheduledSequence]) -> bool:
    """Returns whether every sequence of a step computes one token and samples the next."""
    return all(part.num_tokens == 1 and part.rows and part.scoring is None for part in parts)


def fill(inputs: np.ndarray, parts: Sequence[ScheduledSequence], unread_block: int) -> None:
    """Writes a step's sequences to the inputs of a graph, [num_rows, 2 + width] int32.

    Rows without a sequence get token 0 at position 0 of `unread_block`, and so do tables beyond a sequence's blocks.
    """
    inputs[:, :_TABLE] = 0
    inputs[:, _TABLE:] = unread_block
    for row, part in zip(inputs, parts, strict=False):
        row[_TOKEN], row[_POSITION] = part.token_ids[0], part.start
        row[_TABLE : _TABLE + len(part.block_ids)] = part.block_ids


def unpacked(inputs: Tensor, block_size: int) -> tuple[StepTokens, DecodeTables]:
    """Returns what a forward pass takes, made on the device of the inputs of a graph (see `fill`)."""
    positions, blocks = inputs[:, _POSITION].long(), inputs[:, _TABLE:].contiguous()
    tokens = StepTokens(
        token_ids=inputs[:, _TOKEN].long(),
        positions=positions,
        slot_blocks=blocks.gather(1, (positions // block_size)[:, None])[:, 0].long(),
        slot_offsets=positions % block_size,
        logit_rows=torch.arange(len(inputs), device=inputs.device),
    )
    return tokens, DecodeTables(blocks, (positions + 1).int())


class DecodeGraph:
    """Has one captured forward pass with its inputs."""

    @torch.inference_mode()
    def __init__(
        self, shape: GraphShape, model: PagedModel, cache: KVCache, attention: DecodeAttention, capture: Capture
    ) -> None:
        """Captures the pass. Raises what `capture` raises. The last block of the cache must be one that nobody
        reads."""
        size, on_device = (shape.num_rows, _TABLE + shape.width), cache.device.type != "cpu"
        self._unread_block = cache.num_blocks - 1
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_device)
        self._inputs = torch.zeros(size, dtype=torch.int32, device=cache.device)
        self._num_sequences = 0
        self.load(())

        def compute() -> Tensor:
            tokens, tables = unpacked(self._inputs, cache.shape.block_size)

            def attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, scoring: Scoring) -> Tensor:
                return attention(query, key_cache, value_cache, tables, scoring)

            return model.compute(tokens, cache, attend)

        self._captured = capture(compute)

    @torch.inference_mode()
    def load(self, parts: Sequence[ScheduledSequence]) -> None:
        """Puts the sequences of a step in the graph's inputs. The step before must be complete: the copy to the device
        reads memory that this overwrites."""
        fill(self._host.numpy(), parts, self._unread_block)
        self._inputs.copy_(self._host, non_blocking=True)
        self._num_sequences = len(parts)

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Computes what was loaded; returns the logits, [num_sequences, vocab_size], which the next run overwrites."""
        self._captured.launch()
        return self._captured.output[: self._num_sequences]


class DecodeGraphs:
    """Has the graphs of a worker. There are none before `prepare`, and after a failure."""

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        attention: DecodeAttention,
        capture: Capture,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._model, self._cache = model, cache
        self._attention, self._capture = attention, capture
        self._max_model_len = max_model_len
        shape = cache.shape
        layer_bytes = shape.block_bytes // shape.num_layers
        most_blocks = num_blocks_for(max_model_len, shape.block_size)
        most_gathered = _MOST_GATHERED_BYTES // layer_bytes if attention.gathers else None
        self._shapes = graph_shapes(max_num_seqs, most_blocks, most_gathered)
        self._graphs: dict[GraphShape, DecodeGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def prepare(self) -> None:
        """Captures all graphs, and compares each with the forward pass without it. If that fails, there are none, and
        the log says why.

        It writes to the pool's blocks, so nobody may use them yet.
        """
        try:
            for shape in self._shapes:
                graph = DecodeGraph(shape, self._model, self._cache, self._attention, self._capture)
                self._compare(graph, shape)
                self._graphs[shape] = graph
        except Exception as error:  # whatever it is, steps run without graphs
            self.drop()
            logger.warning("decodes run without graphs: %s: %s", type(error).__name__, error)

    def drop(self) -> None:
        """Gives all graphs up: every step runs without one."""
        self._graphs.clear()

    def for_step(self, parts: Sequence[ScheduledSequence]) -> DecodeGraph | None:
        """Returns the smallest graph that these sequences fit, or None if they must run without."""
        if not self._graphs or not is_decode_step(parts):
            return None
        width = max(len(part.block_ids) for part in parts)
        fitting = [each for each in self._graphs if each.num_rows >= len(parts) and each.width >= width]
        smallest = min(fitting, key=lambda each: (each.num_rows, each.width), default=None)
        return None if smallest is None else self._graphs[smallest]

    def _compare(self, graph: DecodeGraph, shape: GraphShape) -> None:
        """Raises UnsupportedModel if the graph's logits are not those of the pass without it."""
        block_size, vocab_size = self._cache.shape.block_size, self._model.shape.vocab_size
        parts = trial_step(shape.num_rows, min(shape.width * block_size, self._max_model_len), block_size, vocab_size)
        expected = self._model.forward(flatten(parts, block_size, self._cache.device), self._cache)
        graph.load(parts)
        what = "logits of a captured graph differ from those of a plain step"
        require_agreement(graph.run(), expected, self._model, self._cache.shape, what)


def trial_step(num_rows: int, longest: int, block_size: int, vocab_size: int) -> tuple[ScheduledSequence, ...]:
    """Returns decodes for a graph with `num_rows` rows: one of `longest` tokens, and others of no more.
    If there is more than one row, the last remains empty.

    They share blocks, which come first in the pool. A token is a function of its position, so that sequences which
    write the same slot write the same to it.
    """
    lengths = [longest, *(1 + (13 * row) % longest for row in range(1, num_rows - 1))]
    greedy = (SampleRow(0, SamplingParams(temperature=0.0)),)
    return tuple(
        ScheduledSequence(
            seq_id=row,
            start=length - 1,
            token_ids=((7919 * length) % vocab_size,),
            block_ids=tuple(range(num_blocks_for(length, block_size))),
            rows=greedy,
            is_decode=True,
        )
        for row, length in enumerate(lengths)
    )
