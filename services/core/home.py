"""Names the directory in which Baton keeps its files on this machine."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping


def baton_home(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """Returns `$BATON_HOME`, else `baton` in the XDG cache directory. The directory need not exist yet."""
    environ = os.environ if environ is None else environ
    home, cache = environ.get("BATON_HOME", ""), environ.get("XDG_CACHE_HOME", "")
    if home:
        return pathlib.Path(home).expanduser().resolve()
    root = pathlib.Path(cache) if cache.startswith("/") else pathlib.Path("~/.cache").expanduser()
    return root / "baton"
