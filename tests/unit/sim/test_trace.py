"""Tests traces: all formats, bad lines, scaling, and prompts made of them."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.answers import Answer, Objective
from benchmarks.replay import Level, ReplaySettings
from services.sim.trace import TracedRequest, scaled, synthetic_trace
from services.sim.trace_files import read_trace

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


def test_lines_may_say_who_asked(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 5, "output_length": 6, "caller": "a", "session": "s", "priority": 3}
    path = tmp_path / "who.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (request,) = read_trace(path)
    assert (request.caller, request.session, request.priority) == ("a", "s", 3)
    path = tmp_path / "who.csv"
    path.write_text(f"{HEAD},Caller,Session,Priority\n{GOOD},a,s,3\n{GOOD},,,\n")
    request, other = read_trace(path)
    assert (request.caller, request.session, request.priority) == ("a", "s", 3)
    assert (other.caller, other.session, other.priority) == ("", "", 0)
    (small,) = scaled([request], length=0.5, rate=1.0, seconds=1.0, most_tokens=2048)
    assert (small.caller, small.session, small.priority, small.prompt_tokens) == ("a", "s", 3, 187)


def test_conversations_become_requests_that_begin_alike(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.jsonl"
    path.write_text(f"{TALK}\n{TALK.replace('t1', 't2')}\n")
    trace = read_trace(path)
    assert trace == read_trace(path), "the same each time"
    assert [request.at_s for request in trace] == sorted(request.at_s for request in trace)
    first, second = (request for request in trace if request.session == "t1")
    assert (first.prompt_tokens, first.output_tokens) == (100, 25)
    assert (second.prompt_tokens, second.output_tokens) == (135, 2)
    assert second.at_s - first.at_s > 25 * 0.05
    assert second.block_ids[:6] == first.block_ids
    assert second.part_names()[:6] == first.part_names()


def test_what_baton_has_recorded_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    later = root(9.0, 10, **{"gen_ai.usage.output_tokens": 2, "gen_ai.conversation.id": "c", "baton.priority": 7})
    failed, vague = root(7.5, 50, **{"gen_ai.request.max_tokens": 8}), root(8.0, 50)
    lines = [spans(later, span("queue", 1.0)), spans(failed, vague), SPANS]
    path.write_text("\n".join(lines) + "\n" + SPANS[:50])  # one is being written
    trace = read_trace(path)
    assert [(each.at_s, each.prompt_tokens, each.output_tokens) for each in trace] == [
        (0.0, 374, 44),
        (2.5, 50, 8),
        (4.0, 10, 2),
    ]
    assert (trace[-1].session, trace[-1].priority) == ("c", 7)


HEAD, GOOD = AZURE.splitlines()[:2]
TALK = json.dumps(
    {
        "id": "t1",
        "conversations": [
            {"from": "human", "value": "x" * 400},
            {"from": "gpt", "value": "y" * 100},
            {"from": "human", "value": "z" * 40},
            {"from": "gpt", "value": "w" * 8},
        ],
    }
)


def span(name: str, start_s: float, **attributes: int | str) -> dict[str, object]:
    return {
        "name": name,
        "startTimeUnixNano": str(int(start_s * 1e9)),
        "attributes": [
            {"key": key, "value": {"intValue" if isinstance(value, int) else "stringValue": str(value)}}
            for key, value in attributes.items()
        ],
    }


def spans(*of: dict[str, object]) -> str:
    return json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": list(of)}]}]})


def root(start_s: float, prompt: int, **more: int | str) -> dict[str, object]:
    return span("baton.request", start_s, **{"gen_ai.usage.input_tokens": prompt, **more})


SPANS = spans(root(5.0, 374, **{"gen_ai.usage.output_tokens": 44}))
ROW = '{"timestamp": 1, "input_length": 5, "output_length": 6}'


@pytest.mark.parametrize(
    ("name", "lines", "reason"),
    [
        ("a.csv", [HEAD, GOOD, "2023-11-16 18:15:40.0000000,1,1"], ":3: it arrives before the one above it"),
        ("a.csv", [HEAD, GOOD, GOOD.replace("374", "-374")], ":3: the prompt has -374 tokens"),
        ("a.csv", [HEAD, GOOD.replace("44", "1" + "0" * 30)], ":2: the output has"),
        ("a.csv", [HEAD, GOOD, "2023-11-16 18:15:5"], ":3: Invalid isoformat string"),
        ("a.csv", [HEAD, GOOD, "2023-11-16 18:16:50.9951690,396"], ":3: 'GeneratedTokens' is missing"),
        ("b.jsonl", [ROW, ROW[:20]], ":2: no JSON from column 21 on: "),
        ("b.jsonl", [ROW, "[]"], ":2: is no object"),
        ("b.jsonl", [ROW, '{"timestamp": 2, "input_length": 5}'], ":2: 'output_length' is missing"),
        ("b.jsonl", [ROW, ROW.replace("1,", "NaN,", 1)], ":2: it arrives at nan"),
        ("b.jsonl", [ROW, ROW.replace("1,", '"x",', 1)], ":2: makes no sense"),
        ("b.jsonl", [ROW, ROW.replace("1,", "1e300,", 1)], ":2: it arrives at 1e+297"),
        ("b.jsonl", [ROW, ROW.replace("1,", "1e13,", 1)], ":2: it arrives 1e+10 s from the first"),
        ("a.csv", [HEAD, GOOD, "2123-11-16 18:16:50.0000000,1,1"], ":3: it arrives 3.16e+09 s from the first"),
        ("b.jsonl", [ROW, ROW.replace("1,", "0,", 1)], ":2: it arrives before the one above it"),
        ("b.jsonl", [ROW, ROW[:-1] + ', "hash_ids": [1e300]}'], ":2: "),
        ("b.jsonl", [ROW, "[" * 100_000], ":2: "),
        ("a.csv", [HEAD, GOOD, "2023-11-16 18:16:50.9951690," + "1" * 200_000 + ",2"], ":3: field larger"),
        ("c.jsonl", [TALK, '{"conversations": [{"from": "human"}]}'], ":2: 'human' has said NoneType, not text"),
        ("c.jsonl", [TALK, '{"conversations": 5}'], ":2: "),
        ("c.jsonl", [TALK, TALK[:30]], ":2: "),
        ("d.jsonl", [SPANS, '{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}'], ":2: 'name' is missing"),
        ("d.jsonl", [SPANS, SPANS[:90]], ":2: "),
        ("d.jsonl", [SPANS, SPANS.replace('"374"', '"-1"')], ":2: the prompt has -1 tokens"),
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
