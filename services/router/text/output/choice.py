"""Reads which parsers the flags choose for which models. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.core.errors import ConfigError
from services.core.printable import printable


class ParserChoice:
    """Knows the values of one flag, each NAME, for all models, or MODEL=NAME for one."""

    def __init__(self, flag: str, values: Sequence[str], names: Sequence[str]) -> None:
        """Raises ConfigError, which names the flag, for a parser that is none of `names`."""
        self._of_all: str | None = None
        self._of: dict[str, str] = {}
        for value in values:
            model_id, separator, name = value.rpartition("=")
            if name not in names:
                raise ConfigError(f"{flag}: {printable(name)!r} is none of {', '.join(names)}")
            if separator:
                self._of[model_id] = name
            else:
                self._of_all = name

    def of(self, model_id: str) -> str | None:
        """Returns the parser for a model; None if the model's chat template is to choose."""
        return self._of.get(model_id, self._of_all)
