"""Provides the kernels of each instruction set that was built here and that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.engine.native import bindings
from services.engine.native.bindings import Kernels
from services.engine.native.instruction_sets import VARIABLE, instruction_sets


@pytest.fixture(params=[each.name for each in instruction_sets()])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Yields the kernels that the process uses as long as the test runs."""
    monkeypatch.setenv(VARIABLE, request.param)
    wanted = next(each for each in instruction_sets() if each.name == request.param)
    usable = bindings.usable()
    if wanted not in usable:
        pytest.skip(f"this processor has no {wanted.name}, or may not use it")
    if not wanted.shared_object.exists():
        pytest.skip(f"not built here: BATON_CPU_ISA={wanted.name} python -m services.engine.native.build")
    bindings.kernels.cache_clear()
    try:
        found = bindings.kernels()
        assert found is not None
        yield found
    finally:
        bindings.kernels.cache_clear()
