"""Tests `baton trace` on a file that three real tracers wrote, as router and workers do."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace

import pytest

from services.cli import trace
from services.cli.main import main
from services.cli.trace_reader import read_requests
from services.core.errors import NoWorker
from services.rpc.names import Attr, Event, Span
from services.rpc.telemetry import Tracer, configure_tracing
from services.sim.trace_files import read_trace
from tests.support.full_disk import full_disk


@pytest.fixture
def tracers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tracer]:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    path = str(tmp_path / "trace.jsonl")
    return {who: configure_tracing(f"baton-{who[:-2]}", who, path) for who in ("router-0", "prefill-0", "decode-0")}


def record(tracers: dict[str, Tracer], request_id: str, start_s: float, *, parked_s: float = 0.0) -> str:
    """Records a split request: 120 ms to the first token, the second 20 ms (and the parking) after the prompt's end."""

    def at(ms: float) -> float:
        return start_s + ms / 1000

    router, prefill, decode = tracers["router-0"], tracers["prefill-0"], tracers["decode-0"]
    root = router.start(Span.REQUEST, request_id=request_id, start_s=at(0), server=True)

    def span(tracer: Tracer, name: str, begin: float, end: float, parent: str = "", **more) -> str:
        parent = parent or root.traceparent
        return tracer.span(name, request_id=request_id, start_s=at(begin), end_s=at(end), parent=parent, **more)

    span(router, Span.TOKENIZE, 1, 3)
    span(router, Span.QUEUE, 3, 8)
    span(router, Span.PLACE, 8, 8.5)
    leg = span(router, Span.PREFILL, 8.5, 119)
    span(prefill, Span.PREFILL_WAIT, 9, 12, leg)
    chunks = [(Event.CHUNK, at(50 + 30 * i), {Attr.NUM_TOKENS: 512 * (i + 1)}) for i in range(3)]
    span(prefill, Span.PREFILL_COMPUTE, 12, 117, leg, events=chunks, attributes={Attr.NUM_TOKENS: 1536})
    parked = parked_s * 1000
    late = span(router, Span.DECODE, 20 + parked, 400 + parked)
    begin = 118 if parked else 50
    moved = {
        Attr.TRANSFER_BYTES: 3 << 20,
        Attr.TRANSFER_BLOCKS: 96,
        Attr.TRANSFER_BLOCKS_NOT_MOVED: 24,
        Attr.TRANSFER_TRANSPORT: "shm",
        Attr.TRANSFER_OVERLAPPED_MS: 0.0 if parked else 67.0,
        Attr.TRANSFER_EXPOSED_MS: 4.0,
    }
    span(decode, Span.KV_TRANSFER, begin + parked, 122 + parked, late, attributes=moved)
    span(decode, Span.DECODE_WAIT, 122 + parked, 125 + parked, late)
    steps = {
        Attr.NUM_STEPS: 31,
        Attr.MEAN_BATCH_SIZE: 2.5,
        Attr.FIRST_STEP_MS: 12.0,
        Attr.INTER_TOKEN_P50_MS: 9.0,
        Attr.INTER_TOKEN_P99_MS: 14.0,
        Attr.INTER_TOKEN_MAX_MS: 15.0,
    }
    span(decode, Span.DECODE_RUN, 125 + parked, 398 + parked, late, attributes=steps)
    root.event(Event.FIRST_TOKEN, at(120))
    root.set(
        {
            Attr.REQUEST_MODEL: "tiny",
            Attr.INPUT_TOKENS: 1536,
            Attr.OUTPUT_TOKENS: 32,
            Attr.FINISH_REASONS: ["length"],
            Attr.TTFT_MS: 120.0,
        }
    )
    root.end(at(400 + parked))
    return root.trace_id


def close(tracers: dict[str, Tracer]) -> None:
    for tracer in tracers.values():
        tracer.shutdown()


def show(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["trace", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_waterfall_of_one_request(tracers, tmp_path, capsys):
    trace_id = record(tracers, "req-1", 100.0)
    close(tracers)
    text = show(capsys, tmp_path / "trace.jsonl", "--request", "req-1")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "req-1  tiny  length  1536 prompt tokens  32 output tokens"
    assert trace_id in lines[1]
    tree = [line[:22].rstrip() for line in lines[lines.index("") + 2 :][:11]]
    assert tree == [
        "baton.request",
        "  tokenize",
        "  queue",
        "  place",
        "  prefill",
        "    prefill.wait",
        "    prefill.compute",
        "  decode",
        "    kv.transfer",
        "    decode.wait",
        "    decode.run",
    ]
    transfer = next(line for line in lines if "kv.transfer" in line)
    assert transfer.split()[:4] == ["kv.transfer", "decode-0", "50.0", "72.0"]
    assert transfer.endswith("░█")
    assert "first token after 120.0 ms" in lines
    assert "second token 20.0 ms later" in lines
    assert "KV moved: 3.0 MiB in 96 blocks by shm; 24 more were there" in lines


def test_the_json_of_one_request(tracers, tmp_path, capsys):
    trace_id = record(tracers, "req-1", 100.0)
    close(tracers)
    document = json.loads(show(capsys, tmp_path / "trace.jsonl", "--request", trace_id, "--json"))
    assert document["request_id"] == "req-1"
    assert document["finished"] is True
    assert document["first_token"] == pytest.approx(
        {
            "total_ms": 120,
            "queue_ms": 5,
            "tokenize_ms": 2,
            "prefill_wait_ms": 3,
            "prefill_compute_ms": 105,
            "rest_ms": 5,
        },
        abs=0.01,
    )
    assert document["second_token"] == pytest.approx(
        {
            "total_ms": 20,
            "transfer_overlapped_ms": 67,
            "handoff_wait_ms": 0,
            "transfer_exposed_ms": 4,
            "decode_wait_ms": 3,
            "first_step_ms": 12,
            "rest_ms": 1,
        },
        abs=0.01,
    )
    assert document["transfer"] == {"bytes": 3 << 20, "blocks": 96, "blocks_not_moved": 24, "transport": "shm"}
    assert len(document["spans"]) == 11
    assert {span["attributes"][Attr.REQUEST_ID] for span in document["spans"]} == {"req-1"}


def test_a_parked_handoff_says_that_it_waited(tracers, tmp_path, capsys):
    record(tracers, "req-1", 100.0, parked_s=0.5)
    close(tracers)
    text = show(capsys, tmp_path / "trace.jsonl")
    assert "wait for a worker        501.0 ms" in text
    assert "second token 520.0 ms later" in text


def test_without_an_id_all_are_listed_and_the_latest_is_shown(tracers, tmp_path, capsys):
    for index in range(25):
        record(tracers, f"req-{index}", 100.0 + index)
    close(tracers)
    text = show(capsys, tmp_path / "trace.jsonl")
    assert max(map(len, text.splitlines())) <= 100
    assert "req-5 " in text
    assert "req-4 " not in text
    assert "(5 earlier ones are not listed)" in text
    assert "req-24  tiny" in text
    assert len(json.loads(show(capsys, tmp_path / "trace.jsonl", "--json"))) == 25


@pytest.mark.parametrize("second_s", [200.0, 100.05], ids=["later", "at once"])
def test_an_id_used_again_in_the_same_trace_is_another_request(tracers, tmp_path, capsys, second_s):
    parent = tracers["router-0"].start("client", request_id="", start_s=1.0)
    for start_s in (100.0, second_s):
        root = tracers["router-0"].start(
            Span.REQUEST, request_id="mine", start_s=start_s, parent=parent.traceparent, server=True
        )
        tracers["decode-0"].span(
            Span.DECODE, request_id="mine", start_s=start_s + 0.1, end_s=start_s + 0.2, parent=root.traceparent
        )
        root.end(start_s + 1)
    close(tracers)
    first, second = json.loads(show(capsys, tmp_path / "trace.jsonl", "--json"))
    assert len(first["spans"]) == len(second["spans"]) == 2


def test_failed_and_unfinished_requests_are_shown_as_such(tracers, tmp_path, capsys):
    root = tracers["router-0"].start(Span.REQUEST, request_id="req-failed", start_s=1.0)
    root.fail(NoWorker("no prefill worker became ready"))
    root.end(3.0)
    running = tracers["router-0"].start(Span.REQUEST, request_id="req-running", start_s=2.0)
    tracers["prefill-0"].span(
        Span.PREFILL_WAIT, request_id="req-running", start_s=2.5, end_s=2.6, parent=running.traceparent
    )
    close(tracers)
    path = tmp_path / "trace.jsonl"
    text = show(capsys, path, "--request", "req-failed")
    assert "NO_WORKER" in text
    assert "failed: no prefill worker became ready" in text
    assert "no first token" in text
    text = show(capsys, path, "--request", "req-running")
    assert "unfinished" in text
    assert "prefill.wait" in text


def test_bars_are_ascii_where_the_terminal_is(tracers, tmp_path, capsys, monkeypatch):
    record(tracers, "req-1", 100.0)
    close(tracers)
    monkeypatch.setattr(trace, "prints", lambda characters: False)
    assert show(capsys, tmp_path / "trace.jsonl").isascii()


def test_lines_that_a_full_disk_has_torn_are_left_out(tracers, tmp_path, capsys):
    record(tracers, "req-1", 100.0)
    close(tracers)
    path = tmp_path / "trace.jsonl"
    (first, *others) = path.read_bytes().splitlines(keepends=True)
    torn = first[: len(first) // 2] + "é".encode()[:1]
    path.write_bytes(b"".join([torn + first, *others, torn]))
    assert "first token after" in show(capsys, path)
    assert [request.request_id for request in read_requests(str(path))] == ["req-1"]
    assert len(read_trace(path)) == 1


def test_a_page_that_finds_its_disk_full_says_which_file_it_was(tracers, tmp_path, capsys):
    record(tracers, "req-1", 100.0)
    close(tracers)
    assert main(["trace", str(tmp_path / "trace.jsonl"), "--html", "/dev/full"]) != 0
    assert "--html: the page cannot be written: /dev/full: No space left on device" in capsys.readouterr().err


def test_a_page_that_finds_its_disk_full_leaves_the_one_before(tracers, tmp_path, capsys):
    record(tracers, "req-1", 100.0)
    close(tracers)
    page = tmp_path / "page.html"
    page.write_text("the one before")
    with full_disk():
        assert main(["trace", str(tmp_path / "trace.jsonl"), "--html", str(page)]) != 0
    assert f"--html: the page cannot be written: {page}: " in capsys.readouterr().err
    assert page.read_text() == "the one before"
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "trace.jsonl"}


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "cannot read"),
        ("", [], "no request in it yet"),
        ("not json\n", [], "line 1: not a line of OTLP JSON"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}\n', [], "line 1: not a line of OTLP JSON"),
        (b"\xff\xfe\xff\n", [], "line 1: not a line of OTLP JSON"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, content, arguments, message):
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["trace", str(path), *arguments]) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_an_unknown_request_is_one_line(tracers, tmp_path, capsys):
    record(tracers, "req-1", 100.0)
    close(tracers)
    assert main(["trace", str(tmp_path / "trace.jsonl"), "--request", "req-2"]) != 0
    assert "no 'req-2'; the latest of its 1 are req-1" in capsys.readouterr().err


def test_a_line_still_being_written_is_left_out(tracers, tmp_path, capsys):
    record(tracers, "req-1", 100.0)
    close(tracers)
    with (tmp_path / "trace.jsonl").open("a") as file:
        file.write('{"resourceSpans": [{"sc')
    assert "req-1" in show(capsys, tmp_path / "trace.jsonl")


def test_spans_that_are_due_and_not_there_are_named(tracers, tmp_path):
    record(tracers, "req-1", 100.0)
    close(tracers)
    (whole,) = read_requests(str(tmp_path / "trace.jsonl"))
    workers = {Attr.PREFILL_WORKER: "prefill-0", Attr.DECODE_WORKER: "decode-0"}
    whole = replace(whole, root=replace(whole.root, attributes=whole.root.attributes | workers))
    assert whole.missing() == []
    partly = replace(whole, spans=tuple(span for span in whole.spans if span.instance != "decode-0"))
    assert partly.missing() == [Span.KV_TRANSFER, Span.DECODE_RUN]
    assert replace(partly, root=None).missing() == [], "it runs still"
    unsplit = replace(partly.root, attributes=partly.root.attributes | {Attr.DECODE_WORKER: "prefill-0"})
    assert replace(partly, root=unsplit).missing() == []
