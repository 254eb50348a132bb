"""A question takes no more processor time than it may, and the first one has a bound of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from services.worker.confined_process import ConfinedFailure, ConfinedProcess

pytestmark = pytest.mark.process

PATIENCE_S = 300.0


@contextlib.contextmanager
def running(first_processor_s: int) -> Iterator[ConfinedProcess]:
    process = ConfinedProcess("tests.support.confined_child", str(first_processor_s))
    try:
        yield process
    finally:
        process.end()


def test_the_first_question_may_take_longer_than_the_others() -> None:
    with running(first_processor_s=10) as process:
        assert process.ask(2.2, within_s=PATIENCE_S, most_bytes=64) == 2.2
        assert process.ask(0, within_s=PATIENCE_S, most_bytes=64) == 0
        with pytest.raises(ConfinedFailure, match="too much processor time"):
            process.ask(2.2, within_s=PATIENCE_S, most_bytes=64)


def test_the_first_question_is_bounded_too() -> None:
    with running(first_processor_s=1) as process, pytest.raises(ConfinedFailure, match="too much processor time"):
        process.ask(2.2, within_s=PATIENCE_S, most_bytes=64)
