"""Proves at length what `make test-all` tries in part: every fault in every phase, 2,000 simulated clusters, every
deliberate bug, a soak, and the bounds of time and memory.

    python -m tests.proof            (make proof)

It takes an hour, and goes on where it was ended: a part whose outcome is in the result file of the same commit is not
run again. The tests that failed are run up to twice more, and the file has all of their outcomes: a test that fails
every time shows a defect, one that fails once a defect or a figure of the machine, to be explained.
Owns: the parts, the result file. Never: stops a landing.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import machine
from tests.support import ROOT

MUTANTS = [path.stem for path in sorted((ROOT / "tests" / "sim").glob("*_mutants.py")) if path.stem != "test_mutants"]
PARTS: dict[str, tuple[str, ...]] = {
    "faults": ("-m", "faults", "tests/integration/faults", "tests/contract"),
    "seeds": ("-m", "", "tests/sim/test_simulation.py"),
    **{kind: ("-m", "", "tests/sim/test_mutants.py", "-k", kind) for kind in MUTANTS},
    "soak": ("-m", "", "tests/integration/endings/test_soak.py"),
    "times and memory": ("-m", "clock", "--ignore", "tests/integration/endings/test_soak.py"),
}
"""What pytest is asked for each: each kind of deliberate bug is a part of its own."""
MOST_ATTEMPTS = 3
RESULTS = ROOT / "benchmarks" / "results"


def outcomes(*arguments: str) -> dict[str, str]:
    """Runs pytest, and returns the outcome of each test by its name."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={report.name}", *arguments], cwd=ROOT, check=False)
        cases = ElementTree.parse(report.name).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    found = {child.tag for child in case}
    return next((tag for tag in ("error", "failure", "skipped") if tag in found), "passed")


def run(part: Sequence[str]) -> dict[str, object]:
    began_s = time.monotonic()
    attempts: dict[str, list[str]] = {name: [outcome] for name, outcome in outcomes(*part).items()}
    for _ in range(MOST_ATTEMPTS - 1):
        if not any(_failed(each) for each in attempts.values()):
            break
        for name, outcome in outcomes("--last-failed", "--last-failed-no-failures", "none", *part).items():
            attempts.setdefault(name, []).append(outcome)
    passed = collections.Counter(name.partition("::")[0] for name, each in attempts.items() if each == ["passed"])
    return {
        "command": ["pytest", *part],
        "seconds": round(time.monotonic() - began_s),
        "passed_at_once": dict(sorted(passed.items())),
        "skipped": sum(each == ["skipped"] for each in attempts.values()),
        "other": {name: each for name, each in sorted(attempts.items()) if each not in (["passed"], ["skipped"])},
    }


def _failed(attempts: Sequence[str]) -> bool:
    return attempts[-1] in ("error", "failure")


def result_file(commit: str) -> Path:
    """Returns the result file of this commit, or a new one's name."""
    for path in RESULTS.glob("*-proof.json"):
        if json.loads(path.read_text())["machine"]["baton_commit"] == commit:
            return path
    today = datetime.date.today()
    path = RESULTS / f"{today}-proof.json"
    return RESULTS / f"{today}-{commit}-proof.json" if path.exists() else path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="(default: all parts)")
    wanted = parser.parse_args().only
    about = machine.describe()
    path = result_file(str(about["baton_commit"]))
    found = json.loads(path.read_text()) if path.exists() else {"machine": about, "parts": {}}
    for name in (name for name in wanted if name not in found["parts"]):
        print(f"== {name}", flush=True)
        found["parts"][name] = {"began": f"{datetime.datetime.now(datetime.UTC):%FT%TZ}", **run(PARTS[name])}
        path.write_text(json.dumps(found, indent=1) + "\n")
    parts = found["parts"]
    for name, part in parts.items():
        print(f"{name}: {sum(part['passed_at_once'].values())} passed in {part['seconds']} s; {part['other'] or 'all'}")
    print(f"written to {path}")
    return int(any(_failed(each) for part in parts.values() for each in part["other"].values()))


if __name__ == "__main__":
    sys.exit(main())
