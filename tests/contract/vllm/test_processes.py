"""Kills and stops vLLM's processes and the worker itself: everything of vLLM ends within 5 s, and the engine says which
one it was; and a worker that was stopped goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.vllm import process
from services.vllm.engine import VllmEngine
from tests.support import ROOT
from tests.support.footprint import Footprint
from tests.support.scripted_memory import script
from tests.support.scripted_vllm_engine import VOCAB_SIZE, Driver, ScriptedVllm, engine_config, processes

pytestmark = pytest.mark.process

WITHIN_S = 5.0
NAMES = {
    "front": "vLLM's engine process",
    "core": "vLLM's scheduler",
    "rank0": "vLLM's rank 0",
    "rank1": "vLLM's rank 1",
    "keeper": "vLLM's keeper",
}


class Worker:
    """Is the process of `scripted_vllm_worker`."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.scripted_vllm_worker", str(model), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        started = self._read()
        self.pids: dict[str, int] = started["pids"]
        self.folder = Path(started["folder"])
        self.footprint = Footprint()
        self.footprint.watch(self.process.pid)

    def _read(self) -> dict[str, object] | object:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self) -> object:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def worker(model: Path, tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(model, tmp_path)
    yield worker
    worker.end()


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_nothing_outlives_a_killed_worker(worker: Worker, state: str) -> None:
    below = [pid for name, pid in worker.pids.items() if name != "keeper"]
    assert len(worker.footprint.processes) == 6
    assert len([path for path in worker.footprint.segments if "scripted-" in path]) == 2
    if state == "stopped":
        for pid in below:
            os.kill(pid, signal.SIGSTOP)
    worker.process.kill()
    worker.process.wait()
    worker.footprint.await_gone(WITHIN_S)
    assert not worker.folder.exists()


def test_vllm_is_in_the_workers_session_and_not_in_its_group(worker: Worker) -> None:
    """A Ctrl-C is not for vLLM, and the kernel's division of the processor among sessions does not come between."""
    own = worker.process.pid
    assert {os.getsid(pid) for pid in worker.pids.values()} == {os.getsid(own)}
    assert {os.getpgid(pid) for pid in worker.pids.values()} == {worker.pids["keeper"]}
    assert os.getpgid(own) != worker.pids["keeper"]


def test_a_worker_that_was_stopped_goes_on(worker: Worker) -> None:
    """It has not heard of vLLM for longer than vLLM may be silent, and that is not vLLM's fault."""
    worker.process.send_signal(signal.SIGSTOP)
    time.sleep(2 * process.SILENT_S)
    worker.process.send_signal(signal.SIGCONT)
    for _ in range(2):
        assert worker.ask() == {"said": script([7, 8, 9], 5, VOCAB_SIZE), "why_over": ""}
        time.sleep(0.6)


@pytest.fixture
def shared(model: Path, tmp_path: Path) -> Iterator[VllmEngine]:
    """Returns an engine of two ranks, which have shared memory."""
    vllm = ScriptedVllm(tmp_path, tensor_parallel_size="2")
    vllm.controls.set("share")
    with Driver(vllm.load(engine_config(model))) as driver:
        yield driver.engine


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_engine_is_over_when_one_of_vllms_processes_is(
    shared: VllmEngine, name: str, number: signal.Signals
) -> None:
    footprint, pid = Footprint(), processes(shared)[name]
    for child in psutil.Process().children(recursive=True):
        footprint.processes.add(child)
        footprint.watch(child.pid)
    folder = Path(shared._process.folder)
    assert len(footprint.processes) == 5
    began_s = time.monotonic()
    os.kill(pid, number)
    shared.join()
    assert not shared.alive
    shared.stop()
    assert time.monotonic() - began_s < WITHIN_S
    assert shared.why_over.startswith(f"{NAMES[name]} (pid {pid})")
    assert ("stands still" in shared.why_over) == (number == signal.SIGSTOP)
    footprint.memfds.clear()  # the slots are the worker's
    footprint.await_gone(1.0)
    assert not folder.exists()


def test_one_that_never_is_ready_ends_with_its_worker(model: Path, tmp_path: Path) -> None:
    """It is ended when its worker exits, which does so at once where it is told to stop while it loads."""
    vllm = ScriptedVllm(tmp_path)
    vllm.controls.set("never-ready")
    program = (
        "import os, sys, threading, time; from pathlib import Path;"
        "from tests.support.scripted_vllm_engine import ScriptedVllm, engine_config;"
        "vllm = ScriptedVllm(Path(sys.argv[2]));"
        "threading.Thread(target=vllm.load, args=(engine_config(Path(sys.argv[1])),), daemon=True).start();"
        "sys.stdin.readline(); os._exit(0)"
    )
    command = [sys.executable, "-c", program, str(model), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, text=True) as loading:
        own = psutil.Process(loading.pid)
        until_s = time.monotonic() + 10.0
        while len(own.children(recursive=True)) < 3:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        footprint = Footprint()
        footprint.watch(loading.pid)
        loading.communicate("\n")
    footprint.await_gone(WITHIN_S)
