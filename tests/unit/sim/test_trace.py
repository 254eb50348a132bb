"""Tests traces: both formats, bad lines, scaling, and prompts made of them."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.answers import Answer, Objective
from benchmarks.replay import Level, ReplaySettings
from services.sim.trace import TracedRequest, read_trace, scaled, synthetic_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,879,55
"""


def test_azure_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "conversations.csv"
    path.write_text(AZURE)
    trace = read_trace(path)
    assert [(request.prompt_tokens, request.output_tokens) for request in trace] == [(374, 44), (396, 109), (879, 55)]
    assert [request.at_s for request in trace] == pytest.approx([0, 4.314579, 60], abs=1e-5)


def test_mooncake_is_read_with_its_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]},
        {"timestamp": 3500, "input_length": 700, "output_length": 4, "hash_ids": [0, 9]},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_trace(path)
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.block_ids) == (0, 1100, 6, (0, 1, 2))
    assert second.at_s == 2.5
    ours, theirs = first.prompt("seed"), second.prompt("seed")
    assert (len(ours), len(theirs)) == (1100, 700)
    assert ours[:512] == theirs[:512]
    assert ours[512:700] != theirs[512:]
    assert ours[:512] != first.prompt("another seed")[:512]


HEAD, GOOD = AZURE.splitlines()[:2]
ROW = '{"timestamp": 1, "input_length": 5, "output_length": 6}'


@pytest.mark.parametrize(
    ("name", "lines", "reason"),
    [
        ("a.csv", [HEAD, GOOD, "2023-11-16 18:15:40.0000000,1,1"], ":3: it arrives before the one above it"),
        ("a.csv", [HEAD, GOOD, GOOD.replace("374", "-374")], ":3: the prompt has -374 tokens"),
        ("a.csv", [HEAD, GOOD.replace("44", "1" + "0" * 30)], ":2: the output has"),
        ("a.csv", [HEAD, GOOD, "2023-11-16 18:15:5"], ":3: "),
        ("a.csv", [HEAD, GOOD, "2023-11-16 18:16:50.9951690,396"], ":3: "),
        ("b.jsonl", [ROW, ROW[:20]], ":2: "),
        ("b.jsonl", [ROW, "[]"], ":2: is no object"),
        ("b.jsonl", [ROW, '{"timestamp": 2, "input_length": 5}'], ":2: 'output_length' is missing"),
        ("b.jsonl", [ROW, ROW.replace("1,", "NaN,", 1)], ":2: it arrives at nan"),
        ("b.jsonl", [ROW, ROW.replace("1,", '"x",', 1)], ":2: makes no sense"),
        ("b.jsonl", [ROW, ROW.replace("1,", "0,", 1)], ":2: it arrives before the one above it"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, lines: list[str], reason: str) -> None:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}{reason}")):
        read_trace(path)


@pytest.mark.parametrize(("name", "content"), [("a.csv", "when,what\n1,2\n"), ("b.csv", ""), ("c.jsonl", "")])
def test_another_file_is_told_apart(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=name):
        read_trace(path)


def test_scaling_changes_lengths_and_rate() -> None:
    trace = [TracedRequest(float(second), 400, 100) for second in range(100)]
    requests = scaled(trace, length=0.25, rate=2.0, seconds=10.0, most_tokens=2048)
    assert len(requests) == 20
    assert [request.at_s for request in requests[:3]] == [0, 0.5, 1.0]
    assert {(request.prompt_tokens, request.output_tokens) for request in requests} == {(100, 25)}


def test_the_start_of_a_trace_can_be_left_out() -> None:
    trace = [TracedRequest(float(second), 400 + second, 100) for second in range(100)]
    requests = scaled(trace, length=1.0, rate=2.0, seconds=2.0, most_tokens=2048, skip_s=10.0)
    assert [(request.at_s, request.prompt_tokens) for request in requests] == [
        (0, 410),
        (0.5, 411),
        (1, 412),
        (1.5, 413),
    ]


def test_scaled_requests_have_tokens_and_keep_the_limit() -> None:
    trace = [TracedRequest(0.0, 3, 1), TracedRequest(0.0, 9000, 100), TracedRequest(0.0, 10, 9000)]
    short, long, talkative = scaled(trace, length=0.1, rate=1.0, seconds=1.0, most_tokens=500)
    assert (short.prompt_tokens, short.output_tokens) == (1, 1)
    assert (long.prompt_tokens, long.output_tokens) == (490, 10)
    assert (talkative.prompt_tokens, talkative.output_tokens) == (1, 250)


def test_blocks_shrink_with_their_prompts() -> None:
    trace = [TracedRequest(0.0, 1024, 8, (1, 2)), TracedRequest(0.0, 1024, 8, (1, 3))]
    one, other = scaled(trace, length=0.25, rate=1.0, seconds=1.0, most_tokens=2048)
    assert len(one.prompt(0)) == 256
    assert one.prompt(0)[:128] == other.prompt(0)[:128]
    assert one.prompt(0)[128:] != other.prompt(0)[128:]


def test_a_made_up_trace_is_the_same_each_time_and_has_the_lengths_it_says() -> None:
    trace = synthetic_trace(4000)
    assert trace == synthetic_trace(4000)
    assert statistics.median(request.prompt_tokens for request in trace) == pytest.approx(1020, rel=0.05)
    assert statistics.median(request.output_tokens for request in trace) == pytest.approx(129, rel=0.05)
    assert sorted(request.prompt_tokens for request in trace)[3960] == pytest.approx(4142, rel=0.1)
    assert trace[-1].at_s == pytest.approx(4000, rel=0.05)


def test_settings_read_the_trace_that_they_name(tmp_path: Path) -> None:
    path = tmp_path / "conversations.csv"
    path.write_text(AZURE)
    settings = ReplaySettings(trace=str(path), length_scale=0.5, replay_s=30.0)
    assert [request.prompt_tokens for request in settings.requests(1.0)] == [187, 198]
    assert len(settings.requests(4.0)) == 3


def test_a_level_counts_what_failed_and_times_the_rest() -> None:
    answers = (Answer(0.0, [1.0, 1.1, 1.4]), Answer(0.0, [3.0]), Answer(0.0, refused="RESOURCE_EXHAUSTED"))
    level = Level(answers, seconds=2.0)
    assert level.num_failed == 1
    assert level.output_tok_s == 2.0
    assert (level.ttft_ms(50), level.tpot_ms(50)) == (pytest.approx(2000), pytest.approx(200))
    assert level.itl_ms(100) == pytest.approx(300)
    assert level.goodput(Objective(2000, 250)) == 0.5
    assert level.good_percent(Objective(5000, 250)) == pytest.approx(200 / 3)
