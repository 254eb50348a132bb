"""Provides a coordinator with one prefill and one decode worker. Files that need other ones have their own."""

from __future__ import annotations

import pytest

from services.router.policy import Role
from tests.support.router_bench import Bench


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    return bench
