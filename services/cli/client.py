"""Provides what the client commands share: a connection, messages as plain data, readable errors of failed calls."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from baton.v1 import control_pb2_grpc
from baton_client import ONCE, CallFailed, Client, Unavailable, from_rpc_error
from services.core.addresses import is_address
from services.core.cluster_token import ADVICE, cluster_token
from services.core.errors import BatonError, ConfigError
from services.core.printable import printable
from services.rpc.authentication import credentials
from services.rpc.options import channel_options

_NOBODY_THERE = ("failed to connect", "errors resolving", "DNS resolution failed")
"""How the runtime's messages begin where no connection came about; any other tells of one that has ended."""

ControlCall = Callable[[str, Message, float | None], Any]


@contextlib.contextmanager
def connect(target: str) -> Iterator[grpc.Channel]:
    """Yields a channel to `HOST:PORT`, which is closed at the end.

    Calls that fail in the block raise a BatonError that names the target. Raises ConfigError for a target of another
    form.
    """
    _check(target)
    with grpc.insecure_channel(target, options=channel_options()) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise explain(from_rpc_error(error), target) from error


@contextlib.contextmanager
def inference(target: str) -> Iterator[Client]:
    """Yields a client of the router at `HOST:PORT`, which is closed at the end; raises as `connect` does.

    Its calls are made once: a person who is told of a refusal decides whether to ask again.
    """
    _check(target)
    with Client(target, retry=ONCE, options=channel_options()) as client:
        try:
            yield client
        except CallFailed as error:
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                raise BatonError(f"{target}: this is not the router's port for clients (--port)") from error
            raise explain(error, target) from error


@contextlib.contextmanager
def control(target: str, token_file: str) -> Iterator[ControlCall]:
    """Yields `call(method name, request, timeout in seconds)` for the ControlService at a router's control port.

    Calls carry the cluster token. Raises as `connect` does; ConfigError also without a token.
    """
    metadata = credentials(cluster_token(token_file, make=False))
    with connect(target) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)

        def call(method: str, request: Message, timeout_s: float | None) -> Any:
            try:
                return getattr(stub, method)(request, timeout=timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    hint = "is this the router's control port (--control-port), and is the router running?"
                    raise BatonError(f"{target}: no answer within {timeout_s:g} s (--timeout); {hint}") from error
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                raise BatonError(f"{target}: this is not the router's control port (--control-port)") from error

        yield call


def explain(error: CallFailed, target: str) -> BatonError:
    """Returns the failed call's error, in one line that has the target first, and the status code."""
    if isinstance(error, Unavailable) and not error.reason:  # the runtime's own words: nothing of Baton's has answered
        if error.message.startswith(_NOBODY_THERE):
            hint = "no Baton answers there; is one running (baton up), and is this its port (--target)?"
        else:
            hint = "the connection was lost; has the router been stopped? If it is back, ask again."
        return BatonError(f"{target}: {hint} {error}")
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return BatonError(f"{target}: {error}; {ADVICE}")
    return BatonError(f"{target}: {error}")


def _check(target: str) -> None:
    if not is_address(target):
        raise ConfigError(f"--target: {target!r} is not HOST:PORT")


def shown(text: str) -> str:
    """Returns a model's text as it is printed: to a terminal without control characters, else unchanged."""
    return printable(text, keep="\n\t") if sys.stdout.isatty() else text


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
        prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
        known = field.enum_type.values_by_number.get(value)
        return known.name.removeprefix(prefix).lower() if known is not None else value
    return value.hex() if isinstance(value, bytes) else value
