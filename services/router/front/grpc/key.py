"""Asks callers of the public gRPC services for their keys, before a byte of their requests is read."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import unquote

import grpc

from services.core.addresses import bare_host, network_of
from services.core.errors import InvalidKey
from services.router.tenants.gate import Gate
from services.router.tenants.tenant import Tenant
from services.rpc import status
from services.rpc.interceptors import CallContext, Handler

KEY = "authorization"
_SERVICE = "/baton.v1.InferenceService/"


def tenant_of(gate: Gate, context: CallContext) -> Tenant:
    """Returns the tenant of a call. Raises InvalidKey, also for a key that was taken away since the call began."""
    return gate.tenant_of(_given(context.invocation_metadata()))


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without a valid key. It is the outermost interceptor, so that the others cost such a call nothing: it
    waits for no message and for no client, so it needs none of their bounds."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        if method.startswith(_SERVICE) and not self._gate.is_open:
            try:
                self._gate.tenant_of(_given(handler_call_details.invocation_metadata))
            except InvalidKey as error:
                return self._refusal(method, error)
        return await continuation(handler_call_details)

    def _refusal(self, method: str, error: InvalidKey) -> Handler:
        error.__traceback__ = None  # its frames have the call's metadata

        async def refuse(requests: Any, context: CallContext) -> None:
            self._gate.log_refusal(error, method, lambda: _address(context.peer()))
            status.end_as(context, _parts(str(error)))

        refuses: Handler = grpc.stream_stream_rpc_method_handler(refuse)  # it can end every kind of RPC
        return refuses


@functools.lru_cache(maxsize=64)
def _parts(message: str) -> status.StatusParts:
    """Returns what a refusal is sent as. There are few messages, and a flood of calls that need them."""
    return status.status_parts(InvalidKey(message))


def _address(peer: str) -> str:
    """Returns whose a connection is that the runtime calls so, such as `ipv4:127.0.0.1:1` or `ipv6:%5B::1%5D:1`."""
    kind, _, rest = peer.partition(":")
    return network_of(bare_host(unquote(rest))) if kind in ("ipv4", "ipv6") else peer


def _given(metadata: Iterable[tuple[str, str | bytes]] | None) -> list[str]:
    """Returns the values of the call's `authorization`."""
    return [str(value) for key, value in metadata or () if key == KEY]
