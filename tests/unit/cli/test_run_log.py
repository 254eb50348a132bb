"""Tests the file into which a cluster's processes write: whose lines are whose, what is loud, how large it is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli import run_log
from services.cli.run_log import NUM_KEPT, LogLine, RunLog, read_line
from services.core.errors import ConfigError
from services.core.home import baton_state

INFO = "12:00:00.000 INFO  prefill-0 services.worker.host: serves"
WARNING = "12:00:00.001 WARNING router services.router.conductor: health of decode-0: suspect"
ERROR = "12:00:00.002 ERROR decode-0 services.engine: a step failed"
JSON = '{"time": "t", "level": "ERROR", "logger": "l", "message": "a step failed", "instance": "decode-0"}'


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    made = RunLog(tmp_path / "logs")
    yield made
    made.close()


def write(log: RunLog, *lines: str) -> None:
    os.write(log.fd, "".join(f"{line}\n" for line in lines).encode())


@pytest.mark.parametrize(
    ("line", "read"),
    [
        (INFO, LogLine("INFO", "prefill-0", "services.worker.host: serves")),
        (JSON, LogLine("ERROR", "decode-0", "a step failed")),
        ("Traceback (most recent call last):", LogLine("", "", "Traceback (most recent call last):")),
        ('{"level": 1}', LogLine("", "", '{"level": 1}')),
        ("\x1b[2Jgone\x07", LogLine("", "", "\\x1b[2Jgone\\x07")),
    ],
)
def test_a_line_is_read_and_made_safe(line: str, read: LogLine) -> None:
    assert read_line(line) == read


def test_news_are_whole_lines_each_once(log: RunLog) -> None:
    write(log, INFO, WARNING)
    os.write(log.fd, ERROR.encode())
    assert [(line.level, line.is_loud) for line in log.news()] == [("INFO", False), ("WARNING", True)]
    assert log.news() == []
    os.write(log.fd, b"\n")
    assert [line.who for line in log.news() if line.is_loud] == ["decode-0"]


def test_the_last_lines_of_one_process_are_its_own_and_those_that_nobody_signed(log: RunLog) -> None:
    log.begin("decode-0")
    write(log, "12:00:00.000 INFO  decode-0 a: of an earlier life")
    log.begin("decode-0")
    write(log, INFO, "  of prefill-0's traceback", ERROR, "  Traceback:", "  ValueError", WARNING, "Fatal Python error")
    assert log.last_lines("decode-0", 10) == [
        "ERROR services.engine: a step failed",
        "  Traceback:",
        "  ValueError",
        "Fatal Python error",
    ]
    assert log.last_lines("decode-0", 1) == ["Fatal Python error"]


def test_the_file_is_turned_and_nothing_is_told_twice(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MOST_BYTES", 500)
    for _ in range(3):
        write(log, *[INFO] * 10)
        assert len(log.news()) == 10
        assert log.path.stat().st_size == 0
        assert log.path.with_suffix(".log.1").read_text().count(INFO) == 10
        assert log.path.with_suffix(".log.1").stat().st_mode & 0o077 == 0
    write(log, ERROR)
    assert log.path.read_text() == f"{ERROR}\n", "the processes' descriptor goes on at the beginning"
    assert [line.level for line in log.news()] == ["ERROR"]
    assert log.last_lines("decode-0", 3) == ["ERROR services.engine: a step failed"]


def test_a_file_that_somebody_has_removed_is_still_read(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.path.unlink()
    write(log, INFO, ERROR)
    assert [line.level for line in log.news()] == ["INFO", "ERROR"]
    assert log.last_lines("decode-0", 3) == ["ERROR services.engine: a step failed"]
    log.path.parent.rmdir()
    monkeypatch.setattr(run_log, "MOST_BYTES", 1)
    write(log, WARNING)
    assert len(log.news()) == 1
    write(log, ERROR)
    assert [line.level for line in log.news()] == ["ERROR"]


def test_a_file_that_somebody_has_emptied_is_read_from_its_beginning(log: RunLog) -> None:
    log.begin("prefill-0")
    write(log, INFO, INFO)
    log.begin("decode-0")
    assert len(log.news()) == 2
    log.path.write_text("")
    assert log.news() == log.last_lines("decode-0", 3) == []
    write(log, ERROR)
    assert [line.level for line in log.news()] == ["ERROR"]


def test_only_the_newest_files_are_kept_and_an_empty_one_is_not(tmp_path: Path) -> None:
    for number in range(NUM_KEPT + 5):
        (tmp_path / f"up-20260101-0000{number:02}-1.log").touch()
        (tmp_path / f"up-20260101-0000{number:02}-1.log.1").touch()
    (tmp_path / "mine.txt").touch()
    log = RunLog(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len([name for name in left if name.endswith(".log")]) == NUM_KEPT + 1
    assert len([name for name in left if name.endswith(".log.1")]) == NUM_KEPT
    assert "mine.txt" in left
    assert "up-20260101-000004-1.log" not in left
    assert not log.close()
    assert not log.path.exists()


@pytest.mark.process
def test_the_file_of_a_cluster_that_still_runs_is_kept(tmp_path: Path) -> None:
    first = RunLog(tmp_path)
    write(first, INFO)
    for number in range(NUM_KEPT + 5):
        (tmp_path / f"up-20990101-0000{number:02}-1.log").touch()
    RunLog(tmp_path).close()
    assert first.path.exists()
    with subprocess.Popen(["sleep", "60"], stdout=first.fd) as process:
        first.close()
        RunLog(tmp_path).close()
        assert first.path.exists(), "a process of it runs, though its supervisor has ended"
        process.kill()
    RunLog(tmp_path).close()
    assert not first.path.exists()


def test_where_nothing_can_be_written_a_temporary_folder_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = RunLog(tmp_path / "file" / "logs")
    assert tmp_path in log.path.parents
    assert log.path.stat().st_mode & 0o077 == 0
    write(log, INFO)
    assert log.close()
    assert log.path.exists()
    empty = RunLog(tmp_path / "file" / "logs")
    assert not empty.close()
    assert not empty.path.parent.exists(), "it was made for this file"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"no log file can be made.*--log-level"):
        RunLog(tmp_path / "file" / "logs")


def test_the_state_directory() -> None:
    assert baton_state({"BATON_HOME": "/b", "XDG_STATE_HOME": "/s"}) == Path("/b")
    assert baton_state({"XDG_STATE_HOME": "/s"}) == Path("/s/baton")
    assert baton_state({"XDG_STATE_HOME": "not/absolute"}) == Path("~/.local/state/baton").expanduser()
