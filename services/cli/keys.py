"""Runs `baton keys`: makes an API key and adds what a tenants file keeps of it, or says what it would keep of one.

A key is shown once, on standard output, and written nowhere. Owns: what is printed, and the file that is written.
Never: the form of keys (`router/tenants/keys.py`), or where in the file an entry goes (`router/tenants/new_entry.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import pathlib
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace

from services.cli.arguments import Parser
from services.core.errors import ConfigError, InvalidKey
from services.core.own_files import write_whole
from services.core.printable import printable
from services.router.tenants.keys import MOST_KEY_CHARS, key_of, new_key
from services.router.tenants.new_entry import entry_of, with_key
from services.router.tenants.tenant import ApiKey
from services.router.tenants.tenants_file import expiry, tenant_name

_FILE = "tenants.yaml"


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="API keys of tenants: makes one, or digests one for the tenants file.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="new|hash", parser_class=Parser)
    new = actions.add_parser("new", help="make a key of a tenant, print it, and add its digest to the tenants file")
    new.add_argument("name", metavar="NAME", help="the tenant, new or with keys already: all of them open")
    new.add_argument(
        "--tenants",
        default=os.environ.get("BATON_TENANTS") or _FILE,
        metavar="FILE",
        help=f"the file, made if it is not there (default: {_FILE}) [BATON_TENANTS]",
    )
    hash_ = actions.add_parser("hash", help="read a key from standard input, and print its entry for the file")
    for action in (new, hash_):
        action.add_argument("--expires", metavar="DATE", help="2027-01-31, or 2027-01-31T12:00:00Z (default: never)")
    arguments = parser.parse_args(argv)
    expires_unix_s = None if arguments.expires is None else expiry(arguments.expires, "--expires")
    if arguments.action == "new":
        _add(arguments, expires_unix_s)
    else:
        print("\n".join(_entry(_kept_of(_read_key()), arguments.expires)))
    return 0


def _add(arguments: argparse.Namespace, expires_unix_s: float | None) -> None:
    key, name = new_key(), tenant_name(arguments.name, "NAME")
    kept = replace(_kept_of(key), expires_unix_s=expires_unix_s)
    path = pathlib.Path(arguments.tenants).resolve()  # a link stays one
    origin = f"--tenants: {printable(str(path))}"
    try:
        before = path.stat() if path.exists() else None
        data = path.read_bytes() if before else b""
        write_whole(path, with_key(data, origin, name, kept, _entry(kept, arguments.expires)))
        if before:  # whoever could read it still can
            with contextlib.suppress(PermissionError):  # only root gives files away
                os.chown(path, before.st_uid, before.st_gid)
            path.chmod(stat.S_IMODE(before.st_mode))
    except OSError as error:
        raise ConfigError(f"{origin}: {error.strerror}") from error
    print(key)
    print(
        f"{printable(str(path))} keeps the SHA-256 of this key of {name}. The key is shown once: give it to whoever is "
        "to use it.",
        file=sys.stderr,
    )


def _entry(kept: ApiKey, expires: str | None) -> list[str]:
    return entry_of(kept.key_id, kept.digest.hex(), expires)


def _kept_of(key: str) -> ApiKey:
    try:
        return key_of(key)
    except InvalidKey as error:
        raise ConfigError(str(error)) from None


def _read_key() -> str:
    """Returns the key from standard input: a flag would show it to every user of the machine, and to the shell's
    history."""
    if sys.stdin.isatty():
        return getpass.getpass("key: ").strip()
    return sys.stdin.readline(MOST_KEY_CHARS + 2).strip()
