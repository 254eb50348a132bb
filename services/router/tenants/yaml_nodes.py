"""Reads YAML into nodes that know their lines, so that an error can name the line.

It takes less than YAML allows: one document, no aliases, tags or complex keys, and bounds on size and depth. Values
stay texts; whoever knows the field says what they mean. So a country `no` is no boolean, and nothing that a file says
makes an object. Owns: YAML. Never: what a file may say (`tenants_file.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from services.core.errors import ConfigError
from services.core.printable import printable

MOST_BYTES = 64 << 20
_MOST_DEPTH = 8
_MOST_CHARS = 1024
"""The length of a single text."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast


@dataclass(slots=True)
class YamlNode:
    """Holds one value and the line on which it begins."""

    line: int
    """Counted from 1."""
    value: str | list[YamlNode] | dict[str, tuple[int, YamlNode]]
    """A text, a list, or a mapping with the line of each key."""
    is_quoted: bool = False
    """Whether it is a text that was written in quotes, or as a block."""


def read_yaml(data: bytes, origin: str) -> YamlNode:
    """Returns the document. Raises ConfigError, whose message begins with `origin` and the line."""
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{origin}: it has more than {MOST_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin}:{_line_of(data, error.start)}: it is not in UTF-8") from error
    try:
        return _Composer(yaml.parse(text, Loader=_LOADER), origin).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{origin}:{mark.line + 1}" if mark is not None else origin
        raise ConfigError(f"{where}: {printable(error.problem or 'it is not YAML')}") from error
    except yaml.reader.ReaderError as error:
        line = _line_of(text.encode(), error.position)
        raise ConfigError(f"{origin}:{line}: {printable(error.reason)}") from error


def _line_of(data: bytes, offset: int) -> int:
    return data.count(b"\n", 0, max(0, offset)) + 1


class _Composer:
    """Makes nodes of the parser's events. It is not recursive beyond `_MOST_DEPTH`."""

    def __init__(self, events: Iterator[Any], origin: str) -> None:
        self._events = events
        self._origin = origin
        self._path: list[str] = []
        """The keys above the value that is being read."""

    def document(self) -> YamlNode:
        next(self._events)  # the beginning of the stream
        first = next(self._events)
        if isinstance(first, yaml.StreamEndEvent):
            raise ConfigError(f"{self._origin}: it is empty")
        root = self._node(next(self._events), 0)
        next(self._events)  # the end of the document
        further = next(self._events)
        if not isinstance(further, yaml.StreamEndEvent):
            raise self._error(further, "a second document begins here; there may be one")
        return root

    def _node(self, event: Any, depth: int) -> YamlNode:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise self._error(event, "aliases (*) are not allowed")
        if event.anchor is not None or event.tag is not None:
            raise self._error(event, "anchors (&) and tags (!) are not allowed")
        if isinstance(event, yaml.ScalarEvent):
            if len(event.value) > _MOST_CHARS:
                raise self._error(event, f"a text has more than {_MOST_CHARS} characters")
            return YamlNode(line, event.value, is_quoted=bool(event.style))
        if depth == _MOST_DEPTH:
            raise self._error(event, f"it is nested more than {_MOST_DEPTH} deep")
        if isinstance(event, yaml.SequenceStartEvent):
            return YamlNode(line, list(self._items(depth)))
        return YamlNode(line, self._mapping(depth))

    def _items(self, depth: int) -> Iterator[YamlNode]:
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            yield self._node(event, depth + 1)

    def _mapping(self, depth: int) -> dict[str, tuple[int, YamlNode]]:
        found: dict[str, tuple[int, YamlNode]] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, depth + 1)
            if not isinstance(key.value, str):
                raise self._error(event, "a key must be a text")
            if key.value in found:
                raise self._error(event, f"{printable(key.value)!r} stands on line {found[key.value][0]} already")
            self._path.append(key.value)
            found[key.value] = (key.line, self._node(next(self._events), depth + 1))
            self._path.pop()
        return found

    def _error(self, event: Any, what: str) -> ConfigError:
        place = f"{printable('.'.join(self._path)[:200])}: " if self._path else ""
        return ConfigError(f"{self._origin}:{event.start_mark.line + 1}: {place}{what}")
