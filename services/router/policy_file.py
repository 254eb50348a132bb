"""Reads the policies of models, as flags and a TOML file choose them.

Owns: the file's bytes and its form as TOML. Never: what it may say (`policy/selection.py`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from services.core.errors import ConfigError
from services.core.printable import printable
from services.router.policy import Selection

_MAX_BYTES = 1 << 20
"""No policy file is larger; a mistaken path, such as a device's, may have no end."""


def read_selection(policies: Sequence[str], weights: Sequence[str], file: str) -> Selection:
    """Returns the policies by the values of --policy, --policy-weight and --policy-file. Raises ConfigError, which
    names the flag, or the file and the field."""
    return Selection(policies, weights, _content(file) if file else None, file)


def _content(file: str) -> dict[str, object]:
    origin = f"--policy-file: {printable(file)}"
    try:
        with open(Path(file), "rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{origin}: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{origin}: it has more than {_MAX_BYTES} bytes")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # no TOML, or no UTF-8
        raise ConfigError(f"{origin}: {printable(str(error))}") from error
