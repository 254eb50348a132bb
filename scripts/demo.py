"""Runs the whole system on one machine, with real prompts: `make demo` runs this.

Starts `baton up` (router, one prefill worker, one decode worker), sends three prompts over gRPC and streams the
answers, stops the cluster, then shows from the trace file where each request spent its time and how many bytes of KV
were moved, and says in a few lines what that was. Uses the command line, and of Baton's own code only the line for
those who wait and the pipe by which the cluster ends with this process. Exit status 0 only if all of that worked.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any

from services.cli.child import Lifeline
from services.cli.waiting import waiting

ROOT = pathlib.Path(__file__).resolve().parents[1]
TRACE_FILE = ROOT / "demo-trace.jsonl"
LOG_FILE = ROOT / "out" / "demo.log"
DOCUMENT = ROOT / "examples" / "handoff.txt"
BATON = (sys.executable, "-m", "services.cli.main")
TASK = "Summarise the text above in three sentences."
DOCUMENT_ID = "demo-document"
WAYS = {"shm": "through shared memory", "grpc": "over gRPC", "local": "without leaving its memory"}

MIN_DOCUMENT_TOKENS = 1500
START_S = 300.0
ANSWER_S = 300.0
STOP_S = 60.0


class DemoFailed(Exception):
    """Says, in its message, why the demo failed, for people."""


@dataclass(frozen=True)
class Prompt:
    request_id: str
    title: str
    flags: tuple[str, ...]
    max_tokens: int


PROMPTS = (
    Prompt(
        "demo-chat",
        "a short chat",
        ("--chat", "--prompt", "What is the capital of France, and what is it famous for?", "--temperature", "0"),
        max_tokens=64,
    ),
    Prompt(
        DOCUMENT_ID,
        "a long document to summarise (its KV crosses from the prefill to the decode worker)",
        ("--chat", "--prompt", f"{DOCUMENT.read_text()}\n{TASK}", "--temperature", "0", "--repetition-penalty", "1.1"),
        max_tokens=80,
    ),
    Prompt(
        "demo-sampling",
        "seeded sampling: the same seed writes the same story",
        ("--chat", "--prompt", "Write a short story about a relay race.", "--temperature", "0.8", "--seed", "7"),
        max_tokens=96,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start-s", type=float, default=START_S, help="time the cluster may take to be ready, seconds")
    # What tells it to stop must end the cluster too: `run` does that on its way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        document = run(parser.parse_args().start_s)
    except DemoFailed as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    heading("what you have just seen")
    print("\n".join(told(document)))
    return 0


def run(start_s: float) -> dict[str, Any]:
    """Shows everything, and returns what is known of the long document's request."""
    TRACE_FILE.unlink(missing_ok=True)
    LOG_FILE.parent.mkdir(exist_ok=True)
    with open(LOG_FILE, "w") as log:
        cluster = Cluster(log.fileno())
    try:
        target = cluster.wait_until_ready(start_s)
        for prompt in PROMPTS:
            ask(target, prompt)
        cluster.stop()
    finally:
        cluster.kill()
    document = show()
    check_document(document)
    return document


class Cluster:
    """Runs `baton up` as a child, whose log goes to a file."""

    def __init__(self, log_fd: int) -> None:
        command = [*BATON, "up", "--prefill", "1", "--decode", "1", "--port", "0", "--trace-file", str(TRACE_FILE)]
        heading(" ".join(["baton", *command[len(BATON) :]]))
        self._lifeline = Lifeline()  # who is killed takes the cluster along
        fd = self._lifeline.read_fd
        self._process = subprocess.Popen(
            [*command, "--lifeline-fd", str(fd)], stdout=subprocess.PIPE, stderr=log_fd, text=True, pass_fds=(fd,)
        )

    def wait_until_ready(self, start_s: float) -> str:
        """Shows what it prints, and returns the router's address once a request would succeed."""
        watchdog = threading.Timer(start_s, self._process.kill)
        watchdog.start()
        try:
            target = ""
            assert self._process.stdout is not None
            with waiting("until a request would succeed"):
                for line in self._process.stdout:
                    print("  " + line, end="", flush=True)
                    words = line.split()
                    if words[:1] == ["router"]:
                        target = words[1]
                    if words == ["ready"]:
                        return target
        finally:
            watchdog.cancel()
        status = self._process.wait()
        if status == -signal.SIGKILL:
            slow = f"On a slow machine: make demo DEMO_ARGS='--start-s {3 * start_s:g}'."
            raise DemoFailed(f"baton up was not ready within {start_s:g} s. {slow} The end of its log:\n{self._log()}")
        raise DemoFailed(f"baton up ended with status {status}. The end of its log:\n{self._log()}")

    def stop(self) -> None:
        """Sends Ctrl-C, so that the child drains and exits 0."""
        heading("Ctrl-C")
        self._process.send_signal(signal.SIGINT)
        try:
            rest, _ = self._process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"baton up did not stop within {STOP_S:g} s") from None
        print("".join(f"  {line}\n" for line in rest.splitlines()), end="", flush=True)
        if self._process.returncode != 0:
            raise DemoFailed(f"baton up exited with {self._process.returncode}. The end of its log:\n{self._log()}")

    def kill(self) -> None:
        """Ends the child, whatever happened, and its children with it."""
        self._process.kill()
        self._process.wait()
        self._lifeline.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _log(self) -> str:
        return "\n".join(LOG_FILE.read_text(errors="replace").splitlines()[-20:])


def ask(target: str, prompt: Prompt) -> None:
    """Streams one answer to the terminal."""
    heading(prompt.title)
    command = [*BATON, "generate", "--target", target, "--request-id", prompt.request_id]
    command += ["--max-tokens", str(prompt.max_tokens), *prompt.flags]
    try:
        process = subprocess.run(command, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"{prompt.request_id} was not answered within {ANSWER_S:g} s") from None
    if process.returncode != 0:
        raise DemoFailed(f"{prompt.request_id} was not answered (exit status {process.returncode})")


def show() -> dict[str, Any]:
    """Prints the requests' breakdowns, and returns the long document's as data."""
    heading("where each request spent its time")
    trace = [*BATON, "trace", str(TRACE_FILE)]
    chosen = [word for prompt in PROMPTS for word in ("--request", prompt.request_id)]
    document = [*trace, "--request", DOCUMENT_ID, "--json"]
    try:
        subprocess.run([*trace, *chosen], check=True)
        facts: dict[str, Any] = json.loads(subprocess.run(document, stdout=subprocess.PIPE, check=True).stdout)
    except subprocess.CalledProcessError:
        raise DemoFailed(f"a request has no trace in {TRACE_FILE.name}") from None
    return facts


def check_document(facts: dict[str, Any]) -> None:
    num_tokens = facts["attributes"].get("gen_ai.usage.input_tokens", 0)
    if num_tokens < MIN_DOCUMENT_TOKENS:
        raise DemoFailed(f"the document has {num_tokens} tokens, not the {MIN_DOCUMENT_TOKENS} that were promised")
    if not (facts["transfer"] or {}).get("bytes"):
        raise DemoFailed("no KV was moved for the document")


def told(facts: dict[str, Any]) -> list[str]:
    """Returns, in five lines for somebody who is new to this, what happened to a request that two workers shared, and
    where it can be looked at."""
    about, second, moved = facts["attributes"], facts["second_token"], facts["transfer"]
    prefill, decode = about["baton.prefill.worker"], about["baton.decode.worker"]
    tokens, outputs = about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]
    exposed_ms, hidden_ms = second["transfer_exposed_ms"], second["transfer_overlapped_ms"]
    mib, way = moved["bytes"] / 2**20, WAYS.get(moved["transport"], f"by {moved['transport']}")
    ttft_s = facts["first_token"]["total_ms"] / 1e3
    rest_s = facts["total_ms"] / 1e3 - ttft_s
    baton = ".venv/bin/baton" if pathlib.Path(sys.prefix) == ROOT / ".venv" else "baton"
    return [
        f"Two workers shared the document: {prefill} computed its {tokens} tokens; first word after {ttft_s:.2f} s.",
        f"What it computed of them (the KV cache, {mib:.1f} MiB) went to {decode} {way}:",
        f"{hidden_ms:.0f} ms of that beside the computing, {exposed_ms:.1f} ms were waited for: the price of sharing.",
        f"{decode} wrote the other {outputs - 1} tokens in {rest_s:.1f} s, with {prefill} free for the next prompt.",
        f"To see it: {baton} trace {TRACE_FILE.name} --open. A cluster of your own: {baton} up",
    ]


def heading(text: str) -> None:
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
