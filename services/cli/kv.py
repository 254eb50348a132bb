"""Runs `baton kv size`: reckons what KV takes, before there is anything to measure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from services.cli.arguments import Parser
from services.cli.dtype_choice import saved_dtype
from services.cli.model_names import resolve_model
from services.core.config import KV_DTYPES
from services.core.errors import ConfigError, UnknownModel
from services.core.process_config import DEFAULT_MODEL
from services.core.sizes import parse_size
from services.kv.sizing import KVSize, kv_shape_of, size_of

_LINKS = {"disk": 0.7, "10 Gbit/s": 1.1, "100 Gbit/s": 11.0, "memory": 10.0}
"""The GB/s of what KV is moved over where nothing is said."""


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="The KV cache: how much memory it takes.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="size", parser_class=Parser)
    size = actions.add_parser("size", help="bytes a token, sequences that fit, time to move one")
    size.add_argument(
        "--model", default=DEFAULT_MODEL, help="name, directory, GGUF file or hub id (default: %(default)s)"
    )
    size.add_argument("--tokens", default="2048", help="tokens of a sequence, prompt and output (default: %(default)s)")
    size.add_argument("--bytes", default="16GiB", help="memory of a pool, a tier or a store (default: %(default)s)")
    size.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="auto: as the model was saved")
    size.add_argument("--block-size", default="16", help="tokens in a block (default: %(default)s)")
    size.add_argument(
        "--link",
        action="append",
        metavar="GB/S",
        help="GB/s of the link over which KV is moved; repeatable (default: some disks and networks)",
    )
    size.add_argument(
        "--ms-per-token",
        help="what computing a prompt's token takes, as baton status says: from which length on splitting pays",
    )
    size.add_argument("--json", action="store_true", help="as JSON")
    return _size(parser.parse_args(argv))


def _size(arguments: argparse.Namespace) -> int:
    num_tokens = _whole(arguments.tokens, "--tokens", 1 << 30)
    block_size = _whole(arguments.block_size, "--block-size", 1024)
    try:
        memory = parse_size(arguments.bytes)
    except ValueError as error:
        raise ConfigError(f"--bytes: {error}") from None
    given = arguments.link or []
    links = [(f"{text} GB/s", _number(text, "--link")) for text in given] or [
        (f"{name} ({rate:g} GB/s)", rate) for name, rate in _LINKS.items()
    ]
    ms_per_token = _number(arguments.ms_per_token, "--ms-per-token") if arguments.ms_per_token else None
    model = resolve_model(arguments.model)
    config = _config(model.path)
    saved = saved_dtype(model.path)
    dtype = arguments.kv_dtype if arguments.kv_dtype != "auto" else saved if saved in KV_DTYPES else "float32"
    found = size_of(kv_shape_of(config), dtype, block_size, num_tokens)
    if arguments.json:
        print(json.dumps(_plain(found, model.model_id, dtype, memory, links, ms_per_token)))
    else:
        print("\n".join(_lines(found, model.model_id, dtype, memory, links, ms_per_token)))
    return 0


def _lines(
    size: KVSize,
    model_id: str,
    dtype: str,
    memory: int,
    links: Sequence[tuple[str, float]],
    ms_per_token: float | None,
) -> list[str]:
    lines = [
        f"{model_id}, KV in {dtype}, blocks of {size.block_size} tokens",
        f"  a token      {size.token_bytes:,} bytes",
        f"  a block      {size.block_bytes:,} bytes",
        f"  a sequence   {size.num_tokens:,} tokens: {size.num_blocks:,} blocks, {size.num_bytes / 1e6:,.1f} MB",
        f"  {memory / (1 << 30):,.3g} GiB hold {memory // size.block_bytes:,} blocks: "
        f"{size.num_sequences(memory):,} such sequences, if they share nothing",
    ]
    for name, rate in links:
        lines.append(
            f"  to move one  {1e3 * size.seconds(rate * 1e9):,.1f} ms over {name}{_pays(size, rate, ms_per_token)}"
        )
    if ms_per_token is not None:
        lines.append(f"  to compute   {size.num_tokens * ms_per_token:,.1f} ms at {ms_per_token:g} ms a token")
        least = size.token_bytes / ms_per_token / 1e6
        lines.append(f"  moving it is faster above {least:.3g} GB/s")
    return lines


def _pays(size: KVSize, rate: float, ms_per_token: float | None) -> str:
    if ms_per_token is None:
        return ""
    pays_from = size.pays_from(rate * 1e9, ms_per_token)
    return f": splitting pays from {pays_from:,} tokens on" if pays_from else ": computing it takes less, at any length"


def _plain(
    size: KVSize,
    model_id: str,
    dtype: str,
    memory: int,
    links: Sequence[tuple[str, float]],
    ms_per_token: float | None,
) -> dict[str, object]:
    pays: dict[str, object] = {}
    if ms_per_token is not None:
        pays["pays_from_tokens"] = {name: size.pays_from(rate * 1e9, ms_per_token) for name, rate in links}
    return pays | {
        "model": model_id,
        "kv_dtype": dtype,
        "token_bytes": size.token_bytes,
        "block_bytes": size.block_bytes,
        "num_blocks": size.num_blocks,
        "num_bytes": size.num_bytes,
        "num_sequences": size.num_sequences(memory),
        "ms_to_move": {name: 1e3 * size.seconds(rate * 1e9) for name, rate in links},
    }


def _config(path: Path) -> dict[str, object]:
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UnknownModel(f"{path}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UnknownModel(f"{path}: config.json is no object")
    return config


def _whole(text: str, flag: str, most: int) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:20]) <= most:
        raise ConfigError(f"{flag}: {text!r} is no whole number in [1, {most}]")
    return int(text)


def _number(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e6:
        raise ConfigError(f"{flag}: {text!r} is no number in [0.000001, 1000000]")
    return value
