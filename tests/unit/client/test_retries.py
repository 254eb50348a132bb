"""Tests when the client makes a call again: the decision alone, with a clock and a draw of the test's."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from baton_client import ONCE, CallFailed, RetryPolicy
from baton_client.retries import Attempts
from services.core import errors
from services.rpc.status import DETAILS_KEY, to_status

POLICY = RetryPolicy(max_attempts=3, first_pause_s=1.0, max_pause_s=5.0)


def failed(error: errors.BatonError) -> AioRpcError:
    """Returns the error as a call of gRPC's raises it."""
    status = to_status(error)
    trailing = Metadata((DETAILS_KEY, status.SerializeToString()))
    codes = {code.value[0]: code for code in grpc.StatusCode}
    return AioRpcError(codes[status.code], Metadata(), trailing, details=status.message)


def nobody() -> AioRpcError:
    """Returns the runtime's own error without a connection."""
    return AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details="connection refused")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def attempts(policy: RetryPolicy = POLICY, timeout_s: float | None = None, draw: float = 1.0) -> Attempts:
    return Attempts(policy, timeout_s, clock=Clock(), draw=lambda: draw)


def test_pauses_double_up_to_the_most_and_the_last_failure_is_raised() -> None:
    policy = RetryPolicy(max_attempts=5, first_pause_s=1.0, max_pause_s=3.0)
    each = attempts(policy)
    assert [each.pause_s(nobody()) for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
    last = nobody()
    with pytest.raises(CallFailed) as raised:
        each.pause_s(last)
    assert raised.value.__cause__ is last


@pytest.mark.parametrize(("draw", "pause_s"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_clients_that_were_refused_together_do_not_return_together(draw: float, pause_s: float) -> None:
    assert attempts(draw=draw).pause_s(nobody()) == pause_s


def test_the_server_says_how_long() -> None:
    assert attempts(draw=0.0).pause_s(failed(errors.NoWorker("none", retry_after_s=3.0))) == 3.5
    assert attempts().pause_s(failed(errors.Overloaded("full", retry_after_s=4.5))) == 5.0


def test_a_server_that_asks_for_longer_than_the_policy_allows_is_not_asked_again() -> None:
    with pytest.raises(CallFailed) as raised:
        attempts().pause_s(failed(errors.Overloaded("full", retry_after_s=5.5)))
    assert raised.value.retry_after_s == 5.5


@pytest.mark.parametrize("error", [errors.NoWorker("x"), errors.Draining("x"), errors.Overloaded("x")])
def test_what_was_refused_is_tried_again(error: errors.BatonError) -> None:
    assert attempts().pause_s(failed(error)) > 0


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("text", "no"),
        errors.MessageTooLarge("no"),  # RESOURCE_EXHAUSTED, and for good
        errors.UnknownModel("no"),
        errors.WorkerFailed("no"),  # UNAVAILABLE, but the request may be what workers die of
        errors.DeadlineExceeded("no"),
        errors.Cancelled("no"),
        errors.StepFailed("no"),
    ],
    ids=lambda error: error.reason,
)
def test_what_would_fail_again_or_do_harm_is_not(error: errors.BatonError) -> None:
    with pytest.raises(CallFailed) as raised:
        attempts().pause_s(failed(error))
    assert raised.value.reason == error.reason


def test_nothing_is_tried_again_once_something_was_received() -> None:
    each = attempts()
    each.received = True
    with pytest.raises(CallFailed):
        each.pause_s(nobody())


def test_once_is_once() -> None:
    with pytest.raises(CallFailed):
        attempts(ONCE).pause_s(nobody())


def test_one_deadline_for_all_attempts() -> None:
    clock = Clock()
    each = Attempts(POLICY, 2.5, clock=clock, draw=lambda: 1.0)
    assert each.remaining_s() == 2.5
    assert each.pause_s(nobody()) == 1.0
    clock.now_s += 1.0
    assert each.remaining_s() == 1.5
    with pytest.raises(CallFailed) as raised:  # a pause of 2 s would outlast it: told now, not then
        each.pause_s(nobody())
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE
    clock.now_s += 5.0
    assert each.remaining_s() == 0.0
    assert attempts().remaining_s() is None


@pytest.mark.parametrize(
    "values", [{"max_attempts": 0}, {"first_pause_s": 0.0}, {"first_pause_s": 6.0}, {"max_pause_s": 0.1}]
)
def test_a_policy_that_makes_no_sense_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least one attempt"):
        RetryPolicy(**values)  # type: ignore[arg-type]
