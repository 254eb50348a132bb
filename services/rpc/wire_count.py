"""Counts what a message's bytes would become, before they are parsed. Pure.

Two bytes can be an empty message of a repeated field, which takes about a hundred bytes in memory; and fields that a
schema does not know are kept too. So a large message is walked first, until it ends or exceeds a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.core.errors import InvalidRequest, MalformedMessage

SMALL_BYTES = 64 << 10
"""Messages of at most this many bytes are not counted: they can do no harm."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10
_CONTINUED = bytes(range(0x80, 0x100))


@dataclass(frozen=True)
class MessageLimits:
    fields: int = 10_000
    """The most fields in all nested messages together; a repeated field counts once per occurrence."""
    elements: int = 1 << 20
    """The most numbers in packed fields, all together."""
    unknown_bytes: int = 64 << 10
    text_bytes: int = 1 << 30
    """The most bytes in one string."""


def check(data: bytes, descriptor: Any, limits: MessageLimits) -> None:
    """Raises InvalidRequest if the message exceeds `limits`, MalformedMessage if the bytes are no message.

    `descriptor` is that of the message's type.
    """
    if len(data) > SMALL_BYTES:
        _Walk(data, limits).message(descriptor, 0, len(data))


class _Walk:
    def __init__(self, data: bytes, limits: MessageLimits) -> None:
        self._data = data
        self._limits = limits
        self._num_fields = 0
        self._num_elements = 0
        self._unknown_bytes = 0

    def message(self, descriptor: Any, position: int, end: int) -> None:
        known = descriptor.fields_by_number
        while position < end:
            begin = position
            self._num_fields += 1
            if self._num_fields > self._limits.fields:
                raise InvalidRequest("", f"has more than {self._limits.fields} fields")
            tag, position = self._varint(position, end)
            kind, field = tag & 7, known.get(tag >> 3)
            position, after = self._value(kind, position, end)
            if field is None:
                self._unknown(after - begin)
            elif kind == _BYTES and field.message_type is not None:
                self.message(field.message_type, position, after)
            elif kind == _BYTES and field.cpp_type != field.CPPTYPE_STRING:
                self._packed(position, after)
            elif kind == _BYTES:
                self._text(field.name, after - position)
            position = after

    def _value(self, kind: int, position: int, end: int) -> tuple[int, int]:
        """Returns where the field's value begins and ends."""
        if kind == _VARINT:
            return position, self._varint(position, end)[1]
        if kind == _BYTES:
            size, position = self._varint(position, end)
        elif kind == _FIXED64:
            size = 8
        elif kind == _FIXED32:
            size = 4
        else:
            raise MalformedMessage("the bytes received have groups, or are no message")
        if size > end - position:
            raise MalformedMessage("the bytes received end within a field")
        return position, position + size

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 7 * _LONGEST_VARINT, 7):
            if position >= end:
                break
            byte = self._data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
        raise MalformedMessage("the bytes received end within a field")

    def _packed(self, position: int, end: int) -> None:
        """Counts the numbers of a packed field: each has exactly one byte without the continuation bit."""
        self._num_elements += len(self._data[position:end].translate(None, _CONTINUED))
        if self._num_elements > self._limits.elements:
            raise InvalidRequest("", f"has more than {self._limits.elements} numbers in a list")

    def _text(self, name: str, num_bytes: int) -> None:
        if num_bytes > self._limits.text_bytes:
            raise InvalidRequest(name, f"has {num_bytes} bytes of text; at most {self._limits.text_bytes} are allowed")

    def _unknown(self, num_bytes: int) -> None:
        self._unknown_bytes += num_bytes
        if self._unknown_bytes > self._limits.unknown_bytes:
            raise InvalidRequest("", f"has more than {self._limits.unknown_bytes} bytes in fields that are not known")
