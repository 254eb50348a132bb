"""Tests the page of a trace file: its bars, its one script, and that nothing of a trace file runs in it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import webbrowser
from pathlib import Path

import pytest

from services.cli.main import main
from services.cli.trace_bars import bars_of, readable
from services.cli.trace_page import joined, page
from services.cli.trace_reader import RecordedRequest, SpanEvent, read_requests
from services.rpc.names import Attr, Span
from tests.support import ROOT

TRACE = ROOT / "docs" / "images" / "trace.jsonl"


@pytest.fixture
def request_() -> RecordedRequest:
    (found,) = [each for each in read_requests(str(TRACE)) if each.request_id == "long-document"]
    return found


def data_of(text: str) -> dict:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(data)


def changed(request: RecordedRequest, name: str, **changes: object) -> RecordedRequest:
    """Returns the request with other attributes of one span; None removes one."""
    spans = []
    for span in request.spans:
        if span.name == name:
            attributes = {key: value for key, value in {**span.attributes, **changes}.items() if value is not None}
            span = dataclasses.replace(span, attributes=attributes)
        spans.append(span)
    root = next(span for span in spans if span.name == Span.REQUEST)
    return dataclasses.replace(request, root=root, spans=tuple(spans))


def test_each_span_is_a_bar_with_its_times_and_events(request_: RecordedRequest) -> None:
    bars = bars_of(request_)
    assert [(bar.depth, bar.name) for bar in bars] == [(depth, span.name) for depth, span in request_.tree()]
    by_name = {bar.name: bar for bar in bars}
    assert {name: bar.kind for name, bar in by_name.items() if bar.kind != "router"} == {
        "prefill": "prefill",
        "prefill.wait": "prefill",
        "prefill.compute": "prefill",
        "kv.transfer": "transfer",
        "decode": "decode",
        "decode.wait": "decode",
        "decode.run": "decode",
    }
    root, transfer = by_name["baton.request"], by_name["kv.transfer"]
    assert (root.start_ms, root.outcome) == (0.0, "length")
    assert root.end_ms == pytest.approx(7399.7, abs=0.1)
    assert [event["name"] for event in root.events] == ["first_token"]
    assert transfer.worker == "decode-0"
    assert [event["name"] for event in transfer.events] == ["sealed"]
    assert not any(bar.hidden for bar in bars)
    assert {bar.outcome for bar in bars} == {"length", "done", ""}, "who leaves the queue for a worker has not failed"


def test_a_transfer_that_does_not_say_when_it_was_sealed_is_two_bars(request_: RecordedRequest) -> None:
    spans = [dataclasses.replace(span, events=()) if span.name == Span.KV_TRANSFER else span for span in request_.spans]
    hidden, waited = [
        bar for bar in bars_of(dataclasses.replace(request_, spans=tuple(spans))) if bar.kind == "transfer"
    ]
    (whole,) = [span for span in request_.spans if span.name == Span.KV_TRANSFER]
    assert (hidden.hidden, waited.hidden) == (True, False)
    assert hidden.end_ms == waited.start_ms
    assert hidden.end_ms - hidden.start_ms == pytest.approx(whole.attributes[Attr.TRANSFER_OVERLAPPED_MS])
    assert waited.end_ms - waited.start_ms == pytest.approx(whole.attributes[Attr.TRANSFER_EXPOSED_MS], abs=0.01)


def test_numbers_that_browsers_cannot_read_are_text(request_: RecordedRequest) -> None:
    hostile = changed(request_, Span.REQUEST, **{Attr.INPUT_TOKENS: float("nan"), "huge": (1 << 60) + 1})
    (row,) = data_of(page([hostile], "f"))["requests"]
    assert row["promptTokens"] == "nan"
    assert row["bars"][0]["attributes"]["huge"] == str((1 << 60) + 1)
    assert readable([1, 2.5, "x", None, True]) == [1, 2.5, "x", None, True]


def test_the_policy_allows_one_script_and_one_style_and_nothing_else(request_: RecordedRequest) -> None:
    text = page([request_], "trace.jsonl", "http://jaeger:16686")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in policy.replace("&#x27;", "'").split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    for rule, pattern in (
        ("script-src", r'<script type="module">(.*?)</script>'),
        ("style-src", r"<style>(.*?)</style>"),
    ):
        (inlined,) = re.findall(pattern, text, re.S)
        digest = base64.b64encode(hashlib.sha256(inlined.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert "Copyright" in text, "licences stand with what is copied"
    assert not re.search(r'(src|href)="(?!data:)', text.partition("<pre>")[0])
    assert data_of(text)["requests"][0]["jaeger"] == f"http://jaeger:16686/trace/{request_.trace_id}"


def test_what_a_trace_holds_ends_no_script_and_opens_no_tag(request_: RecordedRequest) -> None:
    hostile = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"
    spans = tuple(
        dataclasses.replace(span, name=hostile, message=hostile, events=(SpanEvent(hostile, span.start_ns, {}),))
        for span in request_.spans
        if span is not request_.root
    )
    made = dataclasses.replace(request_, request_id=hostile, trace_id=hostile, spans=(request_.root, *spans))
    text = page([changed(made, Span.REQUEST, **{Attr.REQUEST_MODEL: hostile})], f"{hostile}\x1b[2J", "http://j")
    assert hostile not in text
    assert "alert(1)>" not in text
    assert text.count("<script") == text.count("</script") == 2
    (row,) = data_of(text)["requests"]
    assert row["id"] == row["model"] == row["bars"][1]["name"] == hostile
    assert row["jaeger"].startswith("http://j/trace/%3C%2Fscript%3E")


def test_only_the_newest_are_on_the_page(request_: RecordedRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.trace_page.MOST_REQUESTS", 2)
    data = data_of(page([dataclasses.replace(request_, request_id=f"r{number}") for number in range(5)], "f"))
    assert ([row["id"] for row in data["requests"]], data["numLeftOut"]) == (["r4", "r3"], 3)


def test_modules_are_joined_as_they_import_one_another() -> None:
    script = joined(
        [
            ("a.js", "var x=1,y=2;export{x as one,y};"),
            ("b.js", 'import { one, y as two } from "./vendor/a.js";\nexport function sum() { return one + two; }\n'),
            ("c.js", 'import { sum } from "../b.js";\nsum();\n'),
        ]
    )
    assert "const { one, y: two } = module0;" in script
    assert "return { one: x, y: y };" in script
    assert "const { sum } = module1;" in script
    for source in (
        'import x from "./a.js";',
        'import { a } from "./unknown.js";',
        "export default 1;",
        "x = '</script>';",
    ):
        with pytest.raises(ValueError, match=r"cannot be inlined|before it is there"):
            joined([("c.js", source)])


def test_html_is_written_and_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["trace", str(TRACE), "--html", str(out), "--request", "greeting"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert [row["id"] for row in data_of(out.read_text())["requests"]] == ["greeting"]
    assert main(["trace", str(TRACE), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "--html: the page cannot be written" in capsys.readouterr().err
    assert main(["trace", str(TRACE), "--json", "--html", str(out)]) == 2
    assert main(["trace", str(TRACE), "--json", "--open"]) == 2


@pytest.mark.parametrize("works", [True, False])
def test_open_writes_a_page_of_this_user_and_opens_it(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or works)
    assert main(["trace", str(TRACE), "--open"]) == 0
    told = capsys.readouterr()
    path = Path(told.out.strip())
    assert opened == [path.as_uri()]
    assert path.stat().st_mode & 0o077 == 0
    assert len(data_of(path.read_text())["requests"]) == 2
    assert ("no browser could be opened" in told.err) != works


def test_open_writes_the_same_file_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, temp = tmp_path / "home", tmp_path / "temp"
    temp.mkdir()
    monkeypatch.setenv("BATON_HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temp))
    monkeypatch.setattr(webbrowser, "open", lambda url: True)
    assert main(["trace", str(TRACE), "--open"]) == 0
    (path,) = home.iterdir()
    path.chmod(0o644)
    assert main(["trace", str(TRACE), "--open", "--request", "greeting"]) == 0
    assert capsys.readouterr().out == f"{path}\n" * 2
    assert list(home.iterdir()) == [path]
    assert path.stat().st_mode & 0o077 == 0, "others do not read it, whatever was there"
    assert [row["id"] for row in data_of(path.read_text())["requests"]] == ["greeting"]
    assert list(temp.iterdir()) == []


def test_open_takes_a_temporary_file_where_the_state_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(temp))
    monkeypatch.setattr(webbrowser, "open", lambda url: True)
    assert main(["trace", str(TRACE), "--open"]) == 0
    (path,) = temp.iterdir()
    assert capsys.readouterr().out == f"{path}\n"
    assert path.stat().st_mode & 0o077 == 0
    assert len(data_of(path.read_text())["requests"]) == 2
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    assert main(["trace", str(TRACE), "--open"]) == 2
    assert "the page cannot be written" in capsys.readouterr().err


def test_links_to_jaeger(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    by_id = {each.request_id: each.trace_id for each in read_requests(str(TRACE))}
    one, other = by_id["greeting"], by_id["long-document"]
    both = ["trace", str(TRACE), "--request", "greeting", "--request", "long-document"]
    assert main([*both, "--jaeger-url", "http://j:16686/"]) == 0
    text = capsys.readouterr().out
    assert text.count("first token after") == 2
    assert text.splitlines()[-4:] == [
        f"Jaeger    http://j:16686/trace/{one}",
        f"Jaeger    http://j:16686/trace/{other}",
        f"compared  http://j:16686/trace/{one}...{other}",
        "search    http://j:16686/search?service=baton-router",
    ]
    monkeypatch.setenv("BATON_JAEGER_URL", "http://other")
    assert main(["trace", str(TRACE)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"Jaeger    http://other/trace/{other}",
        "search    http://other/search?service=baton-router",
    ]
    monkeypatch.setenv("BATON_JAEGER_URL", "javascript:alert(1)")
    assert main(["trace", str(TRACE)]) == 2
    assert "--jaeger-url: 'javascript:alert(1)' must be an http or https address" in capsys.readouterr().err
    monkeypatch.delenv("BATON_JAEGER_URL")
    assert main([*both, "--json"]) == 0
    assert [each["request_id"] for each in json.loads(capsys.readouterr().out)] == ["greeting", "long-document"]
