"""Tests that another project's back end for OTLP, arize-phoenix, keeps a request's spans whole: it is sent them by real
processes, and asked by its own API.

It is skipped without one: `arize-phoenix` is looked for on the PATH, or under the path in ARIZE_PHOENIX. It needs some
three hundred packages, so it has an environment of its own (`pip install arize-phoenix`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2_grpc
from benchmarks.ports import free_ports
from services.cli.trace_reader import SpanRecord, read_requests
from services.rpc.names import Attr, Span
from tests.support.cluster import greedy_request
from tests.support.models import tiny_model
from tests.support.patience import Patience
from tests.support.processes import Up
from tests.support.span_tree import PARENTS

pytestmark = pytest.mark.process

START_S = 120.0


@dataclass(frozen=True)
class Phoenix:
    http: str
    grpc: str

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.http}{path}", timeout=30) as answer:
            return json.load(answer)

    def spans(self, request_id: str) -> dict[str, dict[str, Any]]:
        """Returns what it keeps of the request, as OTLP's spans, by their ids."""
        found = self.get("/v1/projects/default/spans/otlpv1?limit=1000")["data"]
        return {each["span_id"]: each for each in found if attributes(each).get(Attr.REQUEST_ID) == request_id}


def attributes(owner: dict[str, Any]) -> dict[str, Any]:
    return {pair["key"]: value(pair["value"]) for pair in owner["attributes"]}


def value(held: dict[str, Any]) -> Any:
    ((_, inner),) = [(kind, inner) for kind, inner in held.items() if inner is not None]
    return [value(each) for each in inner["values"]] if isinstance(inner, dict) else inner


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    program = os.environ.get("ARIZE_PHOENIX") or shutil.which("arize-phoenix")
    if program is None:
        pytest.skip("arize-phoenix is not installed")
    folder = tmp_path_factory.mktemp("phoenix")
    http, otlp = free_ports(2)
    settings = {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(otlp),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    # Its environment is not this one: what Python is told of Baton's packages is not for it.
    clean = {name: each for name, each in os.environ.items() if not name.startswith(("PYTHON", "OTEL_", "VIRTUAL_ENV"))}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([program, "serve"], env={**clean, **settings}, stdout=log, stderr=log, cwd=folder)
    try:
        there = Phoenix(f"http://127.0.0.1:{http}", f"http://127.0.0.1:{otlp}")
        await_healthy(there, process, folder / "log")
        yield there
    finally:
        process.terminate()
        process.wait(30)


def await_healthy(phoenix: Phoenix, process: subprocess.Popen[bytes], log: Path) -> None:
    patience = Patience(START_S)
    while True:
        try:
            phoenix.get("/v1/projects")
            return
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None, log.read_text()[-2000:]
            assert not patience.is_over(), log.read_text()[-2000:]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_requests_spans_are_there_whole(phoenix: Phoenix, protocol: str, tmp_path: Path) -> None:
    settings = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": phoenix.grpc if protocol == "grpc" else phoenix.http,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with Up(tiny_model("llama", tmp_path), tmp_path, **settings) as up:
        up.read_until("^ready$")
        request_id = split_request(up.target(), protocol.partition("/")[0])
        up.stop(signal.SIGTERM)
    (request,) = [each for each in read_requests(str(up.trace_file)) if each.request_id == request_id]
    assert {span.name for span in request.spans} == {Span.REQUEST, *PARENTS}
    kept = wait_for(phoenix, request_id, len(request.spans))
    for span in request.spans:
        check(kept[span.span_id], span)


def split_request(target: str, prefix: str) -> str:
    """Returns the id of a request that two workers shared. The first may run whole on the decode worker, while the pair
    is not proven yet."""
    with grpc.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for number in range(20):
            request_id = f"{prefix}-{number}"
            prompt = [3 + (7 * number + index) % 300 for index in range(600)]
            answer = stub.Generate(greedy_request(prompt, 20, request_id=request_id), timeout=100)
            if answer.completion.workers.prefill != answer.completion.workers.decode:
                return request_id
    raise AssertionError("no request was split")


def wait_for(phoenix: Phoenix, request_id: str, count: int) -> dict[str, dict[str, Any]]:
    patience = Patience(30.0)
    while len(found := phoenix.spans(request_id)) < count:
        assert not patience.is_over(), f"of {count} spans there are {sorted(each['name'] for each in found.values())}"
    assert len(found) == count
    return found


def check(kept: dict[str, Any], span: SpanRecord) -> None:
    """Asserts that the back end has of the span what the trace file has."""
    assert (kept["name"], kept["trace_id"]) == (span.name, span.trace_id)
    assert (kept.get("parent_span_id") or "") == span.parent_id
    # It keeps microseconds.
    assert int(kept["start_time_unix_nano"]) == pytest.approx(span.start_ns, abs=1000)
    assert int(kept["end_time_unix_nano"]) == pytest.approx(span.end_ns, abs=1000)
    has = attributes(kept)
    for name, wanted in span.attributes.items():
        assert has.get(name) == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), name
    assert [event["name"] for event in kept["events"] or ()] == [event.name for event in span.events]
