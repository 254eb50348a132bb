"""A request's body: read within bounds, parsed as JSON, its fields taken one by one with their types checked.

Every error names the field as the client wrote it. JSON's null is the same as leaving a field out. Lists are bounded
before anyone walks through them, since that happens on the event loop. Never: ranges.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sized
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.types import Receive

from services.core.errors import Cancelled, InvalidRequest, MalformedMessage, MessageTooLarge

# A client that has not sent its body by then is not going to.
BODY_WITHIN_S = 60.0
MAX_FIELDS = 256
INT32 = (-(1 << 31), (1 << 31) - 1)


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> Body:
    """Raises MessageTooLarge, MalformedMessage, InvalidRequest, or Cancelled if the client goes away meanwhile."""
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise MessageTooLarge(f"the body has {announced} bytes; at most {max_bytes} are allowed")
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            data = await _read(receive, max_bytes)
    except TimeoutError as error:
        raise MalformedMessage(f"the body did not arrive within {BODY_WITHIN_S:g} s") from error
    return Body(_parse(data))


async def _read(receive: Receive, max_bytes: int) -> bytes:
    parts, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away before its request was whole")
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise MessageTooLarge(f"the body has more than {max_bytes} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _parse(data: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, absurd numbers; nested too deeply
        raise MalformedMessage(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedMessage("the body is not a JSON object")
    if len(fields) > MAX_FIELDS:
        raise MalformedMessage(f"the body has {len(fields)} fields; at most {MAX_FIELDS} are allowed")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


class Body:
    """The fields of an object. What nobody took is unknown."""

    def __init__(self, fields: Mapping[str, Any], path: str = "") -> None:
        self._fields = fields
        self._path = path
        self._taken: set[str] = set()

    def take(self, name: str) -> Any:
        """As it is, or None."""
        self._taken.add(name)
        return self._fields.get(name)

    def path(self, name: str) -> str:
        """The field's name in errors."""
        return f"{self._path}.{name}" if self._path else name

    def unknown(self) -> list[str]:
        return sorted(self._fields.keys() - self._taken)

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
        """An object in this one; an empty one if it is absent."""
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
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair
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
