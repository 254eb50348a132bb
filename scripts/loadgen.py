"""Runs a public load generator against Baton's HTTP: `make loadgen` runs this.

Starts `baton up` on free ports, lets guidellm send streamed requests to both endpoints, and reads its report. Exit
status 0 only if guidellm and the router agree that no request failed, and nothing is left running on the workers.
Never: a benchmark; on a busy machine its times mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "out"
BATON = (sys.executable, "-m", "services.cli.main")
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
START_S = 300.0
STOP_S = 60.0
IDLE_S = 10.0
# How requests may end: guidellm leaves those that run when its time is over, and they are cancelled.
GOOD_OUTCOMES = {"length", "stop", "cancelled"}
ROWS = (
    ("time to first token, ms", "time_to_first_token_ms"),
    ("between tokens, ms", "inter_token_latency_ms"),
    ("whole request, s", "request_latency"),
)


class LoadFailed(Exception):
    """Says, in its message, why the run failed, for people."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs guidellm against `baton up` and checks that nothing failed.")
    parser.add_argument("--guidellm", type=pathlib.Path, default=OUT / "loadgen-venv" / "bin" / "guidellm")
    parser.add_argument("--seconds", type=int, default=20, help="for each endpoint (default: 20)")
    parser.add_argument("--streams", type=int, default=4, help="requests at a time (default: 4)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    arguments = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    try:
        with cluster() as lines:
            for endpoint in ENDPOINTS:
                report(endpoint, load(arguments, endpoint, lines))
            check_router(lines["http"].removesuffix("/v1"), lines["control"])
    except LoadFailed as error:
        print(f"\nload failed: {error}", file=sys.stderr)
        return 1
    print("\nno request failed; nothing is left on the workers")
    return 0


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Runs `baton up`, and yields what it printed, by first word: the control and the HTTP address, the model's
    folder."""
    with open(OUT / "loadgen.log", "w") as log:
        process = subprocess.Popen(
            [*BATON, "up", "--port", "0", "--http-port", "0"], stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
        )
    killer = threading.Timer(START_S, process.kill)
    killer.start()
    try:
        lines: dict[str, str] = {}
        assert process.stdout is not None
        for line in process.stdout:
            name, _, rest = line.strip().partition(" ")
            folder = re.search(r"\((.+)\)", rest)
            lines[name] = folder[1] if name == "model" and folder else rest.split()[0] if rest else ""
            if name == "ready":
                break
        else:
            raise LoadFailed("baton up did not become ready: see out/loadgen.log")
        killer.cancel()
        yield lines
        process.send_signal(signal.SIGINT)
        if process.wait(STOP_S):
            raise LoadFailed(f"baton up ended with status {process.returncode}")
    finally:
        killer.cancel()
        process.kill()
        process.wait()


def load(arguments: argparse.Namespace, endpoint: str, lines: dict[str, str]) -> dict[str, Any]:
    """Returns guidellm's measurements of one endpoint. It needs no network: prompts are made with the model's
    tokenizer."""
    path = OUT / f"loadgen{endpoint.replace('/', '-')}.json"
    path.unlink(missing_ok=True)
    sizes = f"prompt_tokens={arguments.prompt_tokens},output_tokens={arguments.output_tokens}"
    command = [
        *(str(arguments.guidellm), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={lines['http'].removesuffix('/v1')},request_format={endpoint}"),
        *("--profile", f"kind=concurrent,streams={arguments.streams}"),
        *("--constraint", f"kind=max_duration,seconds={arguments.seconds}"),
        *("--tokenizer", f"kind=huggingface_auto,model={lines['model']}"),
        *("--data", f"kind=synthetic_text,{sizes}"),
        *("--output", f"kind=json,path={path}"),
    ]
    process = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    if process.returncode or not path.exists():
        raise LoadFailed(f"guidellm ended with status {process.returncode}: {process.stdout}{process.stderr}")
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    return metrics


def report(endpoint: str, metrics: dict[str, Any]) -> None:
    totals = metrics["request_totals"]
    print(f"\nPOST {endpoint}: {totals['successful']} answered, {totals['errored']} failed, ", end="")
    print(f"{totals['incomplete']} under way when time was over")
    tokens_per_s = metrics["output_tokens_per_second"]["total"]["mean"]
    print(f"  {'output tokens per second':<26} {tokens_per_s:9.1f}")
    for title, name in ROWS:
        of = metrics[name]["successful"]
        print(f"  {title:<26} {of['median']:9.2f} (median) {of['percentiles']['p95']:9.2f} (p95)")
    if totals["errored"] or not totals["successful"]:
        raise LoadFailed(f"{endpoint}: {totals}")


def check_router(http: str, control: str) -> None:
    """Checks what the router counted, and that nothing runs any more."""
    with urllib.request.urlopen(f"{http}/metrics") as answer:
        text = answer.read().decode()
    counted = re.findall(r'^baton_requests_total{outcome="(\w+)"} (\S+)', text, re.M)
    outcomes = {name: int(float(number)) for name, number in counted if float(number)}
    print(f"\nthe router's count: {outcomes}")
    if set(outcomes) - GOOD_OUTCOMES:
        raise LoadFailed(f"requests ended otherwise: {outcomes}")
    deadline_s = time.monotonic() + IDLE_S
    while not idle(control):
        if time.monotonic() > deadline_s:
            raise LoadFailed("workers still hold something")
        time.sleep(0.1)


def idle(control: str) -> bool:
    command = [*BATON, "status", "--target", control, "--json"]
    status = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    live = sum(status[f"num_{phase}"] for phase in ("queued", "prefilling", "parked", "decoding"))
    held = ("num_running", "num_waiting", "blocks_importing", "blocks_leased", "blocks_active")
    return live == 0 and all(worker["load"][name] == 0 for worker in status["workers"] for name in held)


if __name__ == "__main__":
    sys.exit(main())
