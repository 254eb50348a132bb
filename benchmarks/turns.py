"""Runs engines in processes of their own that are measured in turns: each runs only while it is asked, and is stopped
else.

Owns: the processes, and what is said with them in lines (`benchmarks/peers/lines.py` is the other side). Idle, some
engines poll; a stopped process takes nothing from the one that is being measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_OURS = ("GOMP_SPINCOUNT", "PYTHONPATH")
"""Variables that this process has set or needs for itself. A peer gets none of them."""


class Turn:
    """Runs one engine. Its processes are a group, which is stopped and continued as a whole."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._read("READY")  # so that it does not load while others measure
        self._stop()

    def run(self, count: int, num_prompt_tokens: int, max_tokens: int) -> float:
        """Returns the seconds that the engine says it took. Raises RuntimeError if it has ended."""
        asks = self._process.stdin
        assert asks is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            asked = {"count": count, "prompt_tokens": num_prompt_tokens, "max_tokens": max_tokens}
            asks.write(json.dumps(asked) + "\n")
            asks.flush()
            return float(json.loads(self._read("DONE "))["seconds"])
        finally:
            self._stop()

    def _stop(self) -> None:
        """Returns when it stands still, or has ended."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(self._process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _read(self, mark: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; see {self._log}")


@contextlib.contextmanager
def turn(name: str, command: Sequence[str], *, own_environment: bool = False) -> Iterator[Turn]:
    """Starts an engine and stops it at the end. With `own_environment` it is not of this project, and gets none of the
    variables that are only for Baton. What it says beside the lines goes to a file in `out/`."""
    environment: Mapping[str, str] = os.environ
    if own_environment:
        environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    log = Path("out") / f"bench-{''.join(c if c.isalnum() else '-' for c in name)}.log"
    log.parent.mkdir(exist_ok=True)
    pipe = subprocess.PIPE
    with (
        open(log, "w") as messages,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=messages, env=environment, text=True, start_new_session=True
        ) as process,
    ):
        try:
            yield Turn(name, process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
