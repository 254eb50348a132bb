"""Runs many seeds over several processes, in chunks that are written down as they are done, so that it may span days.

Owns: the progress file (JSON lines: a header that says which tree runs, then a line for each chunk) and the summary.
Never: what a seed does (`simulation`).

Each line is one write, synchronised to disk. What a killed run left half written is cut off; the chunk runs again.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from tests.sim.simulation import simulate

_CHUNKS_PER_PROCESS = 40
_ROOT = Path(__file__).parents[2]
_TREE = ("services", "gen", "tests/sim")
"""What decides how a seed runs."""


@dataclass(frozen=True)
class Chunk:
    """Keeps what became of some seeds in a row."""

    first: int
    num_seeds: int
    num_turns: int
    num_faults: int
    outcomes: dict[str, int]
    failures: dict[str, str]
    """By seed."""
    cpu_s: float


@dataclass
class Summary:
    num_seeds: int = 0
    num_turns: int = 0
    num_faults: int = 0
    cpu_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        self.num_seeds += chunk.num_seeds
        self.num_turns += chunk.num_turns
        self.num_faults += chunk.num_faults
        self.cpu_s += chunk.cpu_s
        self.outcomes.update(chunk.outcomes)
        self.failures.update(chunk.failures)

    def __str__(self) -> str:
        return (
            f"{self.num_seeds} seeds, {len(self.failures)} failed, {self.num_turns} turns, {self.num_faults} faults, "
            f"{self.cpu_s:.0f} s of CPU; outcomes: {dict(self.outcomes.most_common())}"
        )


class MixedTrees(Exception):
    """The progress file is of another tree: its chunks say nothing about this one."""


class Progress:
    """Keeps a progress file, which is made if it is not there, for one process at a time."""

    def __init__(self, path: Path, *, may_mix: bool = False) -> None:
        self._path = path
        self.tree = tree_of(_ROOT)
        self.done: dict[int, Chunk] = {}
        """By first seed."""
        self.trees: set[str] = {self.tree["digest"]}
        self.wall_s = 0.0
        """Of all runs so far that came to a chunk's end."""
        for line in self._lines():
            if "tree" in line:
                self.trees.add(line["tree"]["digest"])
            else:
                self.wall_s += line.pop("wall_s")
                self.done[line["first"]] = Chunk(**line)
        if len(self.trees) > 1 and not may_mix:
            raise MixedTrees(f"{path} was written by another tree; --mix-trees adds to it, another file begins anew")
        self._append({"tree": self.tree})

    def add(self, chunk: Chunk, wall_s: float) -> None:
        """Adds a chunk that took `wall_s` since the last one."""
        self.wall_s += wall_s
        self.done[chunk.first] = chunk
        self._append({**asdict(chunk), "wall_s": round(wall_s, 3)})

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))
        for line in whole.splitlines():
            yield json.loads(line)

    def _append(self, record: dict[str, Any]) -> None:
        with open(self._path, "ab") as file:
            file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def run(
    seeds: range, jobs: int, progress: Progress | None, *, chunk_seeds: int = 50, tell: Callable[[str], None] = print
) -> Summary:
    """Runs what is not done yet. Failures are told with `tell` as they come, and kept."""
    done = {} if progress is None else progress.done
    summary = Summary()
    missing, first = [], seeds.start
    while first < seeds.stop:
        chunk = done.get(first)
        if chunk is not None and first + chunk.num_seeds <= seeds.stop:
            summary.add(chunk)
            first += chunk.num_seeds
            continue
        next_done = min((other for other in done if other > first), default=seeds.stop)
        some = range(first, min(first + chunk_seeds, next_done, seeds.stop))
        missing.append(some)
        first = some.stop
    if summary.num_seeds:
        tell(f"{summary.num_seeds} of {len(seeds)} seeds are done")
    last_s, told_s = time.monotonic(), time.monotonic()
    for chunk in _results(missing, jobs):
        now_s = time.monotonic()
        if progress is not None:
            progress.add(chunk, now_s - last_s)
        last_s = now_s
        summary.add(chunk)
        for seed, error in chunk.failures.items():
            tell(f"seed {seed} failed: {error}\nreplay: {replay_command(int(seed))}")
        if now_s - told_s > 60:
            told_s = now_s
            tell(f"{summary.num_seeds} of {len(seeds)} seeds, {len(summary.failures)} failed")
    return summary


def write_result(path: Path, summary: Summary, seeds: range, jobs: int, progress: Progress) -> None:
    """Writes the result of a run that came to its end."""
    result = {
        "what": "the deterministic simulation of a cluster under faults: make sim",
        "date": datetime.date.today().isoformat(),
        "tree": progress.tree,
        "trees": sorted(progress.trees),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "seeds": [seeds.start, seeds.stop],
        "jobs": jobs,
        "num_seeds": summary.num_seeds,
        "num_failed": len(summary.failures),
        "failures": summary.failures,
        "num_turns": summary.num_turns,
        "num_faults": summary.num_faults,
        "outcomes": dict(summary.outcomes.most_common()),
        "cpu_s": round(summary.cpu_s, 1),
        "wall_s": round(progress.wall_s, 1),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def tree_of(root: Path) -> dict[str, Any]:
    """Says which code runs: a digest of all of it, and the commit for people."""
    digest = hashlib.sha256(platform.python_version().encode())
    for folder in _TREE:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    commit = _git(root, "rev-parse", "HEAD")
    dirty = bool(_git(root, "status", "--porcelain", "--", *_TREE))
    return {"digest": digest.hexdigest()[:16], "commit": commit, "dirty": dirty}


def run_chunk(seeds: range) -> Chunk:
    started_s, outcomes, failures = time.process_time(), Counter[str](), {}
    num_turns = num_faults = 0
    for seed in seeds:
        try:
            result = simulate(seed)
        except Exception as error:
            failures[str(seed)] = repr(error)
            continue
        outcomes.update(result.outcomes)
        num_turns += result.num_turns
        num_faults += result.num_faults
    cpu_s = round(time.process_time() - started_s, 3)
    return Chunk(seeds.start, len(seeds), num_turns, num_faults, dict(outcomes), failures, cpu_s)


def replay_command(seed: int) -> str:
    return f"python -m tests.sim --seed {seed} --trace"


def _results(chunks: Iterable[range], jobs: int) -> Iterator[Chunk]:
    """Yields results in any order. A process ends after a while, so that nothing it might keep matters."""
    if jobs == 1:
        yield from map(run_chunk, chunks)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, end_with_parent, max_tasks_per_child=_CHUNKS_PER_PROCESS) as pool:
        running: set[Future[Chunk]] = set()
        for seeds in chunks:
            running.add(pool.submit(run_chunk, seeds))
            if len(running) > 2 * jobs:
                over, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in over)
        yield from (each.result() for each in running)


def end_with_parent() -> None:
    """Ends this process of a pool when whoever made the pool is gone, however that came about.

    By itself it would wait for ever: each process of a pool holds the writing end of the queue it reads from.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _git(root: Path, *arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
