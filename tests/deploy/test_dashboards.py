"""Tests every query of every dashboard: each is asked of a real Prometheus that scrapes a real cluster under load."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import check_dashboards
from tests.support.compose import DEPLOY
from tests.support.models import tiny_model
from tests.support.processes import Up

WITHIN_S = 150.0
CONFIG = """
global: {{ scrape_interval: 1s, evaluation_interval: 1s }}
rule_files: ["{rules}"]
scrape_configs:
  - {{ job_name: router, static_configs: [{{ targets: [{router}] }}] }}
  - {{ job_name: worker, static_configs: [{{ targets: [{workers}] }}] }}
"""


def test_queries_read_as_grafana_has_them() -> None:
    expression = 'sum(rate(a_total[$__rate_interval])) / b{x=~"$worker"} + increase(c[$__range])'
    assert check_dashboards.filled_in(expression, "5m", "1m") == 'sum(rate(a_total[1m])) / b{x=~".+"} + increase(c[5m])'
    query = check_dashboards.Query("d", "t", "e", may_be_empty=False)
    assert check_dashboards.verdict(query, check_dashboards.Answer(2, 0)) == "EMPTY", "NaN is nothing"
    assert check_dashboards.verdict(query, check_dashboards.Answer(0, 0, "parse error")) == "WRONG"
    assert check_dashboards.verdict(query, check_dashboards.Answer(2, 1)) == "ok"


@pytest.mark.process
@pytest.mark.timeout(400)
def test_every_query_brings_something(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on this machine")
    queries = [
        query for path in sorted((DEPLOY / "grafana").glob("*.json")) for query in check_dashboards.queries(path)
    ]
    assert len(queries) > 50
    with Up(tiny_model("llama", tmp_path), tmp_path) as up:
        up.read_until("^ready$")
        with _load(up), _prometheus(up, tmp_path) as address:
            wrong = _ask_until_good(address, queries)
        up.stop(signal.SIGINT)
    assert not wrong, wrong


def _ask_until_good(address: str, queries: list[check_dashboards.Query]) -> dict[str, str]:
    """Returns what is still wrong in the end: rates need samples, and the machine may be busy."""
    deadline_s = time.monotonic() + WITHIN_S
    open_ = {f"{each.dashboard}: {each.title}: {each.expression}": each for each in queries}
    said: dict[str, str] = {}
    while open_ and time.monotonic() < deadline_s:
        for key, query in list(open_.items()):
            answer = check_dashboards.ask(address, check_dashboards.filled_in(query.expression, "1m", "20s"))
            said[key] = check_dashboards.verdict(query, answer) + answer.error
            assert not answer.error, key
            if said[key] in ("ok", "empty"):
                del open_[key]
        time.sleep(0.5)
    return {key: said[key] for key in open_}


@contextlib.contextmanager
def _load(up: Up) -> Iterator[None]:
    """Sends prompts that share a beginning, one after the other."""
    http = next(line.split()[1] for line in up.lines if line.startswith("http "))
    over = threading.Event()

    def run() -> None:
        number = 0
        while not over.is_set():
            body = {"model": "tiny-llama", "prompt": [1, 2, 3, 4] * 20 + [number % 50], "max_tokens": 8}
            data = json.dumps(body).encode()
            asked = urllib.request.Request(f"{http}/completions", data, {"content-type": "application/json"})
            urllib.request.urlopen(asked).close()
            number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _prometheus(up: Up, folder: Path) -> Iterator[str]:
    metrics = {line.split()[0]: line.split("http://")[1].split("/")[0] for line in up.lines if " metrics " in line}
    router = f'"{metrics.pop("router")}"'
    workers = ", ".join(f'"{address}"' for address in metrics.values())
    config = folder / "prometheus.yml"
    rules = DEPLOY / "prometheus" / "rules*.yml"
    config.write_text(CONFIG.format(rules=rules, router=router, workers=workers))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with open(folder / "prometheus.log", "w+") as log:
        process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=log)
        try:
            yield _address(process, folder / "prometheus.log")
        finally:
            process.terminate()
            process.wait(30)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Returns where it listens, when it is ready; the port is its choice."""
    deadline_s = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline_s:
        text = log.read_text()
        assert process.poll() is None, text[-2000:]
        for line in text.splitlines():
            if "Listening on" in line and "Server is ready" in text:
                return "http://" + line.rpartition("address=")[2].strip()
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])
