"""Tests steps of decodes that run as graphs, with graphs that are recorded on the CPU in place of CUDA's."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.engine.attention.decode import GatheredDecode
from services.engine.attention.dense import paged_attention
from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.loading import load
from services.engine.model import decode_graphs, servable, weights
from services.engine.model.decode_graphs import (
    DecodeGraphs,
    GraphShape,
    fill,
    graph_shapes,
    is_decode_step,
    trial_step,
    unpacked,
)
from services.engine.model.kv_cache import KVCache, KVShape
from services.engine.model.paged_model import PagedModel, register_attention
from services.engine.runner import DeviceRunner
from services.engine.schedule.sequence import SampleRow, SamplingParams, ScheduledSequence
from services.engine.warm_up import Loaded
from tests.support.engine_driver import EngineDriver
from tests.support.models import FAMILIES, SLIDING_WINDOW, VOCAB_SIZE, tiny_model
from tests.support.recorded_graph import capture, without_capture

NUM_BLOCKS, BLOCK_SIZE, MAX_LEN = 64, 4, 96
LENGTHS = (1, 3, 4, 9, SLIDING_WINDOW + 5, 40)


def part(start: int, blocks: tuple[int, ...], token: int = 5, num_tokens: int = 1, num_rows: int = 1):
    rows = (SampleRow(0, SamplingParams()),) * num_rows
    return ScheduledSequence(0, start, (token,) * num_tokens, blocks, rows, is_decode=True)


def prompts() -> list[list[int]]:
    return [random.Random(length).choices(range(3, VOCAB_SIZE), k=length) for length in LENGTHS]


def test_shapes_double_up_to_the_most_sequences() -> None:
    assert [each.num_rows for each in graph_shapes(6, 9, None)] == [6, 4, 2, 1]
    assert graph_shapes(1, 9, None) == [GraphShape(1, 9)], "attention over tables reads no more than there is"


def test_shapes_that_gather_come_in_widths_and_not_too_large() -> None:
    assert set(graph_shapes(2, 100, 100)) == {
        GraphShape(1, 8), GraphShape(1, 32), GraphShape(1, 100), GraphShape(2, 8), GraphShape(2, 32),
    }  # fmt: skip
    sizes = [each.num_rows * each.width for each in graph_shapes(64, 512, 4096)]
    assert sizes == sorted(sizes, reverse=True)
    assert graph_shapes(4, 3, 2) == []


def test_only_steps_of_one_token_each_are_decodes() -> None:
    assert is_decode_step([part(3, (1,)), part(9, (2, 3, 4))])
    assert not is_decode_step([part(3, (1,)), part(0, (2,), num_tokens=3)]), "a chunk of a prompt"
    assert not is_decode_step([part(3, (1,), num_rows=0)]), "a chunk of one token that samples none"
    assert is_decode_step([part(3, (1,), num_rows=3)]), "further answers are copies of the first's logits"


def test_rows_without_a_sequence_write_where_nobody_reads() -> None:
    inputs = np.full((4, 2 + 3), 99, np.int32)  # what an earlier step left
    fill(inputs, [part(5, (7, 2), token=50), part(0, (3,), token=60)], unread_block=63)
    assert inputs.tolist() == [[50, 5, 7, 2, 63], [60, 0, 3, 63, 63], [0, 0, 63, 63, 63], [0, 0, 63, 63, 63]]
    tokens, tables = unpacked(torch.from_numpy(inputs), BLOCK_SIZE)
    assert tokens.token_ids.tolist() == [50, 60, 0, 0]
    assert tokens.positions.tolist() == [5, 0, 0, 0]
    assert tokens.slot_blocks.tolist() == [2, 3, 63, 63]
    assert tokens.slot_offsets.tolist() == [1, 0, 0, 0]
    assert tables.context_lens.tolist() == [6, 1, 1, 1]
    assert tables.blocks.tolist() == inputs[:, 2:].tolist()


def test_the_trial_step_leaves_a_row_empty_and_fills_the_table() -> None:
    for num_rows, longest in ((1, 32), (2, 32), (8, 30), (64, 5)):
        parts = trial_step(num_rows, longest, BLOCK_SIZE, VOCAB_SIZE)
        assert is_decode_step(parts)
        assert len(parts) == max(1, num_rows - 1)
        assert parts[0].start + 1 == longest
        assert all(len(each.block_ids) == each.start // BLOCK_SIZE + 1 for each in parts)
        written = {each.start: each.token_ids for each in parts}
        assert all(written[each.start] == each.token_ids for each in parts), "one slot, two tokens"


class Graphed:
    """Has a model on the CPU, with the plain torch attention and recorded graphs."""

    def __init__(self, directory: Path, capture=capture, max_num_seqs: int = 8) -> None:
        module = weights.load_model(directory, "float32", torch.device("cpu"), register_attention())
        shape = servable.examine(module)
        self.model = PagedModel(module, shape, paged_attention)
        kv_shape = KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE, shape.dtype)
        self.cache = KVCache(kv_shape, NUM_BLOCKS + 1, torch.device("cpu"))
        self.graphs = DecodeGraphs(
            self.model, self.cache, GatheredDecode(), capture, max_num_seqs=max_num_seqs, max_model_len=MAX_LEN
        )

    def load(self, config: EngineConfig) -> Loaded:
        """Is a loader whose steps run by graphs, whether or not that is faster."""
        plain = load(dataclasses.replace(config, num_blocks=8))
        plain.cache.close()
        info = dataclasses.replace(plain.info, num_blocks=NUM_BLOCKS, max_model_len=MAX_LEN)
        runner = DeviceRunner(self.model, self.cache, self.graphs)
        runner.tune = lambda decode: self.graphs.prepare()  # type: ignore[method-assign]
        return Loaded(info, self.cache, runner)


@pytest.fixture(params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_model(request.param, tmp_path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Returns the number of sequences of each step that ran as a graph after the graphs were ready."""
    sizes: list[int] = []
    load_parts = decode_graphs.DecodeGraph.load

    def note(self: decode_graphs.DecodeGraph, parts) -> None:
        sizes.append(len(parts))
        load_parts(self, parts)

    monkeypatch.setattr(decode_graphs.DecodeGraph, "load", note)
    return sizes


def generated(directory: Path, loader) -> list[list[int]]:
    config = EngineConfig(
        str(directory), "tiny", dtype="float32", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS,
        max_model_len=MAX_LEN, max_num_seqs=8, max_num_batched_tokens=16, threads=1,
    )  # fmt: skip
    with EngineDriver(Engine(config, loader)) as driver:
        return [*driver.generate(prompts(), 30), *driver.generate(prompts()[:1], 12, cache_salt="alone")]


def test_graphs_give_the_tokens_of_plain_steps(directory: Path, launched: list[int]) -> None:
    """Sequences join and end at different steps, so that graphs of every size run, most of them with empty rows."""
    graphed = Graphed(directory)
    found = generated(directory, graphed.load)
    assert len(graphed.graphs) == len(graphed.graphs._shapes), "all could be captured"
    assert {1, len(LENGTHS)} <= set(launched), "and were used"
    assert found == generated(directory, load)


def test_empty_rows_write_to_no_block_of_the_pool(tmp_path: Path) -> None:
    graphed = Graphed(tiny_model("llama", tmp_path))
    graphed.graphs.prepare()
    pool = range(NUM_BLOCKS)
    filled = b"\x3f" * graphed.cache.block_bytes  # not zeros, which are the KV of the token that empty rows have here
    graphed.cache.write_blocks(pool, [filled] * NUM_BLOCKS)
    step = [part(9, (20, 21, 22)), part(2, (23,)), part(4, (30, 31))]
    graph = graphed.graphs.for_step(step)
    assert graph is not None
    graph.load(step)
    assert graph.run().shape == (3, VOCAB_SIZE)
    changed = {block for block in pool if graphed.cache.read_blocks([block])[0] != filled}
    assert changed == {22, 23, 31}
    graphed.cache.close()


def test_a_step_takes_the_smallest_graph_that_it_fits(tmp_path: Path) -> None:
    graphed = Graphed(tiny_model("llama", tmp_path))
    graphs = graphed.graphs
    assert graphs.for_step([part(9, (1, 2, 3))]) is None, "there are none yet"
    graphs.prepare()

    def shape_for(num_sequences: int, num_blocks: int) -> GraphShape | None:
        graph = graphs.for_step([part(4 * num_blocks - 1, tuple(range(num_blocks)))] * num_sequences)
        return next((shape for shape, each in graphs._graphs.items() if each is graph), None)

    assert shape_for(1, 1) == GraphShape(1, 8)
    assert shape_for(3, 8) == GraphShape(4, 8)
    assert shape_for(5, 9) == GraphShape(8, MAX_LEN // BLOCK_SIZE)
    assert shape_for(9, 1) is None, "more sequences than any graph has"
    assert graphs.for_step([part(9, (1, 2, 3)), part(0, (4,), num_tokens=2)]) is None
    graphed.cache.close()


def test_a_capture_that_fails_leaves_plain_steps_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, launched: list[int]
) -> None:
    directory = tiny_model("llama", tmp_path)
    graphed = Graphed(directory, without_capture)
    with caplog.at_level(logging.WARNING, "services.engine.model.decode_graphs"):
        found = generated(directory, graphed.load)
    assert [each.message for each in caplog.records] == [
        "decodes run without graphs: RuntimeError: operation not permitted when stream is capturing"
    ]
    assert len(graphed.graphs) == 0
    assert found == generated(directory, load)


def test_graphs_that_compute_something_else_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the newest token does not see itself."""
    plain = GatheredDecode.__call__

    def shorter(self, query, keys, values, tables, scoring):
        fewer = dataclasses.replace(tables, context_lens=(tables.context_lens - 1).clamp(min=1))
        return plain(self, query, keys, values, fewer, scoring)

    monkeypatch.setattr(GatheredDecode, "__call__", shorter)
    graphed = Graphed(tiny_model("llama", tmp_path))
    graphed.graphs.prepare()
    assert len(graphed.graphs) == 0
    assert "logits of a captured graph differ" in caplog.text
    graphed.cache.close()


def test_graphs_that_are_slower_are_dropped(tmp_path: Path) -> None:
    for graph_ms, expected in ((2.0, 0), (0.5, 1)):
        graphed = Graphed(tiny_model("llama", tmp_path), max_num_seqs=1)
        runner = DeviceRunner(graphed.model, graphed.cache, graphed.graphs)
        runner._choose_graphs(graphed.graphs, lambda g=graphed, ms=graph_ms: ms if len(g.graphs) else 1.0)
        assert (len(graphed.graphs) > 0) == expected
        graphed.cache.close()


def test_what_reads_the_device_cannot_be_captured() -> None:
    """The recorder refuses what CUDA would: without that, the tests above would show little."""
    tensor = torch.ones(3)
    for forbidden in (lambda: tensor * tensor.max().item(), lambda: tensor[tensor > 0], lambda: torch.tensor([1.0])):
        with pytest.raises(RuntimeError, match="not permitted while a graph is captured"):
            capture(forbidden)
