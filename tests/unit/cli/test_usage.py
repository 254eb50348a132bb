"""Tests `baton usage`: its sums have each entry once, whatever is doubled, torn or out of order."""

from __future__ import annotations

import json
import math
import pathlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.main import main
from services.cli.usage import UsageSums

entries = st.lists(
    st.fixed_dictionaries(
        {
            "tenant": st.sampled_from(["", "acme", "other"]),
            "model": st.sampled_from(["", "m"]),
            "prompt_tokens": st.integers(0, 1000),
            "cached_tokens": st.integers(0, 1000),
            "output_tokens": st.integers(0, 1000),
            "cost": st.floats(0, 1000),
            "outcome": st.sampled_from(["stop", "quota_exceeded"]),
        }
    ),
    max_size=20,
)


def line(number: int, incarnation: int = 1, **fields: Any) -> bytes:
    entry = {
        "id": f"{incarnation:016x}-{number}",
        "time": "2026-11-27T03:00:00.000+00:00",
        "tenant": "acme",
        "model": "m",
        "request_id": "r",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 3,
        "cost": 0.1,
        "outcome": "stop",
    }
    return json.dumps(entry | fields).encode() + b"\n"


@given(found=entries, doubled=st.lists(st.integers(0, 19)), order=st.randoms(), cut=st.integers(2, 30))
def test_each_entry_counts_once(
    found: list[dict[str, Any]], doubled: list[int], order: random.Random, cut: int
) -> None:
    lines = [line(number, number % 2, **entry) for number, entry in enumerate(found)]
    again = [lines[number] for number in doubled if number < len(lines)]
    shuffled = [*lines, *again]
    order.shuffle(shuffled)
    sums = UsageSums()
    sums.add([*shuffled, line(10**6)[:-cut]])
    assert (sums.num_doubled, sums.num_unreadable) == (len(again), 1)
    for key, of in sums.sums.items():
        ours = [entry for entry in found if (entry["tenant"], entry["model"]) == key]
        assert of.outcomes.total() == len(ours)
        assert float(of.cost) == pytest.approx(math.fsum(entry["cost"] for entry in ours))
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            assert of.num_tokens[name] == sum(entry[name] for entry in ours)
    assert set(sums.sums) == {(entry["tenant"], entry["model"]) for entry in found}


@pytest.mark.parametrize(
    "broken",
    [b"{}", b"[]", b"1", b"\xff", b'"a"', line(1, cost="NaN"), line(1, time="never"), line(1, id="1"), line(1, id=7)],
)
def test_what_is_no_entry_is_left_out(broken: bytes) -> None:
    sums = UsageSums()
    sums.add([broken, line(2), b"\n"])
    assert sums.num_unreadable == 1
    assert sums.sums[("acme", "m")].outcomes == {"stop": 1}


@pytest.fixture
def files(tmp_path: pathlib.Path) -> list[str]:
    older, newer = tmp_path / "usage.jsonl.1", tmp_path / "usage.jsonl"
    refused = {"model": "", "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "cost": 0.0}
    older.write_bytes(line(1) + line(2, outcome="length") + line(3, outcome="quota_exceeded", **refused))
    newer.write_bytes(line(2) + line(4, tenant="shop", time="2026-11-28T00:00:00+00:00") + b'{"id": "00')
    return [str(newer), str(older)]


def run(*argv: str) -> int:
    return main(["usage", *argv])


def test_as_a_table(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*files) == 0
    told = capsys.readouterr()
    assert [row.split() for row in told.out.splitlines()] == [
        ["tenant", "model", "requests", "prompt", "cached", "output", "cost", "outcomes"],
        ["acme", "-", "1", "0", "0", "0", "0", "quota_exceeded", "1"],
        ["acme", "m", "2", "20", "8", "6", "0.2", "stop", "2"],
        ["shop", "m", "1", "10", "4", "3", "0.1", "stop", "1"],
    ]
    assert told.err == "1 lines are no entries and were left out, as torn ones are\n"


def test_as_json_of_one_tenant_since(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--tenant", "shop", *files) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["doubled"], told["unreadable"]) == (1, 1)
    (entry,) = told["usage"]
    assert entry == {
        "tenant": "shop",
        "model": "m",
        "requests": 1,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 3,
        "cost": 0.1,
        "outcomes": {"stop": 1},
    }
    assert run("--json", "--since", "2026-11-28", *files) == 0
    assert [each["tenant"] for each in json.loads(capsys.readouterr().out)["usage"]] == ["shop"]
    assert run("--since", "2026-11-29", *files) == 0
    assert capsys.readouterr().out == "no requests\n"


def test_what_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("/nowhere/usage.jsonl") == 2
    assert "/nowhere/usage.jsonl: No such file or directory" in capsys.readouterr().err
    assert run("--since", "yesterday", "x") == 2
    assert "--since" in capsys.readouterr().err
