"""Compares what a streamed token costs two routers: this checkout's and another's, `python -m
benchmarks.router_streams.against CHECKOUT --repeats N --json FILE`.

Both serve their streams over HTTP at the same time, from the same workers without an engine (`workers.py`) and to the
same client, and are measured in the same windows: what else the machine does falls on both. Figures are the processor
time of each router's process over the tokens that its streams had in the window.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
import time
from pathlib import Path

from benchmarks.figure import Figure, Findings, ratio
from benchmarks.machine import baton_commit
from benchmarks.result import Result
from benchmarks.router_streams.measure import client_of, cpu_s, router_process, until, workers_process
from benchmarks.settings import add_flags, read, setting
from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL

_MAX_TOKENS = 8_000


@dataclasses.dataclass(frozen=True)
class AgainstSettings:
    streams: int = setting(64, "streams open at each router")
    step_ms: float = setting(20.0, "of the decode worker's step: each stream has a token in each")
    window_s: float = setting(10.0, "seconds of each measurement")


def measure(other: Path, model: str, path: str, repeats: int, settings: AgainstSettings) -> Findings:
    """Returns the processor time that a token takes in each router, and their ratio. `path` is the model's folder."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        routers = [
            stack.enter_context(router_process(path, folder, checkout=checkout)) for checkout in (Path.cwd(), other)
        ]
        stack.enter_context(
            workers_process(model, path, routers, folder, num_prefill=1, num_decode=1, step_ms=settings.step_ms)
        )
        for router in routers:
            until(router.all_proven, "all pairs are proven", 300.0)
        client = stack.enter_context(client_of("http", routers, (32, 32), _MAX_TOKENS, folder))
        client.open(2 * settings.streams)
        time.sleep(2.0)
        taken: list[list[float]] = []
        for _ in range(repeats):
            before_s, before = [cpu_s(router) for router in routers], client.num_tokens()
            time.sleep(settings.window_s)
            used_s = [cpu_s(router) - then for router, then in zip(routers, before_s, strict=True)]
            client.check()
            came = [now - then for now, then in zip(client.num_tokens(), before, strict=True)]
            taken.append([seconds * 1e6 / number for seconds, number in zip(used_s, came, strict=True)])
    what, (here, there) = f"{settings.streams} streams over HTTP", zip(*taken, strict=True)
    return [
        Figure(f"{what}: this checkout's router, CPU a token", "us", here),
        Figure(f"{what}: the other's", "us", there),
        ratio("  this over the other", here, there, "<= 0.8"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_streams.against",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path, help="of the other router")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer makes the text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("out/router-against.json"), help="the result file")
    add_flags(parser, "streams", AgainstSettings)
    arguments = parser.parse_args()
    settings_of_run = {name: value for name, value in vars(arguments).items() if name not in ("json", "checkout")}
    result = Result(settings_of_run | {"other_commit": baton_commit(arguments.checkout)})
    path = str(resolve_model(arguments.model).path)
    settings = read(AgainstSettings, arguments)
    result.add(measure(arguments.checkout, arguments.model, path, arguments.repeats, settings))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
