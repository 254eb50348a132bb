"""Tests `baton up` with real services over a tiny model: ready when a request succeeds, and not before; drained at
SIGINT."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.support.models import tiny_model
from tests.support.processes import Up, baton

pytestmark = pytest.mark.process


def test_serves_and_drains(tmp_path: Path) -> None:
    with Up(tiny_model("llama", tmp_path), tmp_path) as up:
        up.read_until("^ready$")
        answer = up.generate()  # exactly then, and not a moment later
        assert len(answer["token_ids"]) == 4
        assert answer["workers"] == {"prefill": "prefill-0", "decode": "decode-0", "retries": 0}
        status = json.loads(up.baton("status", "--json").stdout)
        assert {worker["worker"]["worker_id"]: worker["state"] for worker in status["workers"]} == {
            "prefill-0": "ready",
            "decode-0": "ready",
        }
        http = next(line.split()[1] for line in up.lines if line.startswith("http "))
        assert up.target().rpartition(":")[0] in http
        with urllib.request.urlopen(f"{http}/models") as models:
            assert json.load(models)["data"][0]["id"] == "tiny-llama"
        assert http in up.baton("status").stdout
        health = up.baton("health", "--service", "baton.v1.InferenceService")
        assert (health.returncode, health.stdout) == (0, "SERVING\n")
        up.stop(signal.SIGINT)
        trace = baton(["trace", str(up.trace_file), "--request", str(answer["request_id"])], tmp_path)
        assert trace.returncode == 0, trace.stderr
        assert "KV moved" in trace.stdout
