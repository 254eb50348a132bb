"""What the client commands share: a channel, messages as plain data, a failed call as an error that reads well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from services.core.errors import BatonError, ConfigError
from services.rpc import status
from services.rpc.options import channel_options


@contextlib.contextmanager
def connect(target: str) -> Iterator[grpc.Channel]:
    """A channel to `HOST:PORT`, closed at the end. Calls that fail inside raise BatonError naming the target."""
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--target: {target!r} is not HOST:PORT")
    with grpc.insecure_channel(target, options=channel_options()) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise explain(error, target) from error


def explain(error: grpc.RpcError, target: str) -> BatonError:
    """The failed call, in one line that starts with its status code."""
    code, reason = error.code().name, str(status.from_call(error))
    return BatonError(f"{target}: {code}: {reason.removeprefix(f'{code}: ')}")


def plain(message: Message) -> dict[str, Any]:
    """The message as data for JSON: names as in the proto, enums as short lower-case words, bytes in hex.

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
        prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
        known = field.enum_type.values_by_number.get(value)
        return known.name.removeprefix(prefix).lower() if known is not None else value
    return value.hex() if isinstance(value, bytes) else value
