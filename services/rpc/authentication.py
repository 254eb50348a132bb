"""Lets only callers of the cluster call an RPC, except for the services named here, which anyone may call.

A caller shows the cluster token, or a certificate that names its role, or both, as the server is told. Owns: the list
of open services and of who may call the others, the form of the token's credential, its comparison, and that refusals
are logged once a second. Never: where the token comes from (`core/cluster_token.py`), nor what a caller with it may do:
there is one token, and who has it is trusted with all of the control plane (docs/security.md).
"""

from __future__ import annotations

import contextlib
import hmac
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc

from services.core.errors import MalformedMessage, Unauthenticated
from services.core.printable import printable
from services.rpc.interceptors import Handler

logger = logging.getLogger(__name__)

FOR_ANYONE = frozenset(
    {
        "baton.v1.InferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
)
"""Services that anyone may call. Every other service is closed, and so is a new one."""

ROUTER, WORKER, STORE, OPERATOR = "router", "worker", "store", "operator"
"""Roles in a cluster, as certificates name them."""
CALLERS: dict[str, frozenset[str]] = {
    "baton.v1.RegistryService": frozenset((WORKER, STORE)),
    "baton.v1.WorkerService": frozenset((ROUTER,)),
    "baton.v1.KVTransferService": frozenset((WORKER, STORE)),
    "baton.v1.ControlService": frozenset((OPERATOR,)),
    # A store asks which workers there are, to learn what it is to keep.
    "baton.v1.ControlService/GetStatus": frozenset((OPERATOR, STORE)),
}
"""Which roles may call a service, or one method of it, where certificates are asked for. Nobody may call the others."""

_KEY = "authorization"
_LOG_EVERY_S = 1.0


def credentials(token: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call that needs the token."""
    return ((_KEY, f"Bearer {token}"),)


def identity(role: str) -> str:
    """Returns the SPIFFE ID by which a certificate names its owner's role: the one URI among its alternative names."""
    return f"spiffe://baton/{role}"


def server_name(role: str) -> str:
    """Returns the DNS name that the certificate of a process with the role has, beside those of its hosts.

    Within a cluster, who dials asks for this name, not for the host's: addresses of workers are as passing as they are,
    and no worker can pass for a router. Clients of gRPC look at no SPIFFE ID. A worker and a store are told apart only
    as callers.
    """
    return f"{WORKER if role == STORE else role}.baton.internal"


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of strangers before a byte of their messages is read."""

    def __init__(self, token: str | None, *, by_role: bool = False) -> None:
        """Callers must have the `token`, if there is one, and with `by_role` show a certificate whose role may call.

        Without either, nobody can use the services that are closed.
        """
        self._expected = None if token is None else credentials(token)[0][1].encode()
        self._by_role = by_role
        self._refusals = RefusalLog(logger)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # there is nothing to protect: the runtime answers UNIMPLEMENTED
            return None
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if method.rpartition("/")[0].removeprefix("/") in FOR_ANYONE:
            return handler
        if self._expected is not None or not self._by_role:
            given = [value for key, value in metadata or () if key == _KEY]
            if not self._has_token(given):
                has = "another token" if given else "no token"
                return self._refusal(method, f"{method} needs the cluster token; the call has {has}", has)
        return self._asking_for_role(handler, method) if self._by_role else handler

    def _has_token(self, given: list[str | bytes]) -> bool:
        """Returns whether the call gave the token exactly once.

        The comparison takes constant time, so that its duration does not reveal how much of a guess is right.
        """
        if self._expected is None or len(given) != 1:
            return False
        value = given[0].encode(errors="replace") if isinstance(given[0], str) else given[0]
        return hmac.compare_digest(value, self._expected)

    def _refusal(self, method: str, message: str, what: str) -> Handler:
        async def refuse(requests: Any, context: Any) -> AsyncIterator[Any]:
            self._refusals.log_refusal(context.peer, method, what)
            raise Unauthenticated(message)
            yield  # makes this an async generator: a stream handler can end every kind of RPC

        refuses: Handler = grpc.stream_stream_rpc_method_handler(refuse)
        return refuses

    def _asking_for_role(self, found: Handler, method: str) -> Handler:
        """Returns the handler with a look at the caller's certificate before it.

        It is one of streams, whatever the RPC is, which on the wire is the same: only such a one can end a call before
        its first message has come.
        """
        handler: Any = found
        allowed = allowed_callers(method)
        behavior = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary

        async def respond(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            self._demand_role(allowed, method, context)
            outcome = behavior(requests if handler.request_streaming else await _only(requests), context)
            if inspect.isawaitable(outcome):
                response = await outcome
                if not handler.response_streaming:  # else the handler has written through the context itself
                    yield response
                return
            async with contextlib.aclosing(outcome) as responses:
                async for response in responses:
                    yield response

        asking: Handler = grpc.stream_stream_rpc_method_handler(
            respond, handler.request_deserializer, handler.response_serializer
        )
        return asking

    def _demand_role(self, allowed: frozenset[str], method: str, context: Any) -> None:
        role = role_of(context.auth_context())
        if role not in allowed:
            has = f"a certificate of role {printable(role)}" if role else "no certificate that names a role"
            self._refusals.log_refusal(context.peer, method, has)
            may = " or ".join(sorted(allowed)) or "nobody"
            raise Unauthenticated(f"{method} is for {may}, by certificate ({identity('ROLE')}); the call has {has}")


def allowed_callers(method: str) -> frozenset[str]:
    """Returns the roles that may call `/package.Service/Method`."""
    name = method.removeprefix("/")
    return CALLERS.get(name) or CALLERS.get(name.rpartition("/")[0]) or frozenset()


def role_of(authentication: Mapping[str, Iterable[bytes]]) -> str:
    """Returns the role that the certificate of a call's client names; empty without one. A certificate with more than
    one URI names none.

    The certificate itself is read: of its names the runtime tells only what comes before a NUL.
    """
    from cryptography import x509  # it takes its time, in commands that ask nobody for a role

    try:
        leaf = x509.load_pem_x509_certificate(b"".join(authentication.get("x509_pem_cert", ())))
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # it raises errors of several kinds: nothing that cannot be read names a role
        return ""
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    prefix = identity("")
    return uris[0].removeprefix(prefix) if len(uris) == 1 and uris[0].startswith(prefix) else ""


async def _only(requests: AsyncIterator[Any]) -> Any:
    try:
        return await anext(requests)
    except StopAsyncIteration:
        raise MalformedMessage("the stream ended without a request") from None


class RefusalLog:
    """Logs refused calls, at most one line a second, so that a caller who never stops cannot fill the log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._num_unlogged = 0
        self._next_s = 0.0

    def log_refusal(self, peer: Callable[[], str], method: str, what: str) -> None:
        """Logs a refusal, or counts it for the next line. `peer` returns whose call it was, for a line."""
        now = time.monotonic()
        if now < self._next_s:
            self._num_unlogged += 1
            return
        more = f" ({self._num_unlogged} more before)" if self._num_unlogged else ""
        self._log.warning("refused %s of %s: %s%s", method, peer() or "an unknown peer", what, more)
        self._num_unlogged, self._next_s = 0, now + _LOG_EVERY_S
