"""Tests what the lines of the usage log and of the request log say."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from services.router.telemetry.json_lines import JsonLines
from services.router.telemetry.request_log import RequestDetails, RequestLog
from services.router.telemetry.timelines import Timeline, TimelineStage, TokenTimes
from services.router.telemetry.usage import RequestUsage, UsageLog
from services.router.tenants.tenant import TokenUsage

USAGE = RequestUsage("acme", "m", "r", TokenUsage(10, 4, 3), 0.5, "stop")
CHARGED = {
    "id": "00000000000000ab-1",
    "time": "1970-01-01T00:00:00.000+00:00",
    "tenant": "acme",
    "model": "m",
    "request_id": "r",
    "prompt_tokens": 10,
    "cached_tokens": 4,
    "output_tokens": 3,
    "cost": 0.5,
    "outcome": "stop",
}

Logged = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def lines(tmp_path: pathlib.Path) -> JsonLines:
    lines = JsonLines(
        "--request-log",
        str(tmp_path / "log.jsonl"),
        0xAB,
        most_bytes=1 << 20,
        most_files=2,
        dropped=lambda number: None,
        wall_s=lambda: 0.0,
    )
    lines.start()
    return lines


def read(lines: JsonLines, path: pathlib.Path) -> dict[str, Any]:
    """Closes the log, and returns its only line."""
    lines.close()
    (line,) = (path / "log.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_of_the_usage_log_says_what_was_charged(lines: JsonLines, tmp_path: pathlib.Path) -> None:
    UsageLog(lines).ended(USAGE)
    assert read(lines, tmp_path) == CHARGED


def test_a_line_of_the_request_log_says_where_a_request_was_and_how_long(
    lines: JsonLines, tmp_path: pathlib.Path
) -> None:
    times = TokenTimes()
    for now in (10.5, 10.6, 10.9):
        times.add(1, now)
    timeline = Timeline(1, "acme/r", "m", 10.0, times, priority=7, trace_id="ab12", max_tokens=16)
    timeline.stage_ended(TimelineStage("queue", 10.0, 10.1))
    timeline.leg_sent("prefill", "p-0", 1, 1, 10.1)
    timeline.stage_ended(TimelineStage("queue", 10.2, 10.4, attempt=2))
    timeline.leg_sent("prefill", "p-1", 2, 2, 10.4)
    timeline.leg_sent("decode", "d-0", 3, 2, 10.4)
    RequestLog(lines, 10).ended(
        USAGE,
        RequestDetails(
            "http", is_stream=True, duration_s=1.0, timeline=timeline, failure="no", prompt=[1, 2], answer="x\n\ud800"
        ),
    )
    assert read(lines, tmp_path) == CHARGED | {
        "front": "http",
        "stream": True,
        "trace_id": "ab12",
        "priority": 7,
        "max_tokens": 16,
        "prefill_worker": "p-1",
        "decode_worker": "d-0",
        "retries": 1,
        "queue_s": 0.3,
        "ttft_s": 0.5,
        "itl_mean_s": 0.2,
        "itl_max_s": 0.3,
        "duration_s": 1.0,
        "error": "no",
        "prompt": [1, 2],
        "answer": "x\n\ud800",
    }


def test_what_did_not_happen_is_null_and_texts_that_may_not_be_shown_are_left_out(
    lines: JsonLines, tmp_path: pathlib.Path
) -> None:
    timeline = Timeline(1, "acme/r", "m", 10.0, TokenTimes())
    RequestLog(lines, 10).ended(USAGE, RequestDetails("grpc", is_stream=False, timeline=timeline))
    found = read(lines, tmp_path)
    nothing = ("trace_id", "max_tokens", "prefill_worker", "decode_worker", "queue_s", "ttft_s", "duration_s")
    assert all(found[name] is None for name in (*nothing, "itl_mean_s", "itl_max_s"))
    assert not {"error", "prompt", "answer"} & found.keys()


@pytest.mark.parametrize("text", ["x" * 65_536, "\N{GRINNING FACE}" * 65_536], ids=["narrow", "wide"])
@pytest.mark.parametrize("shape", [str, list, dict])
def test_texts_count_for_the_bytes_that_wait(
    monkeypatch: pytest.MonkeyPatch, lines: JsonLines, text: str, shape: type
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(lines, "put", lambda fields, num_text_bytes: counted.append(num_text_bytes))
    prompt: Any = {str: text, list: list(range(16_384)), dict: [{"role": "user", "content": text}]}[shape]
    RequestLog(lines, 65_536).ended(USAGE, RequestDetails("grpc", prompt=prompt, answer=text))
    least = 65_536 * (1 if text[0] == "x" else 4)
    assert least <= counted[0] <= 4 * least + 600_000
    lines.close()
