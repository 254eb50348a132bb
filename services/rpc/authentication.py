"""Lets only callers with the cluster token call an RPC, except for the services named here, which anyone may call.

Owns: the list of open services, the form of the credential, its comparison, and that refusals are logged once a second.
Never: where the token comes from (`core/cluster_token.py`), nor what a caller with it may do: there is one token, and
who has it is trusted with all of the control plane (docs/security.md).
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from services.core.errors import Unauthenticated
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
"""Services that anyone may call. Every other service needs the token, and so does a new one."""

_KEY = "authorization"
_LOG_EVERY_S = 1.0


def credentials(token: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call that needs the token."""
    return ((_KEY, f"Bearer {token}"),)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the token before a byte of their messages is read."""

    def __init__(self, token: str | None) -> None:
        """Without a `token`, no caller can use the services that need one."""
        self._expected = None if token is None else credentials(token)[0][1].encode()
        self._refusals = _RefusalLog()

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
        given = [value for key, value in metadata or () if key == _KEY]
        if self._has_token(given):
            return handler
        return self._refusal(method, "another token" if given else "no token")

    def _has_token(self, given: list[str | bytes]) -> bool:
        """Returns whether the call gave the token exactly once.

        The comparison takes constant time, so that its duration does not reveal how much of a guess is right.
        """
        if self._expected is None or len(given) != 1:
            return False
        value = given[0].encode(errors="replace") if isinstance(given[0], str) else given[0]
        return hmac.compare_digest(value, self._expected)

    def _refusal(self, method: str, what: str) -> Handler:
        async def refuse(requests: Any, context: Any) -> AsyncIterator[Any]:
            self._refusals.log_refusal(context.peer(), method, what)
            raise Unauthenticated(f"{method} needs the cluster token; the call has {what}")
            yield  # makes this an async generator: a stream handler can end every kind of RPC

        refuses: Handler = grpc.stream_stream_rpc_method_handler(refuse)
        return refuses


class _RefusalLog:
    """Logs refused calls, at most one line a second, so that a caller who never stops cannot fill the log."""

    def __init__(self) -> None:
        self._num_unlogged = 0
        self._next_s = 0.0

    def log_refusal(self, peer: str, method: str, what: str) -> None:
        now = time.monotonic()
        if now < self._next_s:
            self._num_unlogged += 1
            return
        more = f" ({self._num_unlogged} more before)" if self._num_unlogged else ""
        logger.warning("refused %s of %s: %s%s", method, peer, what, more)
        self._num_unlogged, self._next_s = 0, now + _LOG_EVERY_S
