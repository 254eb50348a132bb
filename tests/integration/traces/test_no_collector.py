"""Tests that a collector that is not there, or that never answers, changes nothing: not the answers, not the way a
process ends, and the log by a line or two."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc
from services.cli.trace_reader import read_requests
from services.rpc.names import Span
from tests.support.cluster import greedy_request
from tests.support.models import tiny_model
from tests.support.patience import slowness
from tests.support.processes import Up

pytestmark = [pytest.mark.process, pytest.mark.long]

NUM_REQUESTS = 24
SPANS_OF_A_REQUEST = {11, 7}
"""Split, and placed whole on the decode worker, as a first one may be."""
DRAIN_S = 10.0
QUEUE_SPANS = 32
"""Much less than the requests make in any of the processes, so that it overflows."""
LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")
NUM_PROCESSES = 3

Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@contextlib.contextmanager
def refusing() -> Iterator[int]:
    """Nobody listens on the port, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextlib.contextmanager
def swallowing() -> Iterator[int]:
    """Connections are made, and then nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        yield silent.getsockname()[1]


def serve(model: Path, folder: Path) -> tuple[Answers, Up, float]:
    """Returns the answers to some requests sent at once, and how long stopping took right after them."""
    folder.mkdir(exist_ok=True)
    with Up(model, folder, "--kv-blocks", "512", "--drain-s", f"{DRAIN_S:g}") as up:
        up.read_until("^ready$")
        with grpc.insecure_channel(up.target()) as channel, ThreadPoolExecutor(4) as clients:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)

            def ask(name: str) -> list[int]:
                prompt = random.Random(name).choices(range(3, 300), k=100)
                answer: inference_pb2.GenerateResponse = stub.Generate(greedy_request(prompt, 8, request_id=name))
                return list(answer.output.token_ids)

            names = [f"request-{n}" for n in range(NUM_REQUESTS)]
            answers = dict(zip(names, clients.map(ask, names), strict=True))
        began_s = time.monotonic()
        up.stop(signal.SIGTERM)
        return answers, up, time.monotonic() - began_s


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The answers without any collector to be found."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            patch.delenv(name)
        answers, _, _ = serve(model, tmp_path_factory.mktemp("undisturbed"))
    return answers


@pytest.mark.parametrize("collector", [refusing, swallowing])
def test_nothing_waits_for_a_collector(
    collector: Callable[[], contextlib.AbstractContextManager[int]],
    undisturbed: Answers,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", str(QUEUE_SPANS))
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    began_s = time.monotonic()
    with collector() as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        answers, up, stopping_s = serve(model, tmp_path)
    assert answers == undisturbed
    assert stopping_s < DRAIN_S * slowness()
    log = up.log.read_text()
    assert "did not end within" not in log, "no process had to be killed"
    assert "Traceback" not in log
    minutes = int((time.monotonic() - began_s) / 60) + 1
    told = [line for line in log.splitlines() if any(logger in line for logger in LOGGERS)]
    assert 0 < len(told) <= NUM_PROCESSES * len(LOGGERS) * minutes, log


def test_the_trace_file_does_not_suffer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written first, and has its own queue."""
    with swallowing() as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        answers, up, _ = serve(model, tmp_path)
    requests = read_requests(str(up.trace_file))
    assert {request.request_id for request in requests} == answers.keys()
    assert {len(request.spans) for request in requests} <= SPANS_OF_A_REQUEST
    assert all(request.named(Span.REQUEST) and request.named(Span.DECODE_RUN) for request in requests)
