"""Tests the table from errors to statuses, and back."""

from __future__ import annotations

import logging

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from services.core import errors
from services.rpc import status


def leaves(kind: type[errors.BatonError] = errors.BatonError) -> list[type[errors.BatonError]]:
    """Returns all errors but the root: what is a kind of another is raised beside it."""
    below = [sub for sub in kind.__subclasses__() if sub.__module__ == errors.__name__]
    return [leaf for sub in below for leaf in (sub, *leaves(sub))]


def sample(leaf: type[errors.BatonError]) -> errors.BatonError:
    if issubclass(leaf, errors.InvalidRequest):
        return leaf("sampling.top_p", "must be in (0, 1]")
    return leaf("what happened", retry_after_s=2.5)


def unpack(message: status_pb2.Status, kind: type[Message]) -> list:
    found = []
    for packed in message.details:
        if packed.Is(kind.DESCRIPTOR):
            found.append(kind())
            packed.Unpack(found[-1])
    return found


def test_the_table_has_exactly_the_leaves_and_their_reasons_differ():
    assert set(status.CODES) == set(leaves())
    assert len({leaf.reason for leaf in leaves()}) == len(leaves())


@pytest.mark.parametrize("leaf", leaves(), ids=lambda leaf: leaf.__name__)
def test_each_leaf_survives_the_wire(leaf):
    error = sample(leaf)
    sent = status_pb2.Status.FromString(status.to_status(error).SerializeToString())
    received = status.from_status(sent)
    assert sent.code == status.CODES[leaf].value[0] != 0
    assert type(received) is leaf
    assert str(received) == str(error)
    assert received.retry_after_s == error.retry_after_s
    (info,) = unpack(sent, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == (leaf.reason, "baton")


@pytest.mark.parametrize("kind", [errors.InvalidRequest, errors.ContextLengthExceeded])
def test_an_invalid_field_is_named_in_bad_request(kind):
    sent = status.to_status(kind("stopping.max_tokens", "must be at least 1"))
    (detail,) = unpack(sent, error_details_pb2.BadRequest)
    (violation,) = detail.field_violations
    assert (violation.field, violation.description) == ("stopping.max_tokens", "must be at least 1")
    received = status.from_status(sent)
    assert isinstance(received, errors.InvalidRequest)
    assert type(received) is kind
    assert received.field == "stopping.max_tokens"


@pytest.mark.parametrize("leaf", [errors.Overloaded, errors.NoWorker, errors.Draining])
def test_what_may_be_retried_says_when(leaf):
    (retry,) = unpack(status.to_status(leaf("busy")), error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToTimedelta().total_seconds() == status.DEFAULT_RETRY_AFTER_S
    (retry,) = unpack(status.to_status(leaf("busy", retry_after_s=0.25)), error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 250


def test_overload_carries_a_quota_failure():
    (quota,) = unpack(status.to_status(errors.Overloaded("queue is full")), error_details_pb2.QuotaFailure)
    assert quota.violations[0].description == "queue is full"


@pytest.mark.parametrize("error", [ValueError("secret path"), errors.BatonError("secret path")])
def test_the_unforeseen_is_opaque_outside_and_whole_in_the_log(error, caplog):
    with caplog.at_level(logging.ERROR):
        sent = status.to_status(error)
    (info,) = unpack(sent, error_details_pb2.ErrorInfo)
    assert sent.code == grpc.StatusCode.INTERNAL.value[0]
    assert b"secret" not in sent.SerializeToString()
    assert info.metadata["error_id"] in sent.message
    assert info.metadata["error_id"] in caplog.text
    assert "secret path" in caplog.text


def test_a_subclass_takes_the_code_above_it():
    class QuotaSpent(errors.Overloaded):
        reason = "QUOTA_SPENT"

    assert status.code_of(QuotaSpent("x")) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_statuses_made_by_the_runtime_are_understood_by_code():
    unavailable = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="connection refused")
    assert isinstance(status.from_status(unavailable), errors.NoWorker)
    unknown = status.from_status(
        status_pb2.Status(code=grpc.StatusCode.UNIMPLEMENTED.value[0], message="no such method")
    )
    assert type(unknown) is errors.BatonError
    assert str(unknown) == "UNIMPLEMENTED: no such method"


def test_a_very_long_message_is_clipped_to_what_trailers_hold():
    sent = status.to_status(errors.InvalidRequest("f" * 10_000, "\N{PILE OF POO}" * 10_000))
    assert len(sent.SerializeToString()) * 4 / 3 + 3 * len(sent.message.encode()) < 8000


@pytest.mark.parametrize("seconds", [-(1 << 62), 0, 5, 1 << 62])
def test_a_peers_broken_details_do_no_harm(seconds: int) -> None:
    """Durations out of range; bytes that are no detail."""
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds, retry.retry_delay.nanos = seconds, -(1 << 31)
    broken = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="later")
    broken.details.add().Pack(retry)
    for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest):
        broken.details.add(type_url=f"type.googleapis.com/{kind.DESCRIPTOR.full_name}", value=b"\xff\xff")
    error = status.from_status(broken)
    assert isinstance(error, errors.NoWorker)
    assert error.retry_after_s is not None
    assert 0 <= error.retry_after_s <= 3600
    status.to_status(error)
