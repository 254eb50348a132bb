"""Runs `baton models`: lists the cache, and fetches into it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from services.cli.arguments import Parser
from services.cli.model_cache import list_models, models_dir
from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Models on this machine.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|pull", parser_class=Parser)
    listing = actions.add_parser("list", help="show the models in the cache")
    listing.add_argument("--json", action="store_true", help="as JSON")
    pulling = actions.add_parser("pull", help="fetch and convert a model, unless it is there")
    pulling.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"name, GGUF file or hub id (default: {DEFAULT_MODEL})"
    )
    arguments = parser.parse_args(argv)
    if arguments.action == "pull":
        model = resolve_model(arguments.model)
        print(f"{model.model_id}  {model.path}")
        return 0
    return _list(as_json=arguments.json)


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
