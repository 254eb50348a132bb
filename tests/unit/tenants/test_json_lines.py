"""Tests a file of JSON lines: that entries arrive, at least once and in order, through rotation, failures and torn
lines, and that what waits is bounded."""

from __future__ import annotations

import errno
import json
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from services.core.errors import ConfigError
from services.router.telemetry import json_lines
from services.router.telemetry.json_lines import JsonLines
from tests.support.patience import HANG_S

REAL_WRITE = os.write


class Bench:
    """Writes a log that flushes often."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / "usage.jsonl"
        self.num_dropped = 0
        self.logs: list[JsonLines] = []

    def open(self, incarnation: int = 1, **bounds: Any) -> JsonLines:
        log = JsonLines(
            "--usage-log",
            str(self.path),
            incarnation,
            **{"most_bytes": 1 << 20, "most_files": 4, "wall_s": lambda: 0.0, "dropped": self._drop} | bounds,
        )
        self.logs.append(log)
        log.start()
        return log

    def _drop(self, number: int) -> None:
        self.num_dropped += number

    def close(self) -> None:
        while self.logs:
            self.logs.pop().close()

    def numbers(self, path: pathlib.Path | None = None) -> list[int]:
        """Returns the numbers in the ids of a file's lines, each of which is whole."""
        lines = (path or self.path).read_text().splitlines()
        return [int(json.loads(line)["id"].rpartition("-")[2]) for line in lines if line]


def entry() -> dict[str, Any]:
    return {"tenant": "acme", "model": "m", "request_id": "r", "prompt_tokens": 10, "cost": 0.5, "outcome": "stop"}


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.fixture
def bench(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(json_lines, "FLUSH_S", 0.01)
    bench = Bench(tmp_path)
    yield bench
    monkeypatch.setattr(os, "write", REAL_WRITE)
    bench.close()


HOSTILE = 'a\n\r\x00\x85\u2028\udfff\ud800\x1b[2J"}{'


def test_a_line_has_an_id_and_a_time_and_is_one_line_whatever_is_in_it(bench: Bench) -> None:
    bench.open(incarnation=0xAB).put({"text": HOSTILE, HOSTILE: 1})
    bench.close()
    (line,) = bench.path.read_text().splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == {
        "id": "00000000000000ab-1",
        "time": "1970-01-01T00:00:00.000+00:00",
        "text": HOSTILE,
        HOSTILE: 1,
    }
    assert bench.path.stat().st_mode & 0o777 == 0o600


def test_what_waits_is_bounded_in_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that are read slowly by a disk do not fill the memory; once they are written there is room again."""
    monkeypatch.setattr(json_lines, "FLUSH_S", 3600.0)
    log = bench.open(most_waiting_bytes=100_000)
    for _ in range(100):
        log.put({"text": "x" * 9000}, num_text_bytes=9000)
    assert bench.num_dropped == 90
    bench.close()
    assert bench.numbers() == list(range(1, 11))
    assert log._num_bytes_put == log._num_bytes_taken == 100_000


def test_batches_are_bounded_in_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "FLUSH_S", 3600.0)
    written = []
    log = bench.open(most_bytes=1 << 30)
    for _ in range(60):
        log.put({"text": "x" * 100_000}, num_text_bytes=100_000)
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(len(data)) or REAL_WRITE(fd, data))
    bench.close()
    assert bench.numbers() == list(range(1, 61))
    assert max(written) <= json_lines._BATCH_BYTES + 200_000


def test_entries_arrive_while_it_is_open_and_at_the_end(bench: Bench) -> None:
    log = bench.open()
    for _ in range(3000):
        log.put(entry())
    until(lambda: bench.path.read_text().count("\n") == 3000)
    log.put(entry())
    bench.close()
    assert bench.numbers() == list(range(1, 3002))
    assert bench.num_dropped == 0
    log.put(entry())
    assert bench.num_dropped == 1, "it came too late"


def test_files_are_bounded_in_size_and_number(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    log = bench.open(most_bytes=4096, most_files=3)
    for number in range(1, 121):
        log.put(entry())
        if number % 5 == 0:
            until(lambda: not log._waiting)
    bench.close()
    files = sorted(bench.path.parent.iterdir())
    assert [file.name for file in files] == ["usage.jsonl", "usage.jsonl.1", "usage.jsonl.2"]
    assert all(file.stat().st_size <= 4096 for file in files)
    kept = [*bench.numbers(files[2]), *bench.numbers(files[1]), *bench.numbers(files[0])]
    assert kept == list(range(kept[0], 121)), "the oldest are gone, and none between"
    assert "usage.jsonl.2 is deleted: there may be 3 files" in caplog.text


def test_a_torn_last_line_spoils_no_other(bench: Bench) -> None:
    bench.path.write_text('{"id": "00000000000000ab-1", "ti')
    bench.open().put(entry())
    bench.close()
    torn, whole = bench.path.read_text().splitlines()
    assert torn.endswith('"ti')
    assert json.loads(whole)["id"].endswith("-1")


@pytest.mark.parametrize("way", [os.unlink, lambda path: os.replace(path, f"{path}.moved")])
def test_a_file_that_was_taken_away_begins_anew(bench: Bench, way: Callable[[pathlib.Path], None]) -> None:
    log = bench.open()
    log.put(entry())
    until(lambda: bench.path.stat().st_size > 0)
    way(bench.path)
    log.put(entry())
    until(bench.path.exists)
    bench.close()
    assert bench.numbers() == [2]


def test_a_full_disk_drops_only_what_does_not_fit_into_memory_and_says_so_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was written of a batch is taken back, and written again with the whole batch."""
    attempts = []

    def full(fd: int, data: Any) -> int:
        attempts.append(fd)
        if len(attempts) % 2:
            return REAL_WRITE(fd, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = bench.open(most_waiting=5)
    log.put(entry())
    until(lambda: not log._waiting)
    monkeypatch.setattr(os, "write", full)
    for _ in range(8):
        log.put(entry())
    until(lambda: len(attempts) >= 6)
    assert bench.num_dropped == 3
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "No space left on device; up to 5 requests wait" in errors[0]
    monkeypatch.setattr(os, "write", REAL_WRITE)
    until(lambda: not log._waiting)
    log.put(entry())
    bench.close()
    assert bench.numbers() == [1, 2, 3, 4, 5, 6, 10]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "3 requests were dropped" in warnings[0]


def test_what_could_not_be_written_at_the_end_is_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(fd: int, data: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", broken)
    log = bench.open()
    log.put(entry())
    log.put(entry())
    bench.close()
    assert bench.num_dropped == 2
    assert "2 requests were not written" in caplog.records[-1].getMessage()


def test_a_disk_that_hangs_keeps_nobody_from_stopping(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_CLOSE_WITHIN_S", 0.1)
    hanging = []

    def hang(fd: int) -> None:
        hanging.append(fd)
        while hanging:
            time.sleep(0.01)

    monkeypatch.setattr(os, "fsync", hang)
    monkeypatch.setattr(json_lines, "_sync_folder", lambda path: None)
    log = bench.open()
    log.put(entry())
    until(lambda: bool(hanging))
    bench.close()
    assert bench.num_dropped == 1
    hanging.clear()
    log._thread.join(HANG_S)
    assert not log._thread.is_alive()


def test_files_that_cannot_be_written_are_refused_at_the_start(bench: Bench, tmp_path: pathlib.Path) -> None:
    bench.open()
    with pytest.raises(ConfigError, match=r"--usage-log: .*it is written already"):
        bench.open(incarnation=2)
    bench.path = tmp_path / "nowhere" / "usage.jsonl"
    with pytest.raises(ConfigError, match="No such file or directory"):
        bench.open()
    bench.path = tmp_path
    with pytest.raises(ConfigError, match="Is a directory"):
        bench.open()
    bench.path = tmp_path / "fifo"
    os.mkfifo(bench.path)
    with pytest.raises(ConfigError, match="not a regular file"):
        bench.open()
