"""Tests `baton up --engine vllm` with real workers over a vLLM that follows a script: whatever of vLLM is killed or
stopped while an answer is decoded, the answer is the same, and the worker comes back."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.models import tiny_model
from tests.support.patience import Patience
from tests.support.processes import Up
from tests.support.scripted_vllm_engine import ScriptedVllm

pytestmark = [pytest.mark.faults, pytest.mark.process]

NUM_TOKENS = 30
STRIKES = {
    "worker": (0, signal.SIGKILL),
    "keeper": (1, signal.SIGKILL),
    "front": (2, signal.SIGKILL),
    "core": (3, signal.SIGSTOP),
}
"""How far below the worker a process is, and what it gets."""


def below(worker: int, depth: int) -> int:
    process = psutil.Process(worker)
    for _ in range(depth):
        (process,) = (each for each in process.children() if "vllm" in " ".join(each.cmdline()))
    return process.pid


def test_an_answer_survives_whatever_of_vllm_ends(tmp_path: Path) -> None:
    vllm = ScriptedVllm(tmp_path)
    flags = ("--engine", "vllm", "--vllm-python", str(vllm.python), "--prefill", "1", "--decode", "1")
    with Up(tiny_model("llama", tmp_path), tmp_path, *flags) as up, ThreadPoolExecutor() as pool:
        up.read_until("^ready$")
        right = up.generate(max_tokens=NUM_TOKENS)["text"]
        for name, (depth, number) in STRIKES.items():
            with vllm.controls.held("hold-decode"):
                answer = pool.submit(up.generate, max_tokens=NUM_TOKENS)
                patience = Patience(20.0)
                while not vllm.controls.is_held("hold-decode"):
                    assert not patience.is_over(), "it decodes"
                    time.sleep(0.01)
                up.footprint.watch(up.process.pid)
                os.kill(below(up.pids()["decode-0"], depth), number)
                up.read_until("^decode-0 .* pid ")  # it has started again
                vllm.controls.clear("hold-decode.held")  # whoever waited is gone
            ended: dict[str, Any] = answer.result()
            assert ended["text"] == right, name
            assert ended["workers"]["retries"] >= 1, name
        up.stop(signal.SIGTERM)
