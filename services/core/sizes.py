"""Reads amounts of memory as people write them: 4GiB, 512MiB, or a plain number of bytes. Pure."""

from __future__ import annotations

import re

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d{1,15})\s*([A-Z]*)", re.ASCII | re.IGNORECASE)
MOST_BYTES = 1 << 50
A_SIZE = "is no size such as 4GiB, 512MiB or 1000000 (bytes)"


def parse_size(text: str) -> int:
    """Returns the number of bytes. Raises ValueError unless the text is a size of at most `MOST_BYTES`."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or int(found[1]) * unit > MOST_BYTES:
        raise ValueError(f"{text[:32]!r} {A_SIZE}")
    return int(found[1]) * unit


def is_size(text: str) -> bool:
    """Returns whether the text is a size other than 0."""
    try:
        return parse_size(text) > 0
    except ValueError:
        return False
