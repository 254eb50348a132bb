"""Tests `baton slo` on a scripted router, and on trace files that real tracers wrote."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.cli.main import main
from services.core.errors import ContextLengthExceeded, NoWorker
from services.router.config import RouterConfig
from services.rpc.names import Attr, Event, Span
from services.rpc.telemetry import configure_tracing
from tests.support import ROOT
from tests.support.scripted_control import (
    ScriptedControl,
    failed_timeline,
    live_timeline,
    serving,
    split_timeline,
)
from tests.support.trusted import CLUSTER_TOKEN


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)


async def slo(service: ScriptedControl, *flags: str) -> int:
    async with serving(service) as target:
        return await asyncio.to_thread(main, ["slo", "--target", target, *flags])


def cluster() -> ScriptedControl:
    service = ScriptedControl()
    other = split_timeline(9, ttft_us=1)
    other.model = "other"
    service.set(
        split_timeline(1),
        split_timeline(2, ttft_us=450_000),
        split_timeline(3, ttft_us=900_000, prefill_worker="decode-0"),
        failed_timeline(4, "no_worker"),
        failed_timeline(5, "invalid_parameter"),
        failed_timeline(6, "cancelled"),
        live_timeline(7),
        other,
    )
    return service


async def test_the_table_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert await slo(cluster(), "--model", "tiny") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("  6 requests that have ended; 1 live, not counted")
    # The objective is the router's. Of six, one could never be served and one was cancelled in time.
    rows = [" ".join(line.split()) for line in lines[2:]]
    start = rows.index("first token 500 all 4 50.0 % 25.0 % 450.0 900.0 900.0")
    assert rows[start + 1] == "split 2 100.0 % 50.0 % 120.0 450.0 450.0"
    assert rows[start + 2] == "unsplit 1 0.0 % 0.0 % 900.0 900.0 900.0"


async def test_the_json_of_a_cluster_with_other_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    assert await slo(cluster(), "--json", "--ttft-ms", "1000", "--e2e-ms", "300.5") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_ended"], found["num_live"]) == (7, 1)
    objectives = found["objectives"]
    assert {name: each["target_ms"] for name, each in objectives.items()} == {
        "ttft": 1000,
        "tpot": 50,
        "itl": 200,
        "queue": 100,
        "e2e": 300.5,
    }
    assert objectives["ttft"]["all"] == {
        "num_counted": 5,
        "num_met": 4,
        "num_near": 1,
        "attained": 0.8,
        "near": 0.2,
        "p50_ms": 120.0,
        "p95_ms": 900.0,
        "p99_ms": 900.0,
    }
    assert objectives["e2e"]["all"]["num_met"] == 0
    assert (objectives["queue"]["all"]["num_met"], objectives["queue"]["all"]["p50_ms"]) == (4, 4.0)
    assert objectives["tpot"]["all"]["p50_ms"] == 70.0


async def test_a_cluster_without_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert await slo(ScriptedControl()) == 0
    assert capsys.readouterr().out.endswith("  0 requests that have ended\n")


@pytest.mark.parametrize("flag", ["0", "-1", "nan", "inf", "1e12", "soon"])
def test_an_objective_is_a_time(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slo", "--itl-ms", flag]) == 2
    assert "--itl-ms: invalid number of milliseconds value" in capsys.readouterr().err


def write_traces(path: Path) -> None:
    """Records a split request (120 ms to the first token, then 10 ms each), an unsplit one that was slower, a failure
    of the cluster, a prompt that was too long, and one that goes on."""
    tracer = configure_tracing("baton-router", "router-0", str(path))
    for number, (ttft_ms, decode) in enumerate(((120, "decode-0"), (600, "prefill-0"))):
        root = tracer.start(Span.REQUEST, request_id=f"r{number}", start_s=100.0 + number, server=True)
        root.event(Event.FIRST_TOKEN, 100.0 + number + ttft_ms / 1e3)
        end_s = 100.0 + number + (ttft_ms + 100) / 1e3
        gaps = {Attr.INTER_TOKEN_MAX_MS: 15.0, Attr.FIRST_STEP_MS: 10.0}
        tracer.span(
            Span.DECODE_RUN,
            request_id=f"r{number}",
            start_s=end_s - 0.1,
            end_s=end_s,
            parent=root.traceparent,
            attributes=gaps,
        )
        root.set(
            {
                Attr.REQUEST_MODEL: "tiny",
                Attr.OUTPUT_TOKENS: 11,
                Attr.PREFILL_WORKER: "prefill-0",
                Attr.DECODE_WORKER: decode,
            }
        )
        root.end(end_s)
    for error in (NoWorker("none is ready"), ContextLengthExceeded("text", "too long")):
        root = tracer.start(Span.REQUEST, request_id=error.reason, start_s=103.0, server=True)
        root.fail(error)
        root.end(103.01)
    going_on = tracer.start(Span.REQUEST, request_id="live", start_s=104.0, server=True)
    tracer.span(Span.QUEUE, request_id="live", start_s=104.0, end_s=104.1, parent=going_on.traceparent)
    tracer.shutdown()


def test_a_trace_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "trace.jsonl"
    write_traces(path)
    assert main(["slo", str(path), "--json", "--tpot-ms", "12"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_ended"], found["num_live"]) == (4, 1)
    ttft, tpot, itl = (found["objectives"][name] for name in ("ttft", "tpot", "itl"))
    assert ttft["target_ms"] == RouterConfig.slo_ttft_ms
    assert (ttft["all"]["num_counted"], ttft["all"]["num_met"]) == (3, 1)
    assert (ttft["split"]["num_met"], ttft["unsplit"]["num_counted"], ttft["unsplit"]["num_met"]) == (1, 1, 0)
    assert (tpot["all"]["num_met"], tpot["all"]["num_near"]) == (2, 2)
    assert tpot["all"]["p50_ms"] == pytest.approx(10.0)
    assert itl["all"]["p99_ms"] == pytest.approx(15.0)
    assert main(["slo", str(path), "--model", "none"]) == 2
    assert "no request of the model 'none' in it yet" in capsys.readouterr().err


def test_the_trace_file_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "docs" / "images" / "trace.jsonl"
    assert main(["slo", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any(row[:3] == ["first", "token", f"{RouterConfig.slo_ttft_ms:g}"] for row in rows)
