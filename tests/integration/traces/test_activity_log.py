"""Tests the periodic line in real processes: every one of `baton up` writes it while it works, and none when told not
to."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.models import tiny_model
from tests.support.processes import Up

pytestmark = pytest.mark.process

ROUTER = r"router services\.router\.activity: last \d+ s: \S+ requests/s accepted, .* ([0-9]+) of 2 workers ready"
WORKER = (
    r"{} services\.worker\.activity: last \d+ s: \S+ prefill tokens/s, \S+ output tokens/s, \d+ running, \d+ waiting, "
    r"KV \S+%, prefix hits"
)


def test_every_process_tells_what_it_does(tmp_path: Path) -> None:
    with Up(tiny_model("llama", tmp_path), tmp_path, BATON_LOG_INTERVAL_S="0.2") as up:
        up.read_until("^ready$")
        missing = {ROUTER, WORKER.format("prefill-0"), WORKER.format("decode-0")}
        for _ in range(200):  # requests, not seconds: each makes all three change
            up.generate(max_tokens=32)
            missing -= {pattern for pattern in missing if re.search(pattern, up.log.read_text())}
            if not missing:
                break
        up.stop(signal.SIGINT)
    assert not missing


@pytest.mark.long
def test_zero_is_silence(tmp_path: Path) -> None:
    with Up(tiny_model("llama", tmp_path), tmp_path, BATON_LOG_INTERVAL_S="0") as up:
        up.read_until("^ready$")
        up.generate()
        up.stop(signal.SIGINT)
    assert "activity" not in up.log.read_text()
