"""Tests that many seeds can be run in pieces: nothing is lost or counted twice, and trees are not mixed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.sim import campaign
from tests.sim.campaign import MixedTrees, Progress, run_chunk
from tests.support.patience import HANG_S, Patience

pytestmark = pytest.mark.process

_ROOT = Path(__file__).parents[2]


def _command(progress: Path, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "tests.sim", "--seeds", "8", "--chunk-seeds", "2", "--resume", str(progress)),
        *arguments,
    ]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(180)
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    file, result = tmp_path / "progress.jsonl", tmp_path / "result.json"
    with subprocess.Popen(
        _command(file, "--jobs", "2"), cwd=_ROOT, env=_environment(), stdout=subprocess.DEVNULL
    ) as process:
        patience = Patience(2 * HANG_S)
        while not file.exists() or file.read_bytes().count(b"\n") < 2:  # the header, and a chunk
            assert process.poll() is None, "it ended by itself"
            assert not patience.is_over(), "it notes nothing"
        jobs = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
    assert len(jobs) >= 2
    _, left = psutil.wait_procs(jobs, timeout=20)
    assert not left, "its processes wait for ever for what nobody sends"
    done = [line for line in _lines(file) if "first" in line]
    with open(file, "ab") as torn:
        torn.write(b'{"first":4,"num_se')
    again = subprocess.run(
        _command(file, "--jobs", "2", "--result", str(result)),
        cwd=_ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{2 * len(done)} of 8 seeds are done" in again.stdout
    chunks = [line for line in _lines(file) if "first" in line]
    assert chunks[: len(done)] == done
    assert sorted(str(chunk["first"]) for chunk in chunks) == ["0", "2", "4", "6"]
    whole, summary = run_chunk(range(8)), json.loads(result.read_text())
    assert (summary["num_seeds"], summary["num_failed"]) == (8, 0)
    assert summary["outcomes"] == whole.outcomes
    assert summary["num_turns"] == whole.num_turns
    assert summary["wall_s"] > 0


def test_results_of_different_trees_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "progress.jsonl"
    progress = Progress(file)
    progress.add(run_chunk(range(0)), wall_s=1.0)
    assert Progress(file).done.keys() == {0}
    monkeypatch.setattr(campaign, "tree_of", lambda root: {"digest": "another", "commit": "", "dirty": True})
    with pytest.raises(MixedTrees, match="another tree"):
        Progress(file)
    mixed = Progress(file, may_mix=True)
    assert mixed.done.keys() == {0}
    assert mixed.trees == {progress.tree["digest"], "another"}


def test_the_digest_of_a_tree_follows_every_file_that_runs(tmp_path: Path) -> None:
    for folder in ("services", "gen", "tests/sim"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "part.py").write_text("one = 1\n")
    digests = {campaign.tree_of(tmp_path)["digest"]}
    for folder in ("services", "gen", "tests/sim"):
        (tmp_path / folder / "part.py").write_text("one = 2\n")
        digests.add(campaign.tree_of(tmp_path)["digest"])
    (tmp_path / "services" / "new.py").write_text("")
    digests.add(campaign.tree_of(tmp_path)["digest"])
    assert len(digests) == 5


def test_a_failure_is_kept_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seed: int) -> object:
        raise AssertionError(f"what went wrong in {seed}")

    monkeypatch.setattr(campaign, "simulate", fails)
    told: list[str] = []
    summary = campaign.run(range(3), 1, None, chunk_seeds=2, tell=told.append)
    assert summary.failures.keys() == {"0", "1", "2"}
    assert "seed 2 failed" in told[-1]
    assert "--seed 2 --trace" in told[-1]


def test_pieces_of_another_size_count_too(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "progress.jsonl")
    for seeds in (range(2, 5), range(7, 9)):
        progress.add(run_chunk(seeds), wall_s=1.0)
    told: list[str] = []
    summary = campaign.run(range(8), 1, progress, chunk_seeds=4, tell=told.append)
    assert told == ["3 of 8 seeds are done"], "the last piece goes beyond what is asked for"
    assert summary.num_seeds == 8
    assert summary.outcomes == run_chunk(range(8)).outcomes
    assert {first: chunk.num_seeds for first, chunk in progress.done.items()} == {0: 2, 2: 3, 5: 2, 7: 1}
