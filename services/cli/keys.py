"""Runs `baton keys`: makes API keys, and says what a tenants file keeps of them.

A key is shown once, on standard output, and written nowhere. Owns: what is printed. Never: the form of keys
(`router/tenants/keys.py`), or which tenants there are: the file is edited by hand.
"""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from collections.abc import Sequence

from services.cli.arguments import Parser
from services.core.errors import ConfigError, InvalidKey
from services.router.tenants.keys import MOST_KEY_CHARS, key_of, new_key
from services.router.tenants.tenant import ApiKey
from services.router.tenants.tenants_file import expiry


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="API keys of tenants: makes one, or digests one for the tenants file.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="new|hash", parser_class=Parser)
    new = actions.add_parser("new", help="make a key, and print it with its entry for the file (--tenants)")
    hash_ = actions.add_parser("hash", help="read a key from standard input, and print its entry for the file")
    for action in (new, hash_):
        action.add_argument("--expires", metavar="DATE", help="2027-01-31, or 2027-01-31T12:00:00Z (default: never)")
        action.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    if arguments.expires is not None:
        expiry(arguments.expires, "--expires")
    key = new_key() if arguments.action == "new" else _read_key()
    try:
        kept = key_of(key)
    except InvalidKey as error:
        raise ConfigError(str(error)) from None
    _print(arguments, key, kept)
    return 0


def _read_key() -> str:
    """Returns the key from standard input: a flag would show it to every user of the machine, and to the shell's
    history."""
    if sys.stdin.isatty():
        return getpass.getpass("key: ").strip()
    return sys.stdin.readline(MOST_KEY_CHARS + 2).strip()


def _print(arguments: argparse.Namespace, key: str, kept: ApiKey) -> None:
    entry = {"id": kept.key_id, "sha256": kept.digest.hex()}
    if arguments.expires is not None:
        entry["expires"] = arguments.expires
    is_new = arguments.action == "new"
    if arguments.json:
        print(json.dumps(({"key": key} if is_new else {}) | entry))
        return
    if is_new:
        print(
            f"{key}\n\n# Give the key to whoever is to use it: it is shown once. The tenants file keeps, under `keys:`"
        )
    lines = [f"{name}: {value}" for name, value in entry.items()]
    print("- " + "\n  ".join(lines))
