"""Ratios round by round, comparisons with peers, settings as flags, result files and the machine in them."""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import machine
from benchmarks.figure import Figure, Series, ratio, table
from benchmarks.peers.comparison import FOUR_BITS, UNQUANTISED, Side, figures, measure_in_turns
from benchmarks.precision import Precision, parse_precision
from benchmarks.result import Result, read_series
from benchmarks.settings import add_flags, read, setting
from benchmarks.works import advantage, works
from services.engine.native.instruction_sets import cpu_name


def test_a_ratio_has_a_sample_for_each_round() -> None:
    figure = ratio("ours over theirs", [3.0, 8.0, 5.0], [2.0, 4.0, 5.0], ">= 1")
    assert (figure.samples, figure.median, figure.unit) == ((1.5, 2.0, 1.0), 1.5, "x")
    with pytest.raises(ValueError, match="zip"):
        ratio("unequal", [1.0, 2.0], [1.0])


def test_the_table_shows_median_spread_and_target() -> None:
    text = table([Figure("speed", "tok/s", (2.0, 1.0, 4.0), ">= 3")])
    assert text.splitlines()[2].split("  ")[0] == "speed"
    assert "2 tok/s" in text
    assert "1 … 4" in text
    assert ">= 3" in text


def engine(prefill_tok_s: float, decode_tok_s: float):
    """Returns an engine that reads prompts and writes tokens one after the other, at these rates."""
    return lambda count, prompt, output: count * (prompt / prefill_tok_s + output / decode_tok_s)


def test_works_are_computed_from_times() -> None:
    single, prefill, batch = works(32)
    run = engine(1000, 50)
    assert single.measure(run) == pytest.approx(50)
    assert prefill.measure(run) == pytest.approx(2.048 + 0.02)
    assert batch.measure(run) == pytest.approx(64 / (0.256 + 64 / 50))


def test_less_time_is_an_advantage() -> None:
    single, prefill, _ = works(32)
    assert advantage(single, 30.0, 20.0) == 1.5
    assert advantage(prefill, 2.0, 3.0) == 1.5


def test_peers_take_turns_and_the_first_round_is_dropped() -> None:
    asked: list[str] = []

    def side(name: str, kind: str, speed: float, *, is_baton: bool = False) -> Side:
        run = engine(1000 * speed, 50 * speed)
        return Side(name, kind, is_baton, lambda *work: (asked.append(name), run(*work))[1])

    sides = [
        side("Baton", UNQUANTISED, 3, is_baton=True),
        side("slow", UNQUANTISED, 1),
        side("quick", UNQUANTISED, 2),
        side("packed", FOUR_BITS, 4),
    ]
    each = works(2)
    measure_in_turns(sides, each, repeats=2, tell=lambda line: None)
    assert asked[:8] == [
        "Baton",
        "Baton",
        "slow",
        "slow",
        "quick",
        "quick",
        "packed",
        "packed",
    ]  # two runs for the first
    assert all(len(samples) == 2 for one in sides for samples in one.samples.values())
    found = {figure.name: figure for figure in figures(sides, each)}
    assert found["Baton over slow: single stream"].samples == pytest.approx((3, 3))
    assert found["Baton over slow: single stream"].target == ""
    assert found["Baton over quick: prefill of 2048 tokens"].samples == pytest.approx((1.5, 1.5))
    assert found["Baton over quick: prefill of 2048 tokens"].target == ">= 1.67, the best here"
    assert found["Baton over packed: single stream"].samples == pytest.approx((0.75, 0.75))
    assert found["Baton over packed: single stream"].target == ""


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("bfloat16", Precision("bfloat16", "none")),
        ("float32+int8", Precision("float32", "int8")),
        ("+int4", Precision("auto", "int4")),
    ],
)
def test_precisions_are_named_in_a_word(text: str, precision: Precision) -> None:
    assert parse_precision(text) == precision


@dataclass(frozen=True)
class Settings:
    streams: int = setting(4, "streams")
    rate_scale: tuple[float, ...] = setting((0.5, 1.0), "levels")
    trace: str = setting("", "a file")


def test_settings_are_flags() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "some", Settings)
    assert read(Settings, parser.parse_args([])) == Settings()
    given = parser.parse_args(["--streams", "8", "--rate-scale", "1,2.5,4", "--trace", "x.csv"])
    assert read(Settings, given) == Settings(8, (1.0, 2.5, 4.0), "x.csv")


@pytest.mark.process
def test_a_result_file_has_machine_load_settings_figures_and_lines(tmp_path: Path) -> None:
    result = Result({"repeats": 3})
    line = Series("itl", "split", ((1.0, 2.0), (3.0, 4.0)))
    result.add([Figure("speed", "tok/s", (1.0, 2.0)), line])
    path = tmp_path / "deep" / "result.json"
    result.write(path)
    plain = json.loads(path.read_text())
    assert plain["settings"] == {"repeats": 3}
    assert plain["figures"][0]["median"] == 1.5
    about = plain["machine"]
    assert about["cpu"]
    assert about["instruction_sets"][-1]
    assert about["usable_cores"] >= 1
    assert about["memory_gb"] > 0
    assert about["kernel"]
    assert {"load_average_at_start", "busy_percent", "stolen_percent", "seconds"} <= set(plain["meanwhile"])
    assert read_series(path) == [line]


def test_stolen_time_is_a_share_of_all_time(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 0 100 0 0 0 0 0 0\ncpu0 1 2 3\n")
    watch = machine.Watch(stat)
    stat.write_text("cpu  150 10 10 115 5 0 0 10 7 0\n")
    note = watch.note()
    assert (note["busy_percent"], note["stolen_percent"]) == (80.0, 10.0)


def test_the_processor_is_named_as_the_kernel_names_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    first = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: A Fine CPU\nstepping\t: 1\nflags\t: avx2\n"
    cpuinfo.write_text(f"{first}\nprocessor\t: 1\nstepping\t: 2\n")
    assert cpu_name(cpuinfo) == "A Fine CPU"
    assert machine.cpu_kind(cpuinfo) == {"cpu family": "25", "model": "17", "stepping": "1"}, "two may share the name"


@pytest.mark.process
def test_a_commit_is_marked_if_files_differ(tmp_path: Path) -> None:
    assert machine.baton_commit(tmp_path) == ""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    commit = machine.baton_commit(tmp_path)
    assert len(commit) == 12
    (tmp_path / "file").write_text("two")
    assert machine.baton_commit(tmp_path) == commit + "+"
