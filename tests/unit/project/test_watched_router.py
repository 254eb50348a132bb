"""Tests how much of a late event loop is its router's own doing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.watched_router import PERIOD_S, Look, Notes


@pytest.mark.parametrize(
    ("ran_s", "no_processor_s", "others_ran_s", "own_s"),
    [
        pytest.param(0.3, 0.0, 0.0, 0.3, id="it worked"),
        pytest.param(0.0, 0.3, 0.3, 0.0, id="others had the processor"),
        pytest.param(0.0, 0.0, 0.3, 0.3, id="it waited for a lock while others ran"),
        pytest.param(0.0, 0.0, 0.01, 0.01, id="who had the lock had no processor"),
        pytest.param(0.1, 0.1, 0.5, 0.2, id="some of each"),
    ],
)
def test_the_machines_part_is_left_out(ran_s: float, no_processor_s: float, others_ran_s: float, own_s: float) -> None:
    look = Look(1.0, 0.3 + PERIOD_S, ran_s, no_processor_s, others_ran_s)
    assert look.own_s == pytest.approx(own_s)


def test_the_longest_of_a_time_is_found_and_half_a_line_is_not_read(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    assert notes.longest_own_s(0.0, 9.0) == 0.0
    notes.path.write_text("1 0.5 0.5 0 0\n2 0.1 0.1 0 0\nlost decode-0: silent\n3 0.2 0.2 0 0\n4 0.9 0.9")
    assert notes.longest_own_s(1.5, 9.0) == 0.2
    assert notes.longest_own_s(0.0, 9.0) == 0.5
    assert notes.lost() == ["lost decode-0: silent"]
