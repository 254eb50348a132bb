"""Makes data for JSON of messages, in the form in which commands and the console show them.

Owns: that form. Never: which messages are shown.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """Returns the message as data for JSON: names as in the proto, enums as short lower-case words, bytes in hex.

    Fields with presence appear only when they are set, all others always.
    """
    data: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            data[field.name] = [_plain_value(field, part) for part in getattr(message, field.name)]
        elif not field.has_presence or message.HasField(field.name):
            data[field.name] = _plain_value(field, getattr(message, field.name))
    return data


def _plain_value(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        return enum_word(field.enum_type, value) if value in field.enum_type.values_by_number else value
    return value.hex() if isinstance(value, bytes) else value


def enum_word(kind: EnumDescriptor, value: int) -> str:
    """Returns the value's name without the enum's, in lower case. Raises KeyError for a value that is unknown."""
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return kind.values_by_number[value].name.removeprefix(prefix).lower()
