"""Draws random requests from their descriptors: valid in structure and wild in content, then also cut, spliced and
scrambled.

Owns: what is drawn. Never: sends anything. `harmless` keeps every address on this machine: whoever receives a message
may dial what stands in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

Strategy = st.SearchStrategy[Any]
Overrides = Mapping[str, Strategy]
"""By full name of a field or a message, such as baton.v1.KVSource.address: what to draw instead, one time in two."""

_NAN, _INF = float("nan"), float("inf")
_FLOATS = st.sampled_from([0.0, -0.0, 1e-45, 1e-30, 0.5, 1.0, 2.0, 100.0, -1.0, 3e38, -3e38, _NAN, _INF, -_INF])
_TEXTS = st.one_of(
    st.sampled_from(["", "user", "a", "\x00", "\n", "\u202e", "🙂", "x" * 200, "%s{}", "../../etc"]),
    st.text(max_size=12),
)
_BYTES = st.one_of(st.sampled_from([b"", bytes(16), b"\xff" * 16, b"x" * 17]), st.binary(max_size=20))
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_UNEXACT = (1 << 53) + 1
"""The first whole number that a double cannot hold."""
_OVERFLOWS = 9_300_000_000_000_000
"""Its thousandfold no longer fits 64 bits."""
_EXTREME_FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    _NAN,
    _INF,
    -_INF,
    1e-45,
    3.4e38,
    -3.4e38,
    1e300,
    -1e300,
    9.3e15,
    float(_UNEXACT),
]
_SMALL = [0, 1, 2, 3, 5, 20, 64, 319, 320, -1, -2]
_FLOATING = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
_MAX_REPEATED = 4


def messages(kind: type[Message], overrides: Overrides | None = None) -> Strategy:
    """Returns a strategy for messages of `kind`."""
    return _message(kind.DESCRIPTOR, overrides or {}).map(lambda fields: _built(kind, fields))


def payloads(kind: type[Message], overrides: Overrides | None = None) -> Strategy:
    """Bytes to send where `kind` is expected: mostly messages; the rest no longer is, or is by chance."""
    valid = messages(kind, overrides).map(lambda message: message.SerializePartialToString())
    cut = st.builds(lambda data, share: data[: int(len(data) * share)], valid, st.floats(0, 1))
    spliced = st.builds(bytes.__add__, valid, valid)  # of a oneof the last one counts
    scrambled = st.builds(_scrambled, valid, st.integers(0, 1 << 16), st.integers(1, 255))
    return st.one_of(valid, valid, valid, cut, spliced, scrambled, st.binary(max_size=64))


def extremes(base: Message) -> Iterator[tuple[str, Message]]:
    """Yields (what it is, message) for each number that a message of this kind may hold, at any
    depth, and each extreme of
    its type: `base` with that one number in it. Of a oneof the field that is set takes the other's place."""
    for path, field in _numbers(base.DESCRIPTOR):
        for value in _extremes(field):
            message = type(base)()
            message.CopyFrom(base)
            holder = message
            for step in path:
                part = getattr(holder, step.name)
                holder = part.add() if step.is_repeated and not part else part[0] if step.is_repeated else part
                if not step.is_repeated:
                    holder.SetInParent()
            if field.is_repeated:
                getattr(holder, field.name).append(value)
            else:
                setattr(holder, field.name, value)
            yield f"{'.'.join(step.name for step in (*path, field))}={value!r}", message


def _numbers(
    descriptor: Descriptor, path: tuple[FieldDescriptor, ...] = ()
) -> Iterator[tuple[tuple[FieldDescriptor, ...], FieldDescriptor]]:
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type not in [step.message_type for step in path]:
            yield from _numbers(field.message_type, (*path, field))
        elif field.cpp_type in _INTEGERS or field.cpp_type in _FLOATING or field.enum_type is not None:
            yield path, field


def _extremes(field: FieldDescriptor) -> list[Any]:
    if field.cpp_type in _FLOATING:
        return _EXTREME_FLOATS
    low, high = _INTEGERS.get(field.cpp_type, _INTEGERS[FieldDescriptor.CPPTYPE_INT32])
    return [value for value in (0, 1, -1, low, high, _UNEXACT, _OVERFLOWS) if low <= value <= high]


def harmless(data: bytes, kind: type[Message], addresses: Sequence[str], sockets: Sequence[str]) -> bytes:
    """Returns the same bytes unless they hold an address (of a host or a Unix socket) that is not among those given."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return data
    changed = _tame(message, {"address": addresses, "shm_socket": sockets})
    return message.SerializePartialToString() if changed else data


def _message(descriptor: Descriptor, overrides: Overrides) -> Strategy:
    """Returns a strategy for messages as {field name: value}; each field is there one time in two."""
    fields = {field.name: _field(field, overrides) for field in descriptor.fields}
    drawn = st.fixed_dictionaries({}, optional=fields)
    special = overrides.get(descriptor.full_name)
    return drawn if special is None else st.one_of(drawn, special)


def _field(field: FieldDescriptor, overrides: Overrides) -> Strategy:
    one = _value(field, overrides)
    drawn = st.lists(one, max_size=_MAX_REPEATED) if field.is_repeated else one
    special = overrides.get(field.full_name)
    return drawn if special is None else st.one_of(drawn, special)


def _value(field: FieldDescriptor, overrides: Overrides) -> Strategy:
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        small = [number for number in _SMALL if number >= low]
        return st.one_of(st.sampled_from([*small, low, high]), st.integers(low, high))
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            return _message(field.message_type, overrides)
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return st.one_of(_FLOATS, st.floats(width=32))
        case FieldDescriptor.CPPTYPE_ENUM:
            return st.sampled_from([*(value.number for value in field.enum_type.values), 99, -1, (1 << 31) - 1])
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case _:
            return _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS


def _built(kind: type[Message], fields: Mapping[str, Any]) -> Message:
    message = kind()
    _fill(message, fields)
    return message


def _fill(message: Message, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.is_repeated and field.message_type is not None:
            for entry in value:
                _fill(getattr(message, name).add(), entry)
        elif field.is_repeated:
            getattr(message, name).extend(value)
        elif field.message_type is not None:
            getattr(message, name).SetInParent()
            _fill(getattr(message, name), value)
        else:
            setattr(message, name, value)


def _scrambled(data: bytes, at: int, by: int) -> bytes:
    if not data:
        return data
    at %= len(data)
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


def _tame(message: Message, allowed: Mapping[str, Sequence[str]]) -> bool:
    changed = False
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                changed |= _tame(part, allowed)
        elif field.name in allowed and value not in allowed[field.name]:
            setattr(message, field.name, allowed[field.name][len(value) % len(allowed[field.name])])
            changed = True
    return changed


def tagged(number: int, data: bytes) -> bytes:
    """Returns the bytes of a message's field that holds bytes."""
    size, length = len(data), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    tag = number << 3 | 2
    return (bytes([tag]) if tag < 0x80 else bytes([tag & 0x7F | 0x80, tag >> 7])) + bytes(length) + data
