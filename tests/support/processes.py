"""Runs `baton` as real processes: the commands, and `baton up` with the lines it prints.

Owns: their environment (nothing of the caller's BATON_* settings, a temp folder of their own), and that they end with
the test. Never: what a test expects of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.footprint import Footprint
from tests.support.patience import Wrong
from tests.support.trusted import CLUSTER_TOKEN

PYTHON_PATH = os.pathsep.join(str(ROOT / folder) for folder in (".", "gen", "client"))
"""This tree's packages, whatever is installed."""
BATON = (sys.executable, "-m", "services.cli.main")
WAIT_S = 60.0


def environment(temp: Path) -> dict[str, str]:
    """Returns the environment of a child; `temp` is its folder for temporary files."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**clean, "PYTHONPATH": PYTHON_PATH, "TMPDIR": str(temp), "BATON_CLUSTER_TOKEN": CLUSTER_TOKEN}


class Supervisor:
    """Runs what prints the lines of `baton up`, and keeps them."""

    def __init__(self, command: Sequence[str], log: Path, **more: Any) -> None:
        """`log` gets its standard error; `more` is given to `Popen`."""
        self.log = log
        self.lines: list[str] = []
        with open(log, "a") as stderr:  # several processes write it
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, **more)

    def read_until(self, pattern: str) -> str:
        """Returns the next line that the pattern matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return self.lines[-1]
        raise AssertionError(f"no {pattern!r} in {self.lines}; its log: {self.log.read_text()[-3000:]}")

    def pids(self) -> dict[str, int]:
        """Returns the newest process id of each child that has reported itself."""
        return {name: int(pid) for name, _, pid in self._reports()}

    def target(self) -> str:
        """Returns the router's address."""
        return next(address for name, address, _ in reversed(self._reports()) if name == "router")

    def _reports(self) -> list[tuple[str, str, str]]:
        matches = (re.match(r"(\S+) +(\S+:\d+) +metrics \S+ +pid (\d+)", line) for line in self.lines)
        return [(match[1], match[2], match[3]) for match in matches if match]


class Up(Supervisor):
    """Runs `baton up`; as a context it kills it at the end and waits for its children."""

    def __init__(self, model: Path, folder: Path, *flags: str, **settings: str) -> None:
        """`settings`: more of the environment."""
        self.temp = folder / "temp"
        self.temp.mkdir()
        self.trace_file = folder / "trace.jsonl"
        self.footprint = Footprint()
        command = [*BATON, "up", "--model", str(model), "--port", "0", "--dtype", "float32", "--kv-blocks", "64"]
        command += ["--split", "always"]  # what tests look at is the handoff, whatever it costs
        command += ["--trace-file", str(self.trace_file), *flags]
        super().__init__(command, folder / "log", cwd=self.temp, env=environment(self.temp) | settings)

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.footprint.watch(self.process.pid)
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.footprint.await_gone(WAIT_S)

    def control(self) -> str:
        """Returns the address of the router's control port."""
        return next(line.split()[1] for line in reversed(self.lines) if line.startswith("control "))

    def baton(self, command: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """Runs a command that asks the router, at the port that it is for."""
        target = self.control() if command in ("status", "drain") else self.target()
        return baton([command, "--target", target, *flags], self.temp)

    def generate(self, prompt: str = "The baton is passed", max_tokens: int = 4) -> dict[str, object]:
        # Greedy: a random model samples the end of its text now and then.
        flags = ("--raw", "--max-tokens", str(max_tokens), "--temperature", "0", "--json")
        process = self.baton("generate", "--prompt", prompt, *flags)
        assert process.returncode == 0, process.stderr
        answer: dict[str, object] = json.loads(process.stdout)
        return answer

    def stop(self, number: signal.Signals) -> None:
        """Ends it in order. Nothing may be left of it in the very moment it has ended."""
        self.footprint.watch(self.process.pid)
        self.process.send_signal(number)
        status, left = self.process.wait(WAIT_S), [*self.footprint.left(), *self.temp.iterdir()]
        if status or left:
            raise Wrong(f"it ended with {status} and left {left}; its log: {self.log.read_text()[-3000:]}")


def baton(arguments: Sequence[str], temp: Path, within_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run(
        [*BATON, *arguments], env=environment(temp), capture_output=True, text=True, timeout=within_s, check=False
    )
