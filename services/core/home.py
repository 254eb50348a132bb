"""Names the directories in which Baton keeps its files on this machine."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from services.core.errors import ConfigError


def baton_home(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """Returns `$BATON_HOME`, else `baton` in the XDG cache directory. The directory need not exist yet.

    Raises ConfigError if the variable names the home of a user who has none.
    """
    environ = os.environ if environ is None else environ
    home, cache = environ.get("BATON_HOME", ""), environ.get("XDG_CACHE_HOME", "")
    if home:
        try:
            return pathlib.Path(home).expanduser().resolve()
        except RuntimeError as error:
            raise ConfigError(f"BATON_HOME: {home!r} is in no user's home: {error}") from error
    root = pathlib.Path(cache) if cache.startswith("/") else pathlib.Path("~/.cache").expanduser()
    return root / "baton"


def baton_state(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """Returns the directory for what is kept of a run, such as logs: `$BATON_HOME`, else `baton` in the XDG state
    directory. The directory need not exist yet. Raises ConfigError as `baton_home` does."""
    environ = os.environ if environ is None else environ
    if environ.get("BATON_HOME", ""):
        return baton_home(environ)
    state = environ.get("XDG_STATE_HOME", "")
    return (pathlib.Path(state) if state.startswith("/") else pathlib.Path("~/.local/state").expanduser()) / "baton"
