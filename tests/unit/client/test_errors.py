"""Tests that a failed call becomes the client's exception: everything that the server's own table sends is read."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata

import baton_client
from baton_client import CallFailed, from_rpc_error
from services.core import errors
from services.rpc.status import CODES, DETAILS_KEY, code_of, retry_after_s, to_status

KINDS = {
    grpc.StatusCode.INVALID_ARGUMENT: baton_client.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: baton_client.NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: baton_client.ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: baton_client.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: baton_client.CallTimedOut,
    grpc.StatusCode.CANCELLED: baton_client.CallCancelled,
}


def raised(code: grpc.StatusCode, message: str | None, details: bytes | None) -> CallFailed:
    trailing = Metadata(("other-bin", b"x"), *([] if details is None else [(DETAILS_KEY, details)]))
    return from_rpc_error(AioRpcError(code, Metadata(), trailing, details=message))


def made(kind: type[errors.BatonError]) -> errors.BatonError:
    if issubclass(kind, errors.InvalidRequest):
        return kind("sampling.temperature", "must not be negative")
    return kind("what happened", retry_after_s=2.5)


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_every_error_of_the_servers_arrives_whole(kind: type[errors.BatonError]) -> None:
    sent = made(kind)
    code = code_of(sent)
    failed = raised(code, str(sent), to_status(sent).SerializeToString())
    assert type(failed) is KINDS.get(code, CallFailed)
    assert (failed.code, failed.message, failed.reason) == (code, str(sent), kind.reason)
    assert str(failed) == f"{code.name}: {sent}"
    assert failed.retry_after_s == retry_after_s(sent)
    violations = [(each.field, each.description) for each in failed.violations]
    wrong = issubclass(kind, errors.InvalidRequest)
    assert violations == ([("sampling.temperature", "must not be negative")] if wrong else [])


def test_a_status_of_the_runtimes_own_has_a_code_and_no_reason() -> None:
    failed = raised(grpc.StatusCode.UNAVAILABLE, "connection refused", None)
    assert isinstance(failed, baton_client.Unavailable)
    assert (failed.message, failed.reason) == ("connection refused", "")
    assert (failed.retry_after_s, failed.violations) == (None, ())


def test_a_code_without_a_class() -> None:
    failed = raised(grpc.StatusCode.DATA_LOSS, None, None)
    assert type(failed) is CallFailed
    assert str(failed) == "DATA_LOSS: "


def status_with(*details: any_pb2.Any) -> bytes:
    return status_pb2.Status(code=14, message="m", details=details).SerializeToString()


def packed(message: object) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


INFO = packed(error_details_pb2.ErrorInfo(reason="NO_WORKER", domain="baton", metadata={"key": "value"}))
GARBAGE = any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (b"\xff\xff\xff", ""),
        (status_with(GARBAGE, INFO), "NO_WORKER"),
        (status_with(packed(error_details_pb2.DebugInfo(detail="d")), INFO), "NO_WORKER"),
    ],
    ids=["no status", "a detail that is none", "an unknown detail"],
)
def test_what_cannot_be_read_hides_nothing_else(details: bytes, reason: str) -> None:
    failed = raised(grpc.StatusCode.UNAVAILABLE, "m", details)
    assert (type(failed), failed.message) == (baton_client.Unavailable, "m")
    assert (failed.reason, failed.retry_after_s) == (reason, None)


def test_a_delay_in_the_past_is_none_at_all() -> None:
    delay = error_details_pb2.RetryInfo()
    delay.retry_delay.seconds = -3
    failed = raised(grpc.StatusCode.UNAVAILABLE, "m", status_with(packed(delay)))
    assert failed.retry_after_s == 0.0
