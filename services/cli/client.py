"""Provides what the client commands share: a connection, messages as plain data, readable errors of failed calls."""

from __future__ import annotations

import argparse
import contextlib
import os
import ssl
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

from baton.v1 import control_pb2_grpc, inference_pb2
from baton_client import ONCE, AsyncClient, CallFailed, Client, Unavailable, from_rpc_error
from services.core.addresses import bare_host, is_address, is_loopback
from services.core.cluster_token import cluster_token, with_advice
from services.core.errors import BatonError, ConfigError, InvalidKey
from services.core.printable import printable
from services.rpc.authentication import ROUTER, credentials, server_name
from services.rpc.options import channel_options, name_options

if TYPE_CHECKING:
    from services.rpc.certificates import Certificates

_NOBODY_THERE = ("failed to connect", "errors resolving", "DNS resolution failed")
"""How the runtime's messages begin where no connection came about; any other tells of one that has ended."""

API_KEY = "BATON_API_KEY"
"""The variable with the key that client commands send. There is no flag, which every user of the machine could see."""

_CLOSED_AT_ONCE = "Socket closed"
"""What the runtime says where the other end has ended the handshake."""

ControlCall = Callable[[str, Message, float | None], Any]


@dataclass(frozen=True)
class Tls:
    """Is what a command shows to servers, and asks of them."""

    certificates: Certificates
    server_name: str = ""
    """The name that the server's certificate must have; the host's if empty."""


def tls_of(arguments: argparse.Namespace) -> Tls | None:
    """Returns what the flags of TLS say; None without any. Raises ConfigError, also if a token or key would cross a
    network in the clear without leave."""
    cert, key, ca = arguments.tls_cert, arguments.tls_key, arguments.tls_ca
    if not (cert or key or ca):
        target = arguments.target
        if is_address(target) and not arguments.allow_plain_token and not is_loopback(bare_host(target)):
            _demand_nothing_secret(arguments)
        return None
    if not ca:
        raise ConfigError("--tls-ca is missing: nobody who answers could be trusted")
    from services.rpc.certificates import Certificates  # it takes its time, in each check of a container's health

    return Tls(Certificates(cert, key, _ca_file(ca)), getattr(arguments, "tls_server_name", ""))


def _ca_file(ca: str) -> str:
    """Returns the file with the CAs that the flag names: gRPC brings CAs of its own, and does not know the system's."""
    if ca != "system":
        return ca
    paths = ssl.get_default_verify_paths()
    return paths.cafile or f"{paths.capath or '/etc/ssl/certs'}/ca-certificates.crt"


@contextlib.contextmanager
def connect(target: str, tls: Tls | None = None) -> Iterator[grpc.Channel]:
    """Yields a channel to `HOST:PORT`, which is closed at the end.

    Calls that fail in the block raise a BatonError that names the target. Raises ConfigError for a target of another
    form.
    """
    _check(target)
    if tls is None:
        opened = grpc.insecure_channel(target, options=channel_options())
    else:
        options: list[tuple[str, int | str]] = [*channel_options(), *name_options(tls.server_name)]
        opened = grpc.secure_channel(target, tls.certificates.channel_credentials(), options=options)
    with opened as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise explain(from_rpc_error(error), target, tls is not None) from error


@contextlib.contextmanager
def inference(target: str, tls: Tls | None = None) -> Iterator[Client]:
    """Yields a client of the router at `HOST:PORT`, which is closed at the end; raises as `connect` does.

    Its calls are made once: a person who is told of a refusal decides whether to ask again. They have the API key of
    the environment, if there is one.
    """
    _check(target)
    with Client(target, **_asking(tls)) as client:
        try:
            yield client
        except CallFailed as error:
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                raise BatonError(f"{target}: this is not the router's port for clients (--port)") from error
            raise explain(error, target, tls is not None) from error


def async_inference(target: str, arguments: argparse.Namespace) -> AsyncClient:
    """Returns a client of the router's port for clients at `HOST:PORT` that asks as `inference` does, by a command's
    flags. Raises ConfigError."""
    tls = tls_of(arguments)
    if tls is None and not arguments.allow_plain_token and not is_loopback(bare_host(target)):
        _demand_no_key(target)
    return AsyncClient(target, **_asking(tls))


def _asking(tls: Tls | None) -> dict[str, Any]:
    """Returns what a client asks with. Raises ConfigError."""
    key = os.environ.get(API_KEY, "").strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{API_KEY}: it is no API key")
    return {
        "credentials": None if tls is None else tls.certificates.channel_credentials(),
        "metadata": credentials(key) if key else (),
        "retry": ONCE,
        "options": [*channel_options(), *name_options("" if tls is None else tls.server_name)],
    }


@contextlib.contextmanager
def control(target: str, token_file: str, tls: Tls | None = None) -> Iterator[ControlCall]:
    """Yields `call(method name, request, timeout in seconds)` for the ControlService at a router's control port, which
    raises BatonError.

    Calls carry the cluster token if there is one here: what it asks for, the router says. Raises as `connect` does;
    ConfigError also if there is no token in the file that is named.
    """
    token = cluster_token(token_file, make=False)
    metadata = credentials(token) if token else ()
    if tls is not None:
        tls = Tls(tls.certificates, server_name(ROUTER))
    with connect(target, tls) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)

        def call(method: str, request: Message, timeout_s: float | None) -> Any:
            try:
                return getattr(stub, method)(request, timeout=timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    hint = "is this the router's control port (--control-port), and is the router running?"
                    raise BatonError(f"{target}: no answer within {timeout_s:g} s (--timeout); {hint}") from error
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    raise BatonError(f"{target}: this is not the router's control port (--control-port)") from error
                raise explain(from_rpc_error(error), target, tls is not None) from error

        yield call


def explain(error: CallFailed, target: str, has_tls: bool) -> BatonError:
    """Returns the failed call's error, in one line that has the target first, and the status code."""
    if isinstance(error, Unavailable) and not error.reason:  # the runtime's own words: nothing of Baton's has answered
        if hint := _hint_of_tls(error.message, has_tls):
            return BatonError(f"{target}: {hint} {error}")
        if error.message.startswith(_NOBODY_THERE):
            hint = "no Baton answers there; is one running (baton up), and is this its port (--target)?"
        else:
            hint = "the connection was lost; has the router been stopped? If it is back, ask again."
        return BatonError(f"{target}: {hint} {error}")
    if error.reason == InvalidKey.reason:
        return BatonError(f"{target}: {error}; {API_KEY} must have the key of a tenant (baton keys new NAME)")
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return BatonError(f"{target}: {with_advice(str(error))}")
    return BatonError(f"{target}: {error}")


def _demand_nothing_secret(arguments: argparse.Namespace) -> None:
    if hasattr(arguments, "cluster_token_file"):
        raise _in_the_clear("the cluster token", arguments.target)
    _demand_no_key(arguments.target)


def _demand_no_key(target: str) -> None:
    if os.environ.get(API_KEY, "").strip():
        raise _in_the_clear(f"the key in {API_KEY}", target)


def _in_the_clear(secret: str, target: str) -> ConfigError:
    return ConfigError(
        f"--target: {secret} would cross the network in the clear on its way to {printable(target)}: give "
        "--tls-ca, or --allow-plain-token if the network is private"
    )


def _hint_of_tls(message: str, has_tls: bool) -> str:
    """Returns what is wrong with TLS where no connection came about, if something is."""
    if not message.startswith(_NOBODY_THERE):
        return ""
    if "WRONG_VERSION_NUMBER" in message:
        return "no TLS is spoken there: leave --tls-ca (BATON_TLS_CA) out, or is this another port?"
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return "its certificate is not of the CAs in --tls-ca, or has expired."
    if "Hostname Verification" in message:
        return "its certificate is another's: of another host, or not of a router."
    if _CLOSED_AT_ONCE not in message:
        return ""
    if has_tls:
        return "it asks for a certificate of its CA that has not expired: give --tls-cert and --tls-key."
    return "it may speak TLS: give --tls-ca (BATON_TLS_CA)."


def _check(target: str) -> None:
    if not is_address(target):
        raise ConfigError(f"--target: {target!r} is not HOST:PORT")


def shown(text: str) -> str:
    """Returns a model's text as it is printed: to a terminal without control characters, else unchanged."""
    return printable(text, keep="\n\t") if sys.stdout.isatty() else text


class AnswerPrinter:
    """Prints an answer on standard output as it comes. What the model thinks is shown on a terminal only, dim and in
    lines of its own: elsewhere the output is the answer and nothing else."""

    def __init__(self) -> None:
        self._is_thinking = False

    def chunk(self, chunk: inference_pb2.Chunk) -> None:
        if chunk.reasoning and sys.stdout.isatty():
            self._is_thinking = True
            text = shown(chunk.reasoning)
            print(text if os.environ.get("NO_COLOR") else f"\x1b[2m{text}\x1b[0m", end="", flush=True)
        if chunk.text:
            print(("\n\n" if self._is_thinking else "") + shown(chunk.text), end="", flush=True)
            self._is_thinking = False
