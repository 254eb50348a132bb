"""`baton status`: the cluster as its router sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from baton.v1 import control_pb2, control_pb2_grpc
from services.cli.arguments import Parser, add_target
from services.cli.client import connect, plain

_CLASSES = ("importing", "leased", "active", "cached", "free")
_HEADINGS = ("worker", "role", "state", "pid", "address", "run", "wait", *_CLASSES, "sessions", "age")


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Shows the workers, their load and their blocks.")
    add_target(parser)
    parser.add_argument("--json", action="store_true", help="everything the router knows, as JSON")
    arguments = parser.parse_args(argv)
    with connect(arguments.target) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        status = plain(stub.GetStatus(control_pb2.GetStatusRequest(), timeout=arguments.timeout))
    print(json.dumps(status) if arguments.json else _text(arguments.target, status))
    return 0


def _text(target: str, status: dict[str, Any]) -> str:
    ready = "ready" if status["ready"] else "not ready"
    lines = [
        f"router {target}{_http(target, status)}  pid {status['router_pid']}"
        f"  model {status['model_id'] or '-'}  {ready}",
        "requests  "
        + "  ".join(f"{name} {status['num_' + name]}" for name in ("queued", "prefilling", "parked", "decoding")),
        "",
        *_table([_HEADINGS, *(_row(worker) for worker in status["workers"])]),
    ]
    reasons = [f"{_id(worker)}: {worker['reason']}" for worker in status["workers"] if worker["reason"]]
    ways = [
        f"{pair['prefill']} -> {pair['decode']}: {pair['state']}; {pair['reason']}"
        for pair in status["pairs"]
        if pair["reason"]
    ]
    return "\n".join([*lines, *reasons, *ways])


def _http(target: str, status: dict[str, Any]) -> str:
    """Where the router's HTTP is, seen from here."""
    host = target.rpartition(":")[0]
    return f"  http://{host}:{status['http_port']}/v1" if status["http_port"] else ""


def _row(status: dict[str, Any]) -> tuple[str, ...]:
    worker, load = status.get("worker", {}), status.get("load")
    counts = ["-"] * (2 + len(_CLASSES))
    age = "-"
    if load is not None:
        counts = [str(load[name]) for name in ("num_running", "num_waiting", *(f"blocks_{name}" for name in _CLASSES))]
        age = f"{status['load_age_ms']} ms"
    identity = (_id(status), worker.get("role", "-"), status["state"], str(worker.get("pid", "-")))
    return (*identity, worker.get("address", "-"), *counts, str(status["num_sessions"]), age)


def _id(status: dict[str, Any]) -> str:
    return str(status.get("worker", {}).get("worker_id", "-"))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_pad(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _pad(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() and ":" not in cell else cell.ljust(width)
