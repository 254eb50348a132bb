"""Reads a request's body: within bounds, counted, parsed as JSON, its fields taken one by one with their types checked.

A body is counted in its bytes before it is parsed, since two bytes can be an empty object, which takes about a hundred
in memory. Every error names the field as the client wrote it. JSON's null is the same as leaving a field out. Lists are
bounded before they are walked through, since that happens on the event loop. Never: ranges.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.types import Receive

from services.core.errors import Cancelled, InvalidRequest, MalformedMessage, MessageTooLarge
from services.router.front.call import Charge
from services.router.front.http.reply import HttpError, plain_error

SMALL_BYTES = 64 << 10
"""Bodies of at most this many bytes are not counted: they can do no harm."""
MAX_CONTAINERS = 1 << 14
MAX_STRINGS = 1 << 14
"""The most strings in a body, keys included."""
MAX_ENTRIES = (1 << 20) + (1 << 14)
"""The most entries of all lists and objects: a prompt of token ids of the largest size, and what else there is."""
# Matches up to the end of the string, or as far as one step may go. Possessive: nothing is kept for backtracking.
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+){0,4096}+', re.DOTALL)
_CONTAINERS = b"[{"
_ENTRIES = b","
# Seconds for a body to arrive; a client that takes longer is not going to send it.
BODY_WITHIN_S = 60.0
MAX_FIELDS = 256
_JSON = re.compile(r"application/(json|[\w.+-]+\+json)", re.ASCII | re.IGNORECASE)
INT32 = (-(1 << 31), (1 << 31) - 1)


@dataclass(frozen=True)
class BodyLimits:
    max_bytes: int
    max_text_bytes: int
    """The most bytes of any one string, in UTF-8."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a large body is parsed, so that only one is parsed at a time."""


def no_json(headers: Headers) -> HttpError | None:
    """Returns the error for a body that is declared as compressed or not declared as JSON, else None.

    `curl -d` alone declares a form, as web pages may without a preflight.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip()
    if not _JSON.fullmatch(kind):
        message = f"content-type: is {kind[:256]!r}; it must be application/json"
        return plain_error(415, message, "unsupported_media_type")
    encodings = ",".join(headers.getlist("content-encoding")) or "identity"
    if any(encoding.strip().lower() != "identity" for encoding in encodings.split(",")):
        message = f"content-encoding: is {encodings[:256]!r}; send the body as it is"
        return plain_error(415, message, "unsupported_content_encoding", {"accept-encoding": "identity"})
    return None


async def read_body(receive: Receive, headers: Headers, limits: BodyLimits, charge: Charge) -> Body:
    """Reads and parses the body.

    Raises MessageTooLarge, MalformedMessage, InvalidRequest, Overloaded if `charge` has no room for its bytes, or
    Cancelled if the client goes away meanwhile.
    """
    max_bytes = limits.max_bytes
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise MessageTooLarge(f"the body has {announced} bytes; at most {max_bytes} are allowed")
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            data = await _read(receive, max_bytes, charge)
    except TimeoutError as error:
        raise MalformedMessage(f"the body did not arrive within {BODY_WITHIN_S:g} s") from error
    if len(data) <= SMALL_BYTES:
        return Body(_parse(data))
    # One at a time, on a thread: many large bodies at once would delay running streams for as long as all of them take.
    async with limits.turn:
        return Body(await asyncio.to_thread(_counted, data, limits.max_text_bytes))


async def _read(receive: Receive, max_bytes: int, charge: Charge) -> bytes:
    parts, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away before its request was whole")
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise MessageTooLarge(f"the body has more than {max_bytes} bytes")
        charge.grow(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _counted(data: bytes, max_text_bytes: int) -> Mapping[str, Any]:
    check_counts(data, max_text_bytes)
    return _parse(data)


def _parse(data: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, absurd numbers, or nested too deeply
        raise MalformedMessage(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedMessage("the body is not a JSON object")
    if len(fields) > MAX_FIELDS:
        raise MalformedMessage(f"the body has {len(fields)} fields; at most {MAX_FIELDS} are allowed")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def check_counts(data: bytes, max_text_bytes: int) -> None:
    """Raises MalformedMessage if the body exceeds the limits. What is not JSON is left for the parser to report."""
    if len(data) <= SMALL_BYTES:
        return
    containers = entries = strings = position = 0
    while True:
        quote = data.find(b'"', position)
        outside = data[position : quote if quote >= 0 else len(data)]
        containers += _count(outside, _CONTAINERS)
        entries += _count(outside, _ENTRIES)
        if containers > MAX_CONTAINERS or entries > MAX_ENTRIES:
            raise MalformedMessage(
                f"the body has more than {MAX_CONTAINERS} lists and objects, or more than {MAX_ENTRIES} entries in them"
            )
        if quote < 0:
            return
        strings += 1
        if strings > MAX_STRINGS:
            raise MalformedMessage(f"the body has more than {MAX_STRINGS} strings")
        position = _string(data, quote + 1, max_text_bytes)


def _count(part: bytes, wanted: bytes) -> int:
    return len(part) - len(part.translate(None, wanted))


def _string(data: bytes, begin: int, max_text_bytes: int) -> int:
    """Returns the position after the string that begins at `begin`."""
    end, text_bytes = begin, 0
    while True:
        found = _IN_STRING.match(data, end)
        assert found is not None
        step, end = found.start(), found.end()
        # An escape stands for at least one byte; it takes two bytes here, or six if it begins with \\u.
        text_bytes += end - step - data.count(b"\\", step, end) - 4 * data.count(b"\\u", step, end)
        if text_bytes > max_text_bytes:
            raise MalformedMessage(f"the body has a string of more than {max_text_bytes} bytes")
        if end == step or data[end : end + 1] != b"\\":
            return end + 1


class Body:
    """Reads the fields of a JSON object. Fields that were never taken are unknown."""

    def __init__(self, fields: Mapping[str, Any], path: str = "") -> None:
        self._fields = fields
        self._path = path
        self._taken: set[str] = set()

    def take(self, name: str) -> Any:
        """Returns the field's value unchecked, or None if it is absent, and marks it as known."""
        self._taken.add(name)
        return self._fields.get(name)

    def path(self, name: str) -> str:
        """Returns the field's name in errors."""
        return f"{self._path}.{name}" if self._path else name

    def unknown(self) -> list[str]:
        return sorted(self._fields.keys() - self._taken)

    def refuse_unknown(self) -> None:
        """Raises InvalidRequest for a field that was never taken and has a value."""
        if unknown := [name for name in self.unknown() if self._fields[name] is not None]:
            raise InvalidRequest(self.path(unknown[0][:64]), "is not supported by this server")

    def boolean(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(self.path(name), "must be true or false")
        return value

    def whole(self, name: str, bounds: tuple[int, int] = INT32) -> int | None:
        value = self.take(name)
        return None if value is None else as_whole(value, self.path(name), bounds)

    def number(self, name: str) -> float | None:
        value = self.take(name)
        return None if value is None else as_number(value, self.path(name))

    def text(self, name: str) -> str | None:
        value = self.take(name)
        return None if value is None else as_text(value, self.path(name))

    def items(self, name: str, most: int) -> list[Any]:
        value = self.take(name)
        return [] if value is None else as_list(value, self.path(name), most)

    def record(self, name: str) -> Body:
        """Returns the object in this field; an empty one if it is absent."""
        value = self.take(name)
        return Body({} if value is None else as_record(value, self.path(name)), self.path(name))


def as_whole(value: Any, param: str, bounds: tuple[int, int] = INT32) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(param, "must be a whole number")
    if not bounds[0] <= value <= bounds[1]:
        raise InvalidRequest(param, f"is out of range: it must be in [{bounds[0]}, {bounds[1]}]")
    return value


def as_number(value: Any, param: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(param, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(param, "is out of range")
    return number


def as_text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(param, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can express half of a surrogate pair
        raise InvalidRequest(param, "has a character that is none: half of a surrogate pair") from error
    return value


def as_list(value: Any, param: str, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(param, "must be a list")
    bounded(value, param, most)
    return value


def bounded(value: Sized, param: str, most: int) -> None:
    if len(value) > most:
        raise InvalidRequest(param, f"has {len(value)} entries; at most {most} are allowed")


def as_record(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(param, "must be an object")
    return value
