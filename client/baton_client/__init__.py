"""Provides `Client` and `AsyncClient` of Baton. Requests and answers are the messages of `baton.v1`."""

from baton_client.aio import AsyncClient, AsyncResponseStream
from baton_client.client import Client, ResponseStream
from baton_client.constraints import choices, grammar, json_object, json_schema, regex
from baton_client.errors import (
    CallCancelled,
    CallFailed,
    CallTimedOut,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    from_rpc_error,
)
from baton_client.retries import ONCE, RetryPolicy

__all__ = [
    "ONCE",
    "AsyncClient",
    "AsyncResponseStream",
    "CallCancelled",
    "CallFailed",
    "CallTimedOut",
    "Client",
    "InvalidArgument",
    "NotFound",
    "ResourceExhausted",
    "ResponseStream",
    "RetryPolicy",
    "Unavailable",
    "choices",
    "from_rpc_error",
    "grammar",
    "json_object",
    "json_schema",
    "regex",
]
