"""Runs `baton models`: lists the cache, and fetches into it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from services.cli.arguments import Parser
from services.cli.dtype_choice import choose_dtype
from services.cli.model_cache import DEFAULT_MODEL, list_models, models_dir
from services.cli.model_names import resolve_model
from services.cli.worker_packages import demand_torch
from services.core.config import KV_DTYPES


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Models on this machine.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|pull", parser_class=Parser)
    listing = actions.add_parser("list", help="show the models in the cache")
    listing.add_argument("--json", action="store_true", help="as JSON")
    pulling = actions.add_parser("pull", help="fetch and convert a model, unless it is there")
    pulling.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"name, GGUF file or hub id (default: {DEFAULT_MODEL})"
    )
    pulling.add_argument(
        "--time-dtypes",
        action="store_true",
        help="also find out what --dtype auto means on this CPU, for workers that can only read the cache",
    )
    pulling.add_argument(
        "--kv-dtype", choices=KV_DTYPES, default="auto", help="with --time-dtypes: that of the workers"
    )
    arguments = parser.parse_args(argv)
    if arguments.action == "pull":
        if arguments.kv_dtype != "auto" and not arguments.time_dtypes:
            pulling.error("--kv-dtype says what --time-dtypes times over: give both")
        if arguments.time_dtypes:
            demand_torch("timing types")
        model = resolve_model(arguments.model)
        print(f"{model.model_id}  {model.path}")
        if arguments.time_dtypes:
            choice = choose_dtype("auto", "cpu", model.path, kv_dtype=arguments.kv_dtype, tell=_tell)
            if choice.reason:
                print(f"--dtype auto means {choice.dtype}: {choice.reason}")
        return 0
    return _list(as_json=arguments.json)


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _list(*, as_json: bool) -> int:
    root = models_dir()
    models = list_models(root)
    if as_json:
        print(json.dumps([{"model_id": model.model_id, "path": str(model.path)} for model in models]))
        return 0
    for model in models:
        print(f"{model.model_id}  {model.path}")
    if DEFAULT_MODEL not in {model.model_id for model in models}:
        print(f"{DEFAULT_MODEL}  (not fetched: baton models pull)")
    return 0
