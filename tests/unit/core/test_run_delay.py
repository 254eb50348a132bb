"""Tests reading for how long a process has waited for a processor, from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.run_delay import RunDelay


def write(tasks: Path, **waited_ns: int) -> None:
    for thread, ns in waited_ns.items():
        (tasks / thread).mkdir(exist_ok=True)
        (tasks / thread / "schedstat").write_text(f"123456789 {ns} 42\n")


def test_the_most_delayed_thread_counts(tmp_path: Path) -> None:
    write(tmp_path, a=5_000_000_000, b=1_000_000_000)
    delay = RunDelay(tmp_path)
    write(tmp_path, a=5_100_000_000, b=1_400_000_000, new=200_000_000)
    assert delay.since_last() == pytest.approx(0.4)
    assert delay.since_last() == 0.0
    (tmp_path / "a" / "schedstat").unlink()
    write(tmp_path, b=1_500_000_000)
    assert delay.since_last() == pytest.approx(0.1), "a thread may end"


@pytest.mark.parametrize("text", ["", "1", "not a number\n"])
def test_without_statistics_there_is_no_delay(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "schedstat").write_text(text)
    for tasks in (tmp_path, tmp_path / "missing"):
        delay = RunDelay(tasks)
        assert delay.since_last() == 0.0


def test_of_this_process() -> None:
    assert RunDelay().since_last() >= 0.0
