"""Tests that traces and profiles of other forms are read, or refused by line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from services.core.errors import ConfigError
from services.sim.profile import WorkerProfile, read_profile
from services.sim.trace_files import read_trace

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
COLUMNS = "model,hardware,prompt_size,batch_size,prompt_time,token_time,tensor_parallel"
ROW = "m,h,512,1,100,30,8"


def test_azures_traces_of_2024_say_their_distance_from_utc(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    lines = [
        "2024-05-10 00:00:00.009930+00:00,2162,5",
        "2024-05-10 00:00:01+00:00,9,6",
        "2024-05-10 02:00:02.5+02:00,9,6",
    ]
    path.write_text("\n".join([HEAD, *lines]))
    assert [request.at_s for request in read_trace(path)] == pytest.approx([0.0, 0.99007, 2.49007])
    path.write_text(f"{HEAD}\n2024-05-10 00:00:00.1e5,9,6\n")
    with pytest.raises(ValueError, match=r"a.csv:2: '2024-05-10 00:00:00.1e5' is no time"):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", f"{HEAD}\n2023-11-16 18:15:46.6,7,5\n"),
        ("b.jsonl", '{"timestamp": 0, "input_length": 7, "output_length": 5}\n'),
    ],
)
def test_a_mark_before_the_text_is_none_of_it(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text("\ufeff" + content)
    assert [request.prompt_tokens for request in read_trace(tmp_path / name)] == [7]


def test_null_is_nobodys_name(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    row = {"timestamp": 0, "input_length": 7, "output_length": 5, "caller": None, "session": None, "priority": None}
    path.write_text(json.dumps(row))
    (request,) = read_trace(path)
    assert (request.caller, request.session, request.priority) == ("", "", 0)


@pytest.mark.parametrize("hash_ids", ["[1.5]", '["1"]', "[true]", "[null]", "[1e400]"])
def test_ids_of_blocks_are_integers(tmp_path: Path, hash_ids: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"timestamp": 0, "input_length": 7, "output_length": 5, "hash_ids": {hash_ids}}}')
    with pytest.raises(ValueError, match=r"a.jsonl:1: hash_ids must be integers"):
        read_trace(path)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([ROW, "m,h,512,1"], ":3: 'tensor_parallel' is missing"),
        ([ROW, "m"], ":3: 'hardware' is missing"),
        (["m,h,many,1,100,30,8"], ":2: invalid literal"),
        ([ROW, "m,h,512,1,nan,30,8"], ":3: nan is out of range"),
        ([ROW, "m,h,512,1,100,inf,8"], ":3: inf is out of range"),
        ([ROW, "m,h,-512,1,100,30,8"], ":3: -512 is out of range"),
        ([ROW, f"m,h,{'9' * 400},1,100,30,8"], ":3: 99999999999999999999 is out of range"),
        ([ROW, f"m,h,{'9' * 200_000},1,100,30,8"], ":3: field larger than field limit"),
        ([], ": has no measurements"),
    ],
)
def test_a_bad_line_of_a_table_is_named(tmp_path: Path, rows: list[str], reason: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text("\n".join([COLUMNS, *rows]) + "\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}{reason}")):
        read_profile(path, "m:h")


def test_what_a_profile_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"name": "x", "ms_per_decode_step": 20}')
    with pytest.raises(ConfigError, match="missing: ms_per_prefill_token, ms_per_decode_sequence; `baton calibrate`"):
        read_profile(path)


@pytest.mark.parametrize("factor", ["prefill_beside_factor", "decode_beside_factor"])
def test_nobody_is_faster_beside_others(factor: str) -> None:
    with pytest.raises(ConfigError, match=f"profile 'x': {factor} is 0.1, which is out of range"):
        WorkerProfile("x", 1.0, 1.0, 1.0, **{factor: 0.1})  # type: ignore[arg-type]
