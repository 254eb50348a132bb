"""Tests steps of decodes that run as CUDA graphs: the tokens of plain steps, and the memory that graphs take."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from services.engine.model.cuda_graph import CudaCapture
from services.engine.model.decode_graphs import DecodeGraphs
from services.engine.runner import DeviceRunner
from tests.support.engine_driver import EngineDriver, drive
from tests.support.models import FAMILIES, SLIDING_WINDOW, VOCAB_SIZE, tiny_model

CUDA = "cuda:0"
LENGTHS = (1, 15, 16, 17, SLIDING_WINDOW + 1, 90)


def prompts() -> list[list[int]]:
    return [random.Random(length).choices(range(3, VOCAB_SIZE), k=length) for length in LENGTHS]


def graphs_of(driver: EngineDriver) -> DecodeGraphs:
    runner = driver.engine._runner
    assert isinstance(runner, DeviceRunner)
    assert runner._graphs is not None
    return runner._graphs


@pytest.fixture(autouse=True)
def _graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run here whether or not they are faster."""

    def choose(self: DeviceRunner, graphs: DecodeGraphs, decode: object) -> None:
        graphs.prepare()
        assert len(graphs) > 0, "no graph could be captured; the log says why"

    monkeypatch.setattr(DeviceRunner, "_choose_graphs", choose)


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_the_tokens_of_plain_steps(family: str, tmp_path: Path) -> None:
    directory = tiny_model(family, tmp_path)
    outputs = []
    for decode_graphs in (False, True):
        limits = {"max_num_seqs": 8, "max_model_len": 256}
        with drive(directory, device=CUDA, decode_graphs=decode_graphs, **limits) as driver:
            outputs.append(driver.generate(prompts(), 40) + driver.generate(prompts()[:1], 20, cache_salt="alone"))
    assert outputs[0] == outputs[1]


def test_bfloat16_generates_by_graphs(tmp_path: Path) -> None:
    """Preparing them has compared their logits with those of plain steps."""
    with drive(tiny_model("llama", tmp_path), device=CUDA, dtype="bfloat16", max_num_seqs=8) as driver:
        assert [len(output) for output in driver.generate(prompts(), 16)] == [16] * len(LENGTHS)


def test_what_cannot_be_captured_leaves_the_device_usable() -> None:
    capture, values = CudaCapture(torch.device(CUDA)), torch.ones(4, device=CUDA)
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        capture(lambda: values * values.max().item())
    assert torch.cuda.current_stream() == before
    captured = capture(lambda: values * 2)
    values.fill_(3)
    captured.launch()
    assert captured.output.tolist() == [6.0] * 4


def test_memory_is_accounted_for(tmp_path: Path) -> None:
    directory = tiny_model("llama", tmp_path)
    taken = []
    for decode_graphs in (False, True):
        with drive(directory, device=CUDA, decode_graphs=decode_graphs, max_num_seqs=8) as driver:
            memory, cache = driver.engine.device_memory(), driver.engine.cache
            assert set(memory) == {"allocated", "reserved", "free", "total"}
            assert memory["total"] >= memory["reserved"] >= memory["allocated"]
            assert memory["allocated"] >= cache.num_blocks * cache.block_bytes
            assert memory["free"] + memory["reserved"] <= memory["total"]
            assert cache.num_blocks == driver.engine.info.num_blocks + decode_graphs, "one that nobody reads"
            taken.append(memory["reserved"])
            if decode_graphs:
                num_graphs = len(graphs_of(driver))
    assert num_graphs > 0
    assert taken[1] - taken[0] < 1 << 30, "graphs share their memory"
