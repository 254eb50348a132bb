"""Tests that the streaming benchmark notices events with several tokens, and streams that end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.router_streams.measure import taken


def came(folder: Path, sent: list[float], times: list[float], ended: str = "") -> None:
    (folder / "sent.json").write_text(json.dumps({"stream-0": sent}))
    (folder / "came.json").write_text(json.dumps({"stream-0": (ended, 0.0, times)}))


def test_what_came_later_is_the_latency(tmp_path: Path) -> None:
    sent = [1.0, 2.0, 3.0, 4.0]
    came(tmp_path, sent, [at + 0.01 for at in sent])
    found = taken(tmp_path, 1.5, 3.5, used_s=0.001, kb_per_stream=1.0)
    assert found.tokens_per_s == 1.0
    assert found.share == 1.0
    assert found.cpu_ms == 0.5
    assert found.p50_ms == pytest.approx(10.0)


@pytest.mark.parametrize(("times", "ended"), [([1.1, 3.1, 4.1], ""), ([1.1, 2.1, 3.1, 4.1], "reset"), ([], "")])
def test_tokens_that_share_an_event_and_streams_that_end_are_errors(
    times: list[float], ended: str, tmp_path: Path
) -> None:
    came(tmp_path, [1.0, 2.0, 3.0, 4.0], times, ended)
    with pytest.raises(RuntimeError, match="stream-0"):
        taken(tmp_path, 1.5, 3.5, used_s=0.001, kb_per_stream=1.0)
