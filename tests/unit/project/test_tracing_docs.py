"""docs/tracing.md and README's picture show what the programs say of a real trace file, by the names there are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from services.cli.trace_reader import read_requests
from services.rpc.names import Attr, Event, Span
from tests.support.processes import BATON, PYTHON_PATH, ROOT

pytestmark = pytest.mark.process

DOCUMENT = (ROOT / "docs" / "tracing.md").read_text()
TRACE, PICTURE = ROOT / "docs" / "images" / "trace.jsonl", ROOT / "docs" / "images" / "trace.svg"
SVG = "{http://www.w3.org/2000/svg}"


def strings(names: type) -> set[str]:
    return {value for name, value in vars(names).items() if name.isupper()}


def run(*command: str | Path) -> str:
    environment = {**os.environ, "TZ": "UTC", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": PYTHON_PATH}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("block", re.findall(r"```console\n\$ baton (.*?)```", DOCUMENT, re.S))
def test_what_is_shown_is_what_the_commands_print(block: str) -> None:
    command, _, shown = block.partition("\n")
    assert run(*BATON, *command.split()) == shown


def test_every_name_is_explained_and_no_other() -> None:
    named = set(re.findall(r"`([a-z0-9_.]+)`", DOCUMENT))
    assert strings(Span) | strings(Event) | strings(Attr) <= named
    ours = {name for name in named if re.match(r"(baton|gen_ai)\.\w", name)}
    assert ours <= strings(Span) | strings(Attr)


def test_the_picture_is_drawn_from_the_file(tmp_path: Path) -> None:
    """The same picture is drawn again by the command that the page names."""
    (command,) = re.findall(r"`python (scripts/render_trace\.py .*?)`", DOCUMENT, re.S)
    script, trace, _, *flags = command.split()
    again = tmp_path / "again.svg"
    run(sys.executable, script, trace, again, *flags)
    assert again.read_text() == PICTURE.read_text()


def test_the_picture_shows_every_span_where_it_was() -> None:
    assert PICTURE.stat().st_size < 100_000
    root = ElementTree.fromstring(PICTURE.read_text())
    (request,) = [one for one in read_requests(str(TRACE)) if one.request_id == "long-document"]
    rows = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    assert [row.find(f"{SVG}text").text for row in rows] == [span.name for _, span in request.tree()]
    left = [float(row.find(f"{SVG}rect").get("x")) for row in rows]
    starts = [span.start_ns - request.start_ns for _, span in request.tree()]
    ends = [span.end_ns - request.start_ns for _, span in request.tree()]
    scale = (max(left) - left[0]) / max(starts)
    for row, x, start, end in zip(rows, left, starts, ends, strict=True):
        assert x == pytest.approx(left[0] + start * scale, abs=0.2)
        width = sum(float(bar.get("width")) for bar in row.findall(f"{SVG}rect")[:1])
        assert width == pytest.approx((end - start) * scale, abs=2.6), "a very short one is drawn a little longer"
    kinds = {bar.get("class") for bar in root.iter(f"{SVG}rect")}
    assert {"router", "prefill", "decode", "transfer"} <= kinds
    # Nothing is fetched and nothing runs: pages refuse such pictures.
    assert not re.search(r"<script|href|@import|url\((?!#)", PICTURE.read_text())


def test_the_transfer_in_the_picture_overlaps() -> None:
    (request,) = [one for one in read_requests(str(TRACE)) if one.request_id == "long-document"]
    (transfer,) = request.named(Span.KV_TRANSFER)
    (compute,) = request.named(Span.PREFILL_COMPUTE)
    assert transfer.attributes[Attr.TRANSFER_BYTES] > 1 << 20
    assert transfer.start_ns < compute.end_ns < transfer.end_ns
    assert transfer.attributes[Attr.TRANSFER_EXPOSED_MS] < transfer.attributes[Attr.TRANSFER_OVERLAPPED_MS]


def check_value(value: dict[str, Any]) -> None:
    ((kind, held),) = value.items()
    if kind == "arrayValue":
        for item in held.get("values", ()):
            check_value(item)
        return
    wanted = {"stringValue": str, "intValue": str, "boolValue": bool, "doubleValue": (int, float)}
    assert isinstance(held, wanted[kind]), value
    assert kind != "intValue" or re.fullmatch(r"-?\d+", held)


def check_attributes(owner: dict[str, Any]) -> None:
    for pair in owner.get("attributes", ()):
        assert pair.keys() == {"key", "value"}
        check_value(pair["value"])


def test_the_file_is_otlp_json_to_the_letter() -> None:
    """The demands are those of Jaeger's upload (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding) and
    are met."""
    lines = TRACE.read_text().splitlines()
    resources = [resource for line in lines for resource in json.loads(line)["resourceSpans"]]
    assert len(lines) > 2, "each line stands for itself"
    for resource in resources:
        check_attributes(resource["resource"])
        for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            assert re.fullmatch(r"[0-9a-f]{32}", span["traceId"])
            assert re.fullmatch(r"[0-9a-f]{16}", span["spanId"])
            assert re.fullmatch(r"([0-9a-f]{16})?", span.get("parentSpanId", ""))
            assert type(span["kind"]) is int
            assert type(span.get("status", {}).get("code", 0)) is int
            for owner, names in (
                (span, ("startTimeUnixNano", "endTimeUnixNano")),
                *((e, ("timeUnixNano",)) for e in span.get("events", ())),
            ):
                assert all(re.fullmatch(r"\d{19}", owner[name]) for name in names)
                check_attributes(owner)
    services = {
        pair["value"]["stringValue"]
        for r in resources
        for pair in r["resource"]["attributes"]
        if pair["key"] == "service.name"
    }
    assert services == {"baton-router", "baton-prefill", "baton-decode"}
