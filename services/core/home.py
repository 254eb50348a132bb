"""Names the directories in which Baton keeps its files on this machine."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from services.core.errors import ConfigError


def baton_home(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """Returns `$BATON_HOME`, else `baton` in the XDG cache directory. The directory need not exist yet.

    Raises ConfigError if it is in the home of a user who has none, as users of containers may.
    """
    environ = os.environ if environ is None else environ
    home, cache = environ.get("BATON_HOME", ""), environ.get("XDG_CACHE_HOME", "")
    if home:
        return _expanded(home).resolve()
    return _expanded(cache if cache.startswith("/") else "~/.cache") / "baton"


def baton_state(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """Returns the directory for what is kept of a run, such as logs: `$BATON_HOME`, else `baton` in the XDG state
    directory. The directory need not exist yet. Raises ConfigError as `baton_home` does."""
    environ = os.environ if environ is None else environ
    if environ.get("BATON_HOME", ""):
        return baton_home(environ)
    state = environ.get("XDG_STATE_HOME", "")
    return _expanded(state if state.startswith("/") else "~/.local/state") / "baton"


def _expanded(path: str) -> pathlib.Path:
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"BATON_HOME: {path} is in no user's home; set it to a folder that can be written") from error
