"""Tests that some requests count for a latency objective, and others do not."""

from __future__ import annotations

import pytest

from services.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    UnknownModel,
    WorkerFailed,
)
from services.router.telemetry.slo import Grade, grade, grade_failed

TARGET_S = 0.5


@pytest.mark.parametrize(
    ("elapsed_s", "expected"),
    [(0.0, Grade.MET), (0.4, Grade.MET), (0.41, Grade.NEAR), (0.5, Grade.NEAR), (0.51, Grade.MISSED)],
)
def test_what_has_happened(elapsed_s: float, expected: Grade) -> None:
    assert grade(elapsed_s, TARGET_S) is expected


@pytest.mark.parametrize(
    ("error", "elapsed_s", "expected"),
    [
        (WorkerFailed("x"), 0.1, Grade.MISSED),
        (Overloaded("x"), 0.0, Grade.MISSED),
        (RuntimeError("a defect"), 0.1, Grade.MISSED),
        (Cancelled("x"), 0.1, None),
        (Cancelled("x"), 0.6, Grade.MISSED),
        (DeadlineExceeded("x"), 0.5, None),
        (DeadlineExceeded("x"), 0.6, Grade.MISSED),
        (InvalidRequest("x", "y"), 9.0, None),
        (ContextLengthExceeded("x", "y"), 9.0, None),
        (UnknownModel("x"), 9.0, None),
    ],
)
def test_what_will_never_happen(error: BaseException, elapsed_s: float, expected: Grade | None) -> None:
    assert grade_failed(error, elapsed_s, TARGET_S) is expected
