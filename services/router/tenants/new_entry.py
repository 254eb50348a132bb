"""Adds a key to the text of a tenants file, whose other lines stay as they are, comments too.

PyYAML has no writer that keeps what people wrote. So lines are put between others where the file's nodes say, and the
result is read and compared: what is not exactly the same tenants and one key more is refused. Owns: where an entry
goes. Never: the file on the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import yaml

from services.core.errors import ConfigError
from services.router.tenants.tenant import ApiKey, Tenant
from services.router.tenants.tenants_file import node_of, read_tenants

_STEP = "  "


def entry_of(key_id: str, sha256: str, expires: str | None = None) -> list[str]:
    """Returns the lines of a key under `keys:`."""
    fields = [f"id: {key_id}", f"sha256: {sha256}", *([f"expires: {expires}"] if expires is not None else [])]
    return [("  " if index else "- ") + field for index, field in enumerate(fields)]


def with_key(data: bytes, origin: str, name: str, key: ApiKey, entry: Sequence[str]) -> bytes:
    """Returns the file with one key more of the tenant of that name, which may be new; the file too, if it is empty.

    Raises ConfigError, which begins with `origin`, if it is wrong, or written so that nothing can be put between.
    """
    lines = data.decode(errors="replace").splitlines(keepends=True)
    before = dict[str, Tenant]()
    place, added = 0, ["tenants:", *_in([f"{name}:", *_in(["keys:", *_in(entry)])])]
    if data.strip():
        before = read_tenants(data, origin)
        tenants = next(value for key, value in node_of(data, origin).value if key.value == "tenants")
        place, added = _place(tenants, name, entry)
    if lines and place == len(lines) and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    changed = "".join([*lines[:place], *(f"{line}\n" for line in added), *lines[place:]]).encode()
    old = before.get(name, Tenant(name))
    wanted = before | {name: replace(old, keys=(*old.keys, key))}
    try:
        is_right = read_tenants(changed, origin) == wanted
    except ConfigError:
        is_right = False
    if not is_right:
        raise ConfigError(
            f"{origin}: tenants.{name}: it is not written one field to a line; "
            "write it so, or add what `baton keys hash` prints of a key"
        )
    return changed


def _in(lines: Sequence[str], column: int = len(_STEP)) -> list[str]:
    return [" " * column + line for line in lines]


def _place(tenants: yaml.Node, name: str, entry: Sequence[str]) -> tuple[int, list[str]]:
    """Returns before which line, counted from 0, which lines are put."""
    first, _ = tenants.value[0]
    found = next((pair for pair in tenants.value if pair[0].value == name), None)
    if found is None:
        return _end(tenants), _in([f"{name}:", *_in(["keys:", *_in(entry)])], first.start_mark.column)
    fields = found[1].value
    keys = next((value for key, value in fields if key.value == "keys"), None)
    if keys is None:
        return fields[0][0].start_mark.line, _in(["keys:", *_in(entry)], fields[0][0].start_mark.column)
    return _end(keys), _in(entry, keys.start_mark.column)


def _end(node: yaml.Node) -> int:
    """Returns the line behind the last one of a node."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return int(node.end_mark.line) + 1
    last = node.value[-1]
    return _end(last[1] if isinstance(node, yaml.MappingNode) else last)
